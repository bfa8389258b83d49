"""A trainer of many LoRA policies on one resident base, on megatron-core.

``control.py`` is the driver: it imports no torch, and starts, asks and restarts the ranks (``launcher.py``). All else
runs inside a rank (``rank.py``, ``resident.py``): the base (``hf_config.py``, ``model.py``, ``weights.py``), adapters
(``layout.py``, ``lora.py``, ``experts.py``), policies (``policy.py``, ``tiers.py``), and what is done with them
(``engine.py``).
"""
