"""vLLM: the driver (``driver``, ``client``, ``command``) and what runs inside the engine.

Only ``plugin``, ``server``, ``core``, ``worker``, ``arena``, ``cpu_kernels``, ``cpu_moe``, ``cpu_sampling`` and
``versions`` are loaded in vLLM's processes and may import vLLM. Both sides share ``terms``.
"""
