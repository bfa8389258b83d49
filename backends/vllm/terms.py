"""What the driver and the plug-in say to each other through vLLM's own HTTP answers. Imports nothing else."""

from __future__ import annotations

from backends.terms import ACTIVATION as ACTIVATION
from backends.terms import ENGINE_ROUTE as ENGINE_ROUTE
from backends.terms import FAILED as FAILED
from backends.terms import OUT_OF_REACH as OUT_OF_REACH
from backends.terms import REFUSED as REFUSED

# vLLM's own: where the server finds the bearer token that it asks for
TOKEN_VARIABLE = "VLLM_API_KEY"  # noqa: S105 - a name, not a secret
# raised when what the driver relies on changes
PLUGIN_VERSION = 3
# since when an engine takes many loads at once and lets steps run between them
PACES_LOADS = 3

# what a worker answers while an adapter's bytes are on their way
PENDING = "pending"
