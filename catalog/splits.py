"""Dealing users and sessions to the arms of a weighted split."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from .records import Arm

_RANGE = float(1 << 64)


def choose(arms: Sequence[Arm], selector: bytes, *, channel: str, seed: int) -> Arm:
    """The arm that ``selector`` takes: the same one for as long as the split stands.

    Weighted rendezvous hashing: each arm draws a number of its own from (seed, channel, revision, digest, selector),
    scaled by its weight, and the highest wins. So each arm gets its share of the weights; a change of one weight, or
    an arm more or less, moves no selector between two other arms; and another seed deals all of them anew. The policy's
    name has no part in it, so a renaming moves nobody, while canaries of different policies take different users.

    The score ``weight / -ln(u)`` is from Schindelhauer and Schomaker, Weighted Distributed Hash Tables (2005).
    """
    return max(arms, key=lambda arm: _score(arm, selector, channel, seed))


def _score(arm: Arm, selector: bytes, channel: str, seed: int) -> float:
    drawn = hashlib.blake2b(
        b"%d:%s:%d:%s:%s" % (seed, channel.encode(), arm.revision, arm.digest, selector), digest_size=8
    )
    # within 0 and 1, and neither of them
    u = (int.from_bytes(drawn.digest(), "big") + 0.5) / _RANGE
    return arm.weight / -math.log(min(u, 1 - 2**-53))
