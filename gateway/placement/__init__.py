"""Which node a request goes to: filters, then scorers clamped to 0..1, then one picker.

Gateways that see the same reports choose the same node for a policy: nothing here depends on time, chance or the
order in which nodes were listed.
"""

from .demand import Demand
from .pipeline import Placer

__all__ = ["Demand", "Placer"]
