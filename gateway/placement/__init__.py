"""Which node a request goes to: filters, the policy's own order of the nodes, and one choice along it.

A policy should be on its first node, or on as many of the first as its load asks for (``gateway.popularity``). Where it
serves it is asked; a copy more is made beside that (``gateway.copies``). A node that has far more than its share is
passed over, for the share of its policies that is too much for it. So a join, a leave or a death moves no more than it
must, and gateways that see the same reports choose the same node: nothing depends on chance or on the order in which
nodes were listed. What a gateway knows of itself only keeps it from asking two nodes for one load.
"""

from .demand import Demand
from .placer import Placer
from .tuning import Tuning

__all__ = ["Demand", "Placer", "Tuning"]
