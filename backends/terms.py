"""What drivers and what runs inside the engines say to each other through the engines' own HTTP answers. Imports
nothing.
"""

from __future__ import annotations

# set in the engine's environment by the driver: what we add leaves every other server of the machine alone
ACTIVATION = "ROOST_ENGINE"

# where the server answers what runs inside it: limits, adapters, whether it reads the arena
ENGINE_ROUTE = "/roost/engine"

# how a failed load's message goes on: trying again will not help, or may
REFUSED = "adapter refused: "
FAILED = "adapter not loaded: "
# the engine's process can't map the arena's segment: the portable path may do
OUT_OF_REACH = "arena out of reach: "
