"""What an engine is to do, and what came of it: the messages between a benchmark and the processes it starts."""

from __future__ import annotations

import msgspec

from .adapters import Adapter
from .figures import Gaps, Rounds

# what a server's workers are given, and its method that takes a Measure and returns a Measured, as JSON
EXTENSION = "loadtest.install.inside.Measuring"
MEASURE = "roost_loadtest_measure"


class Grid(msgspec.Struct, frozen=True):
    """``ours``: n -> rounds of n adapters at once. After all of them a round of the stock way, of all adapters, and
    over again, ``stock`` times; with none of the stock way, ours is done once.
    """

    ours: dict[int, int]
    stock: int


class Live(msgspec.Struct, frozen=True):
    """Rounds beside a stream, a Grid's way: ours of all adapters at once, the stock way's of ``stock_n``."""

    ours: int
    stock: int
    stock_n: int


class Measure(msgspec.Struct, frozen=True):
    """Adapters of one rank, as (tenant, adapter), and what to do with them: through a worker, through the server, and
    through the server beside a stream.
    """

    rank: int
    adapters: list[tuple[str, Adapter]]
    worker: Grid | None = None
    server: Grid | None = None
    live: Live | None = None


class Job(msgspec.Struct, frozen=True):
    """An engine in a process of its own, to compare the answers of ``adapters``: the checkpoint's folder, the device,
    the rank of its slots.
    """

    model: str
    device: str
    slot_rank: int
    seed: int
    adapters: list[tuple[str, Adapter]]


class Answered(msgspec.Struct):
    """``tokens_equal`` is None where the engine answers the stock way differently each time."""

    tokens_equal: bool | None
    different_answers: int


class Measured(msgspec.Struct):
    """Through a worker. ``accelerator`` is what the device calls itself; empty for a CPU."""

    rank: int
    rounds: Rounds
    floor_ms: float
    slots_equal: bool
    accelerator: str = ""


class Served(msgspec.Struct):
    """Through a server. ``live``: while a stream runs."""

    rank: int
    rounds: Rounds
    live: Rounds
    gaps: Gaps
