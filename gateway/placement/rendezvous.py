"""Rendezvous (highest random weight) hashing: each policy has its own order of the nodes.

A node that joins or leaves moves only the policies that it wins or had won: 1/n of them, the theoretical minimum.
Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 6(1), 1998.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint64]

# the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class Rendezvous:
    """Orders ``names``, whatever order they come in."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)
        self._seeds: _Words = np.array([_word(name) for name in self._names], dtype=np.uint64)

    def order(self, policy: str) -> list[str]:
        """All names by falling weight for ``policy``; equal weights by name."""
        # the complement sorts from the heaviest to the lightest, and a stable sort keeps equal ones in their order
        weights = ~_mixed(self._seeds ^ np.uint64(_word(policy)))
        return [self._names[place] for place in np.argsort(weights, kind="stable")]


def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> _SHIFTS[0])) * _MULTIPLIERS[0]
    words = (words ^ (words >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return words ^ (words >> _SHIFTS[2])
