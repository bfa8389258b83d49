"""How far from its first node a policy may go, and when."""

from __future__ import annotations

import msgspec

from gateway.popularity import REPLICA_LEASES

PLACED_EXCESS = 0.06
SPILL_EXCESS = 0.25


class Tuning(msgspec.Struct, frozen=True):
    """A node may have ``placed_excess`` more than its share of the adapters before a new one goes elsewhere, and
    ``spill_excess`` more before one whose bytes are there does; the latter bounds its share of the leases too, of which
    ``quiet_leases`` an engine are never too many.

    Whatever is placed anew costs a load wherever it goes, so that its bound may be tight; a spill costs one that would
    not be (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018).
    """

    placed_excess: float = PLACED_EXCESS
    spill_excess: float = SPILL_EXCESS
    quiet_leases: int = REPLICA_LEASES

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")
