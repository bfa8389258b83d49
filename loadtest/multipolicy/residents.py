"""Many policies on one resident base: what a policy costs in memory, and what the others cost the one that trains.

A trainer of its own, asked through its driver. The forward and backward passes of one policy are timed by the trainer,
while it is alone and while the others are there, in turns.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backends.registry import make_trainer
from backends.trainer import TrainerBackend, TrainerSettings
from loadtest.training.bases import RANK, TrainedBase
from loadtest.training.memory import device_bytes, host_bytes
from wire.trainer import Adam, Batch, Datum, Loss, PolicySpec

_RANKS = (4, 8, 16, RANK)
_ONE = "one"
# parameters, gradients and two moments, each in fp32
_STATE_BYTES = 4 * 4


class Size(msgspec.Struct, frozen=True):
    """``others`` beside the one that trains on ``data`` sequences of ``length`` tokens, ``passes`` in each of
    ``rounds``."""

    others: int
    data: int
    length: int
    passes: int
    rounds: int


class Residents(msgspec.Struct):
    """Seconds of passes, by round, and bytes: ``state`` of all the others' numbers, ``told`` by the trainer for them,
    ``grown``: what its process (on a GPU: the device) had more of."""

    others: int
    alone_s: list[list[float]] = []
    crowded_s: list[list[float]] = []
    state: int = 0
    told: int = 0
    grown: list[int] = []

    def summary(self) -> dict[str, float]:
        pairs = zip(self.crowded_s, self.alone_s, strict=False)
        ratios = [statistics.median(crowded) / statistics.median(alone) for crowded, alone in pairs]
        return {
            "resident_policies": self.others + 1,
            "resident_forward_backward_ratio": round(statistics.median(ratios), 4),
            "resident_memory_over_state": round(self.told / self.state, 4),
            "resident_memory_grown_over_state": round(self.grown[0] / self.state, 4),
        }


async def measure(base: TrainedBase, root: Path, size: Size, settings: dict[str, Any], seed: int) -> Residents:
    """Start a trainer with ``settings``, and end it."""
    trainer = make_trainer(
        TrainerSettings(name="residents", model_path=str(base.folder), device=base.device, max_rank=RANK, **settings),
        state_dir=root / "state",
        log_dir=root,
    )
    await trainer.start()
    try:
        return await _Bench(trainer, base, size, seed).run()
    finally:
        await trainer.stop()


class _Bench:
    def __init__(self, trainer: TrainerBackend, base: TrainedBase, size: Size, seed: int) -> None:
        self._trainer = trainer
        self._base = base
        self._size = size
        self._chance = np.random.default_rng(seed)
        self._number = 0
        self._found = Residents(size.others)

    async def run(self) -> Residents:
        await self._trainer.create_policy(PolicySpec(policy=_ONE, rank=RANK))
        await self._passes()
        for round_ in range(self._size.rounds):
            self._found.alone_s.append(await self._passes())
            before = self._bytes()
            state = await self._crowd(round_)
            crowded = await self._passes()
            if not round_:
                self._found.state = state
                told = (await self._trainer.memory()).policies
                self._found.told = sum(
                    each.device + each.host + each.disk for name, each in told.items() if name != _ONE
                )
            self._found.grown.append(self._bytes() - before)
            self._found.crowded_s.append(crowded)
            for place in range(self._size.others):
                await self._trainer.remove_policy(_name(place))
        return self._found

    async def _crowd(self, round_: int) -> int:
        """Make the others; the bytes of their numbers."""
        parameters = 0
        for place in range(self._size.others):
            spec = PolicySpec(policy=_name(place), rank=_RANKS[place % len(_RANKS)], seed=place + round_)
            parameters += (await self._trainer.create_policy(spec)).parameters
        return parameters * _STATE_BYTES

    async def _passes(self) -> list[float]:
        seconds = []
        for _ in range(self._size.passes):
            self._number += 1
            passed = await self._trainer.forward_backward(_ONE, self._batch(), number=self._number)
            seconds.append(passed.seconds)
            self._number += 1
            await self._trainer.optim_step(_ONE, Adam(learning_rate=1e-5), number=self._number)
        return seconds

    def _batch(self) -> Batch:
        rows = self._chance.integers(0, self._base.vocabulary, (self._size.data, self._size.length + 1))
        data = tuple(
            Datum(tokens=row[:-1].astype("<i8").tobytes(), targets=row[1:].astype("<i8").tobytes()) for row in rows
        )
        return Batch(data, (Loss("cross_entropy"),))

    def _bytes(self) -> int:
        """Of this process, which hardly grows, and the trainer's, or of the device."""
        if self._base.device == "cuda":
            return device_bytes()
        return host_bytes([os.getpid()])


def _name(place: int) -> str:
    return f"other-{place}"
