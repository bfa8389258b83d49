"""A trainer of eight numbers: a ``TrainerBackend`` whose answers follow from what it was told, and outlive it.

The log-probability of a target is ``fixed(token, target) + weight[target % 8]``. A snapshot goes to disk after every
``snapshot_every`` changes, so that the ones behind it have to be told again after a restart.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from backends.trainer import TrainerSettings
from wire.events import ArtifactFacts
from wire.node import Health
from wire.outcomes import EngineFailed, InvalidRequest, NotFound, VersionConflict
from wire.trainer import (
    Adam,
    Batch,
    Datum,
    DatumOutput,
    Loss,
    MemoryReport,
    Outputs,
    PolicySpec,
    PolicyStatus,
    Stepped,
    TrainerLimits,
)

SIZE = 8
LIMITS = TrainerLimits(
    architecture="Tiny",
    targets=("q", "k", "v", "o", "gate", "up", "down"),
    max_rank=64,
    max_context=512,
    vocabulary=1000,
    dtype="float32",
    world_size=1,
)


class State(msgspec.Struct):
    """A policy, and the answer to its change ``number``."""

    spec: PolicySpec
    weight: list[float] = msgspec.field(default_factory=lambda: [0.0] * SIZE)
    gradient: list[float] = msgspec.field(default_factory=lambda: [0.0] * SIZE)
    moment: list[float] = msgspec.field(default_factory=lambda: [0.0] * SIZE)
    step: int = 0
    number: int = 0
    answer: Outputs | Stepped | None = None


class FakeTrainer:
    """``log`` has every change as it was made: policy, kind and number. ``seconds`` is what each operation takes.

    Once ``dead`` it answers nothing and writes nothing.
    """

    def __init__(self, settings: TrainerSettings, folder: Path, *, snapshot_every: int = 3) -> None:
        self.settings = settings
        self.detail = ""
        self.seconds: dict[str, float] = {}
        self.pause_s = 0.0
        self.ready = True
        self.dead = False
        self.log: list[tuple[str, str, int]] = []
        self.removed: list[str] = []
        self._folder = folder / "snapshots"
        self._every = snapshot_every
        self._states: dict[str, State] = {}
        self._durable: dict[str, int] = {}
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    async def stop(self) -> None:
        for state in self._states.values() if not self.dead else ():
            self._snapshot(state)

    async def health(self) -> Health:
        if self.detail:
            return Health.DEAD
        return Health.READY if self.ready else Health.STARTING

    async def limits(self) -> TrainerLimits:
        return LIMITS

    async def create_policy(self, spec: PolicySpec) -> PolicyStatus:
        if not 1 <= spec.rank <= LIMITS.max_rank:
            raise InvalidRequest(f"rank {spec.rank} is not within 1 to {LIMITS.max_rank}", field="rank")
        state = self._states.get(spec.policy)
        if state is None:
            file = self._folder / spec.policy
            state = msgspec.json.decode(file.read_bytes(), type=State) if file.exists() else State(spec)
            self._states[spec.policy] = state
            self._durable[spec.policy] = state.number
        return PolicyStatus(policy=spec.policy, number=state.number, step=state.step, parameters=SIZE)

    def durable(self, policy: str) -> int:
        return self._durable[policy]

    async def forward_backward(self, policy: str, batch: Batch, *, number: int) -> Outputs:
        async with self._one_at_a_time:
            state = await self._state(policy)
            if (repeated := self._repeated(state, number)) is not None:
                assert isinstance(repeated, Outputs)
                return repeated
            outputs, gradient = self._run(state, batch)
            state.gradient = [have + more for have, more in zip(state.gradient, gradient, strict=True)]
            self._changed(state, "forward_backward", outputs)
            return outputs

    async def forward(self, policy: str, batch: Batch) -> Outputs:
        async with self._one_at_a_time:
            return self._run(await self._state(policy), batch)[0]

    async def optim_step(self, policy: str, adam: Adam, *, number: int) -> Stepped:
        async with self._one_at_a_time:
            state = await self._state(policy)
            if (repeated := self._repeated(state, number)) is not None:
                assert isinstance(repeated, Stepped)
                return repeated
            state.moment = [adam.beta1 * m + g for m, g in zip(state.moment, state.gradient, strict=True)]
            state.weight = [w - adam.learning_rate * m for w, m in zip(state.weight, state.moment, strict=True)]
            stepped = Stepped(grad_norm=math.hypot(*state.gradient), step=state.step + 1)
            state.gradient, state.step = [0.0] * SIZE, state.step + 1
            self._changed(state, "optim_step", stepped)
            return stepped

    async def save_state(self, policy: str, path: Path, *, with_optimizer: bool) -> None:
        state = await self._state(policy)
        path.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
        (path / "state.json").write_bytes(msgspec.json.encode(state))

    async def load_state(self, policy: str, path: Path, *, with_optimizer: bool, number: int) -> None:
        state = await self._state(policy)
        if self._repeated(state, number) is not None:
            return
        saved = msgspec.json.decode((path / "state.json").read_bytes(), type=State)
        if saved.spec.rank != state.spec.rank:
            raise InvalidRequest(f"the checkpoint has rank {saved.spec.rank}", field="path")
        state.weight, state.gradient = saved.weight, [0.0] * SIZE
        state.moment, state.step = (saved.moment, saved.step) if with_optimizer else ([0.0] * SIZE, 0)
        self._changed(state, "load_state", Stepped(grad_norm=0.0, step=state.step))

    async def export_revision(
        self, policy: str, path: Path, *, dtype: str = "BF16", progress: Callable[[int, int], None] | None = None
    ) -> ArtifactFacts:
        state = await self._state(policy)
        content = np.asarray(state.weight, "<f4").tobytes()
        path.write_bytes(content)  # noqa: ASYNC240
        digest = blake3(content).hexdigest()
        return ArtifactFacts(digest, len(content), state.spec.rank, state.spec.targets, dtype, 2, SIZE)

    async def remove_policy(self, policy: str) -> None:
        self._states.pop(policy, None)
        (self._folder / policy).unlink(missing_ok=True)
        self.removed.append(policy)

    async def memory(self) -> MemoryReport:
        return MemoryReport(policies={}, base=0, scratch=0)

    def weight(self, policy: str) -> list[float]:
        return self._states[policy].weight

    async def _state(self, policy: str) -> State:
        await asyncio.sleep(self.seconds.get(policy, self.pause_s))
        if self.detail:
            raise EngineFailed("the trainer does not run")
        if self.dead:
            await asyncio.Event().wait()
        if policy not in self._states:
            raise NotFound(f"the trainer has no policy {policy}", field="policy")
        return self._states[policy]

    def _repeated(self, state: State, number: int) -> Outputs | Stepped | None:
        if number == state.number and state.answer is not None:
            return state.answer
        if number != state.number + 1:
            raise VersionConflict(f"change {number} after {state.number}", field="number")
        return None

    def _changed(self, state: State, kind: str, answer: Outputs | Stepped) -> None:
        state.number, state.answer = state.number + 1, answer
        self.log.append((state.spec.policy, kind, state.number))
        if state.number % self._every == 0:
            self._snapshot(state)

    def _snapshot(self, state: State) -> None:
        draft = self._folder / f".{state.spec.policy}"
        draft.write_bytes(msgspec.json.encode(state))
        draft.replace(self._folder / state.spec.policy)
        self._durable[state.spec.policy] = state.number

    def _run(self, state: State, batch: Batch) -> tuple[Outputs, list[float]]:
        began = time.monotonic()
        gradient = np.zeros(SIZE)
        data = {}
        for place, datum in enumerate(batch.data):
            logprobs, loss, slope, targets = _of(state.weight, datum, batch.losses[datum.loss])
            np.add.at(gradient, targets % SIZE, slope)
            data[place] = DatumOutput(logprobs.astype("<f4").tobytes(), float(loss))
        return Outputs(data=data, seconds=time.monotonic() - began), gradient.tolist()


def _of(weight: list[float], datum: Datum, loss: Loss) -> tuple[np.ndarray, float, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Log-probabilities, loss, the loss's slope in each of them, and the targets."""
    tokens, targets = np.frombuffer(datum.tokens, "<i8"), np.frombuffer(datum.targets, "<i8")
    if targets.size and targets.max() >= LIMITS.vocabulary:
        raise InvalidRequest("datum 0: targets has an id outside the vocabulary", field="targets")
    logprobs = fixed(tokens, targets) + np.asarray(weight)[targets % SIZE]
    weights = np.frombuffer(datum.weights, "<f4") if datum.weights else np.ones(len(targets))
    if loss.kind == "cross_entropy":
        return logprobs, -(weights * logprobs).sum(), -weights, targets
    if loss.kind not in ("importance_sampling", "ppo", "cispo", "dro"):
        raise InvalidRequest(f"there is no loss {loss.kind!r}", field="loss_fn")
    sampled, advantages = np.frombuffer(datum.logprobs, "<f4"), np.frombuffer(datum.advantages, "<f4")
    if not len(sampled):
        raise InvalidRequest(f"datum 0 lacks logprobs, which {loss.kind} needs", field="logprobs")
    ratio = np.exp(logprobs - sampled)
    if loss.kind == "ppo":
        ratio = ratio.clip(loss.config.get("clip_low_threshold", 0.8), loss.config.get("clip_high_threshold", 1.2))
    return logprobs, -(weights * ratio * advantages).sum(), -weights * ratio * advantages, targets


def fixed(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(-1.0 - 0.1 * ((tokens * 7 + targets * 3) % 10))
