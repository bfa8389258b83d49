"""How many loads may run at once: found by watching what more of them at once does to each."""

from __future__ import annotations

import math
from collections.abc import Hashable

# a load may take this much longer than the best of its kind before the limit gives way
_TOLERANCE = 1.2
# one measurement moves the limit by at most half, and by a fifth of what it asks for
_MIN_GRADIENT = 0.5
_SMOOTHING = 0.2
# weight of a measurement in its kind's reference: of undisturbed loads, and of others that were faster than it
_UNDISTURBED_WEIGHT = 0.3
_FASTER_WEIGHT = 0.1
_AFTER_TIMEOUT = 0.8
# a node that is always busy lets one load run undisturbed after so many that were not
_PROBE_AFTER = 100
# a bound on memory: kinds of load that are told apart
_MAX_KINDS = 256


class AdaptiveLimit:
    """A gradient limit on concurrency, after Netflix's concurrency-limits (Gradient2, Vegas):
    ``limit x clamp(tolerance x reference / seconds) + headroom``, smoothed.

    The reference of a kind of load is what it takes while no more than ``lowest`` run, or less where others were
    faster. A limit that was pushed down to ``lowest``, because loads of any number became slower, so finds its
    reference again; while it is higher, it falls to ``lowest`` for one load now and then. Loads are of one kind where
    they should take equally long: same base, like size, bytes to fetch or not.
    """

    def __init__(self, lowest: int, highest: int, start: int) -> None:
        """Raises ValueError unless 1 <= lowest <= highest."""
        if not 1 <= lowest <= highest:
            raise ValueError(f"a limit between {lowest} and {highest}")
        self._lowest = lowest
        self._highest = highest
        self._limit = float(min(max(start, lowest), highest))
        self._references: dict[Hashable, float] = {}
        self._disturbed = 0

    @property
    def value(self) -> int:
        return self._lowest if self._disturbed >= _PROBE_AFTER else int(self._limit)

    def ended(self, kind: Hashable, seconds: float, at_once: int) -> None:
        """A load took ``seconds``, and up to ``at_once`` ran beside it, itself included."""
        undisturbed = at_once <= self._lowest
        self._disturbed = 0 if undisturbed else self._disturbed + 1
        reference = self._reference(kind, seconds, undisturbed=undisturbed)
        gradient = min(1.0, max(_MIN_GRADIENT, _TOLERANCE * reference / max(seconds, 1e-9)))
        wanted = self._limit * gradient + 0.5 * math.sqrt(self._limit)
        if wanted > self._limit and 2 * at_once < self._limit:
            # the limit was not what held loads back, so this says nothing of what more would do
            return
        self._move_to(self._limit + _SMOOTHING * (wanted - self._limit))

    def timed_out(self) -> None:
        """A load was given up: whatever it waited for has too much to do."""
        self._move_to(self._limit * _AFTER_TIMEOUT)

    def _move_to(self, limit: float) -> None:
        self._limit = min(max(limit, float(self._lowest)), float(self._highest))

    def _reference(self, kind: Hashable, seconds: float, *, undisturbed: bool) -> float:
        known = self._references.pop(kind, seconds)
        if undisturbed:
            known += _UNDISTURBED_WEIGHT * (seconds - known)
        elif seconds < known:
            known += _FASTER_WEIGHT * (seconds - known)
        self._references[kind] = known
        if len(self._references) > _MAX_KINDS:
            del self._references[next(iter(self._references))]
        return known
