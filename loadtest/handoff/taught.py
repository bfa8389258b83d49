"""A run that is trained a step at a time, each of them handed off to whoever samples next."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from loadtest.generator import Generator, completion
from loadtest.training.client import Run, datum
from loadtest.training.mesh import TrainingMesh
from ops.cli.client import policy_path
from wire.outcomes import EngineFailed

POLICY = "default/taught"
PROMPT = 64
_TEXT, _WARM = 32, 5
_LEARNING_RATE = 1e-4


class Handoff(msgspec.Struct, frozen=True):
    """Seconds: of the call until it is answered, of the next first token, and what warm first tokens took before.

    ``sample_s`` is a token through the training API after that, ``warm_sample_s`` the same before. ``stages`` are those
    that the training service logged of its part, by name.
    """

    save_s: float
    first_token_s: float
    warm_s: list[float]
    sample_s: float
    warm_sample_s: float
    stages: dict[str, float] = {}

    @property
    def total_s(self) -> float:
        return self.save_s + self.first_token_s

    @property
    def extra_s(self) -> float:
        return self.total_s - statistics.median(self.warm_s)


def stages_of(log: Path, revision: str) -> dict[str, float]:
    """What a training service's log says of a publication, in seconds. Raises EngineFailed where it says nothing."""
    for line in reversed(log.read_text().splitlines()):
        told = line.partition(f" {revision}, ")[2]
        if told:
            pairs = (word.split("=") for word in told.partition(": ")[2].split())
            return {name: float(seconds) for name, seconds in pairs}
    raise EngineFailed(f"{log.name} says nothing of {revision}")


class Taught:
    """A run whose revisions are handed off, one after the other."""

    def __init__(self, mesh: TrainingMesh, run: Run, prompt: Callable[[int], list[int]]) -> None:
        self._mesh = mesh
        self._run = run
        self._prompt = prompt
        self._revision = 0
        self._sampler = ""
        self._generator = Generator("127.0.0.1", mesh.port)

    async def hand_off(self) -> Handoff:
        """Train a step, and hand it off."""
        text = self._prompt(_TEXT + 1)
        learnt = self._run.forward_backward([datum(text[:-1], text[1:])], "cross_entropy")
        await asyncio.gather(learnt, self._run.optim_step(_LEARNING_RATE))
        warm_s = [await self._first_token(self._revision) for _ in range(_WARM)] if self._revision else [0.0]
        warm_sample_s = await self._sample() if self._revision else 0.0
        begun = time.monotonic()
        self._sampler = await self._run.save_for_sampler()
        saved = time.monotonic()
        self._revision += 1
        first_token_s = await self._first_token(self._revision)
        sample_s = await self._sample()
        stages = stages_of(self._mesh.state / "logs" / "training.log", f"{POLICY}@{self._revision}")
        return Handoff(saved - begun, first_token_s, warm_s, sample_s, warm_sample_s, stages)

    def newest(self) -> str:
        """The digest of what was handed off last."""
        shown = self._mesh.client().call_pages(policy_path(POLICY), "revisions")
        return next(str(one["digest"]) for one in shown["revisions"] if one["revision"] == self._revision)

    async def _first_token(self, revision: int) -> float:
        request = completion(f"{POLICY}@{revision}", prompt=self._prompt(PROMPT), tokens=2)
        sample = await self._generator.one(request, time.monotonic())
        if sample.status != 200:
            raise EngineFailed(f"revision {revision} was answered with {sample.status}: {sample.text}")
        return sample.first_token - sample.intended

    async def _sample(self) -> float:
        begun = time.monotonic()
        await self._run.sample(self._sampler, self._prompt(PROMPT), 1, 1)
        return time.monotonic() - begun
