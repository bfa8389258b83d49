"""Engine backends: one interface, a driver for each engine, and the care of the engine processes.

A driver is imported by the sidecar, talks to one engine over the engine's own protocol and needs no torch; what runs
inside an engine's process lies beside its driver, or here and in ``arena`` where engines share it. Imports wire,
catalog and packer.
"""
