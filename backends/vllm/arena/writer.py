"""Who moves an adapter's bytes into a slot: one protocol, for each kind of device a module (``cpu``, ``cuda``)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from backends.arena.segment import MappingUser

from .plan import Plan


class Pending(Protocol):
    """A write under way. Its slot may be used, and its source given away, once it is done."""

    def done(self) -> bool:
        """Whether everything is written; waits for the device never, for the host's memory shortly.

        Raises RuntimeError where the write failed, every time it is asked.
        """

    def wait(self) -> None:
        """Return when everything is written. Raises RuntimeError where the write failed: nothing writes any more."""


class SlotWriter(MappingUser, Protocol):
    """One a worker.

    A slot that is written belongs to no adapter that can be asked for, but work on its former one may still be queued
    on the model's stream: the first change to the slot comes after that.
    """

    def write(self, plan: Plan, data: memoryview, slot: int, scales: npt.NDArray[np.float32]) -> Pending:
        """Start to bring all of ``plan``'s tiles and switches of ``slot`` to what they must be.

        ``data`` is the revision's data, ``plan.data_bytes`` of them, inside a mapping that ``mapped`` was told of;
        its address is a multiple of 64. ``scales`` holds what the moves' SCALE_INDEX points to. Raises RuntimeError
        where it failed at once; the slot may hold anything then, and nothing writes to it any more.
        """
