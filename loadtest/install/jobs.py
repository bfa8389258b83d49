"""What an engine is to do, and what came of it: the messages between a benchmark and the processes it starts."""

from __future__ import annotations

import msgspec

from .adapters import Adapter
from .figures import Gaps, Rounds


class Measure(msgspec.Struct, frozen=True):
    """Adapters of one rank, as (tenant, adapter), and the rounds: n -> (ours before each of stock's, stock's).

    ``live`` is the same for all adapters at once beside a stream, which only a server does; ``tokens``, which only a
    worker does, is to compare answers too. Where there are none of stock's, ours is done once.
    """

    rank: int
    adapters: list[tuple[str, Adapter]]
    grid: dict[int, tuple[int, int]]
    live: tuple[int, int] = (0, 0)
    tokens: bool = False


class Job(msgspec.Struct, frozen=True):
    """One engine: the checkpoint's folder, the device, the rank of its slots, and what to measure on it."""

    model: str
    device: str
    slot_rank: int
    seed: int
    measures: list[Measure]


class Measured(msgspec.Struct):
    """Through a worker. ``tokens_equal`` is None where the engine answers the stock way differently each time.

    ``accelerator`` is what the device calls itself; empty for a CPU.
    """

    rank: int
    rounds: Rounds
    floor_ms: float
    slots_equal: bool
    tokens_equal: bool | None = None
    different_answers: int = 0
    accelerator: str = ""


class Served(msgspec.Struct):
    """Through a server. ``live``: while a stream runs, all that there is room for at once."""

    rank: int
    rounds: Rounds
    live: Rounds
    gaps: Gaps
