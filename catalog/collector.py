"""Python's collector of cyclic garbage, kept from looking at everything again and again while a batch is made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# objects made before the young are looked at, and how often that is before the older ones are
_THRESHOLDS = 200_000, 20, 50


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """For work that makes many objects at a time and hardly a cycle: a batch of an import is a hundred thousand that
    live until it is written, and by default a third of its time would go into looking for cycles among them."""
    former = gc.get_threshold()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*former)
