"""Rendezvous (highest random weight) hashing: each policy has its own order of the nodes.

A node that joins or leaves moves only the policies that it wins or had won: its share of them, the theoretical minimum.
Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN 6(1), 1998; with weights as in
Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint64]

# the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class Rendezvous:
    """Orders ``names``, whatever order they come in. ``weights`` are their shares; without them all are equal."""

    def __init__(self, names: Iterable[str], weights: Mapping[str, float] | None = None) -> None:
        self._names = sorted(names)
        self._seeds: _Words = np.array([word_of(name) for name in self._names], dtype=np.uint64)
        shares = [float(weights[name]) for name in self._names] if weights else []
        self._shares = np.array(shares) if len(set(shares)) > 1 else None

    def order(self, policy: str, count: int | None = None) -> list[str]:
        """The first ``count`` names (all of them without it) by falling weight for ``policy``; equal ones by name."""
        # what sorts from the heaviest to the lightest; a stable sort keeps equal ones in their order
        keys: npt.NDArray[np.uint64] | npt.NDArray[np.float64] = ~_mixed(self._seeds ^ np.uint64(word_of(policy)))
        if self._shares is not None:
            # -ln(1 - x) / share for x uniform in 0..1: an exponential draw whose rate is the share
            keys = -np.log1p(-(keys.astype(np.float64) / 2.0**64) * (1 - 2.0**-53)) / self._shares
        if count is None or count >= len(keys):
            return [self._names[place] for place in np.argsort(keys, kind="stable")]
        # those as light as the last that is wanted are all looked at, so that equal ones are dealt with the same way
        last = np.partition(keys, count - 1)[count - 1]
        places = np.flatnonzero(keys <= last)
        ordered = places[np.argsort(keys[places], kind="stable")]
        return [self._names[place] for place in ordered[:count]]


@functools.lru_cache(maxsize=1 << 14)
def word_of(text: str) -> int:
    """64 well mixed bits of ``text``, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def fraction(word: int, other: int) -> float:
    """A number from 0 to 1 that two words share, unrelated to any order."""
    mixed = ((word ^ other) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    return ((mixed ^ (mixed >> 32)) & 0xFFFFFFFF) / 4294967296.0


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> _SHIFTS[0])) * _MULTIPLIERS[0]
    words = (words ^ (words >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return words ^ (words >> _SHIFTS[2])
