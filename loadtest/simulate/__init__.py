"""A fleet in virtual time: the real gateways' and sidecars' code around a model of engines, network and storage.

Nothing here waits: an hour of an idle fleet takes seconds. What runs is ``sidecar.service.Sidecar`` with its machine
and engine keepers, and ``gateway``'s data plane, placement, node table, fleet and leases. A run follows from its seed.

- ``clock``: a loop whose time jumps; ``world``: all of a simulation, and its books; ``recorder``: its course
- ``node``, ``gateway``, ``registrar``: processes that start and die; ``faults``: what makes them
- ``network``, ``sockets``, ``upstream``: what lies between processes; ``client``: who asks
- ``engine`` and ``backend``: the engine's model, whose ``constants`` are fitted to a real one by ``roost loadtest
  calibrate``; ``storage``: the arena's memory, the artifact store, fetches; ``catalog``: what is published

Left out, so that no run says anything of it: the threads that fetch, and what they share; the disk tier; the arena's
memory and the digests of bytes; the wire's codec and its bounds; HTTP's parsing and its connections; how nodes join and
leave by the control plane (a gateway's nodes are set here); quotas.
"""
