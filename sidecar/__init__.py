"""The node's side of serving: leases, admission, cold loads, the arena of adapter bytes, and every engine slot.

``machine`` and what it is made of (``loads``, ``slots``, ``leases``, ``admission``, ``cache``, ``negative``) are pure:
events in, effects out, the time passed in. ``service`` performs the effects: sockets, files, threads and engines.
Imports wire, catalog, packer and backends' drivers; never gateway, never torch.
"""
