"""What the driver and what runs inside SGLang agree on. Imports nothing else."""

from __future__ import annotations

# where the server finds the bearer token that it asks for
TOKEN_VARIABLE = "ROOST_ENGINE_TOKEN"  # noqa: S105 - a name, not a secret
# SGLang's own: it chooses its CPU code by it, and we our stand-ins
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"
# raised when what the driver relies on changes
PLUGIN_VERSION = 1

# the names in PEFT of what an adapter may change, and ours
TARGETS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down",
}  # fmt: skip

# what a scheduler answers to a removal while an unfinished request names the adapter
BUSY = "adapter is in use by unfinished requests"
