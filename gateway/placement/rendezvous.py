"""Rendezvous (highest random weight) hashing: each policy has its own order of the nodes.

A node that joins or leaves moves only the policies that it wins or had won: 1/n of them, the theoretical minimum.
Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 6(1), 1998.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def weight(policy: str, node: str) -> bytes:
    """The weight of ``node`` for ``policy``: 8 bytes, compared as a number would be."""
    # the length keeps ("a", "bc") and ("ab", "c") apart
    return hashlib.blake2b(f"{len(policy)}:{policy}{node}".encode(), digest_size=8).digest()


def order(policy: str, nodes: Iterable[str]) -> list[str]:
    """``nodes`` by falling weight for ``policy``, whatever order they came in."""
    return sorted(nodes, key=lambda node: (weight(policy, node), node), reverse=True)
