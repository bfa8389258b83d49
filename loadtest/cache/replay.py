"""Replaying a trace through the arena's own index: its allocator, its rule of making room, and one policy."""

from __future__ import annotations

from typing import NamedTuple

from sidecar.cache import ArenaCache
from sidecar.extents import block_bytes
from sidecar.policies import PolicyName, make_policy

from .traces import Trace

# what bringing an adapter costs: a request to the store, and then its bytes
LATENCY_S = 0.03
BYTES_PER_S = 1e9


class Replayed(NamedTuple):
    """Shares of the bytes and of the asks that were missed, and of the arena that was full at the end."""

    byte_miss_ratio: float
    miss_ratio: float
    full: float


def replay(trace: Trace, policy: PolicyName) -> Replayed:
    """Every ask is a hit, or brings what it asks for. What is larger than the arena is left out."""
    sizes = [int(size) for size in trace.sizes]
    capacity = max(trace.capacity, max(block_bytes(size) for size in sizes))
    cache = ArenaCache(capacity, make_policy(policy, capacity))
    asked = missed = misses = 0
    now = 0.0
    names = [str(number) for number in range(len(sizes))]
    for key in trace.keys.tolist():
        name, size = names[key], sizes[key]
        asked += size
        if cache.resident(name):
            cache.touch(name)
            continue
        missed += size
        misses += 1
        cache.reserve(name, size, now)
        now += LATENCY_S + size / BYTES_PER_S
        cache.completed(name, now)
    return Replayed(missed / asked, misses / len(trace.keys), cache.used / cache.capacity)
