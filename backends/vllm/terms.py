"""What the driver and the plug-in say to each other through vLLM's own HTTP answers. Imports nothing."""

from __future__ import annotations

# set in the engine's environment by the driver: the plug-in leaves every other vLLM of the machine alone
ACTIVATION = "ROOST_ENGINE"
# vLLM's own: where the server finds the bearer token that it asks for
TOKEN_VARIABLE = "VLLM_API_KEY"  # noqa: S105 - a name, not a secret
# raised when what the driver relies on changes
PLUGIN_VERSION = 3
# since when an engine takes many loads at once and lets steps run between them
PACES_LOADS = 3

ENGINE_ROUTE = "/roost/engine"

# how a failed load's message goes on: trying again will not help, or may
REFUSED = "adapter refused: "
FAILED = "adapter not loaded: "
# the engine's process can't map the arena's segment: the portable path may do
OUT_OF_REACH = "arena out of reach: "

# what a worker answers while an adapter's bytes are on their way
PENDING = "pending"
