"""Cache policies, for the arena and for the disk tier: what leaves when room is needed. Pure; imports nothing."""

from __future__ import annotations

import enum

from .gdsf import Gdsf
from .interface import CachePolicy
from .lru import Lru
from .s3fifo import S3Fifo
from .sieve import Sieve

__all__ = ["CachePolicy", "Gdsf", "Lru", "PolicyName", "S3Fifo", "Sieve", "make_policy"]


class PolicyName(enum.StrEnum):
    """As a setting says it."""

    LRU = "lru"
    SIEVE = "sieve"
    S3FIFO = "s3fifo"
    GDSF = "gdsf"


def make_policy(name: PolicyName, capacity: int) -> CachePolicy:
    """A fresh policy for a cache of ``capacity`` bytes."""
    if name is PolicyName.LRU:
        return Lru()
    if name is PolicyName.SIEVE:
        return Sieve()
    return S3Fifo(capacity) if name is PolicyName.S3FIFO else Gdsf()
