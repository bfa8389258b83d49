"""Python's collector of cyclic garbage, kept from looking at everything again and again while a batch is made."""

from __future__ import annotations

import gc

# objects made before the young are looked at, and how often that is before the older ones are
_THRESHOLDS = 200_000, 20, 50


def collect_rarely() -> None:
    """For a process that makes many small objects at a time and hardly a cycle: a batch of an import is a hundred
    thousand that live until it is written, and by default a third of its time would go into looking for cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
