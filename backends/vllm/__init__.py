"""vLLM: the driver (``driver``, ``client``, ``command``, ``folders``) and what runs inside the engine.

Only ``plugin``, ``server``, ``core``, ``worker`` and ``versions`` are loaded in vLLM's processes and may import vLLM.
"""
