"""Cache policies, for the arena and for the disk tier: what leaves when room is needed. Pure; imports nothing."""

from __future__ import annotations

import enum
from collections.abc import Callable

from .adaptive import Adaptive
from .fading import Fading
from .gdsf import Gdsf
from .interface import CachePolicy
from .lru import Lru
from .s3fifo import S3Fifo
from .sieve import Sieve

__all__ = ["CachePolicy", "PolicyName", "make_policy"]


class PolicyName(enum.StrEnum):
    """As a setting says it."""

    ADAPTIVE = "adaptive"
    LRU = "lru"
    FADING = "fading"
    S3FIFO = "s3fifo"
    SIEVE = "sieve"
    GDSF = "gdsf"


_MAKERS: dict[PolicyName, Callable[[int], CachePolicy]] = {
    PolicyName.ADAPTIVE: Adaptive,
    PolicyName.LRU: lambda capacity: Lru(),
    PolicyName.FADING: Fading,
    PolicyName.S3FIFO: S3Fifo,
    PolicyName.SIEVE: lambda capacity: Sieve(),
    PolicyName.GDSF: lambda capacity: Gdsf(),
}


def make_policy(name: PolicyName, capacity: int) -> CachePolicy:
    """A fresh policy for a cache of ``capacity`` bytes."""
    return _MAKERS[name](capacity)
