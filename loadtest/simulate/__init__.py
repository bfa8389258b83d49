"""A fleet in virtual time: the real gateways' and sidecars' code around a model of engines, network and storage.

Nothing here waits: an hour of an idle fleet takes seconds. What runs is ``sidecar.service.Sidecar`` with its machine
and engine keepers, and ``gateway``'s data plane, placement, node table, fleet and leases. Models are what lies between
processes (``network``, ``sockets``, ``upstream``), engines (``engine``, ``backend``), and the arena's memory and the
artifact store (``storage``). The engine's constants are fitted to a real one by ``roost loadtest calibrate``. A run
follows from its seed.
"""
