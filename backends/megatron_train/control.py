"""The driver of a Megatron trainer: one operation at a time goes to all ranks, and ranks that die are replaced.

A policy's state is a snapshot on disk and the changes since, which are kept here (``replay.py``). New ranks get a
policy when it is next used: its snapshot is loaded and the changes are made again, which gives the same bits. The
operation in hand is then tried once more. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from backends.gpu_share import check_share
from backends.trainer import TrainerLost, TrainerSettings
from wire.events import ArtifactFacts
from wire.node import Health
from wire.outcomes import EngineFailed, InvalidRequest, NotFound, RoostError, error_for
from wire.trainer import (
    Adam,
    AnswerOfRank,
    AskLimits,
    AskMemory,
    AskOfRank,
    Batch,
    CreatePolicy,
    Done,
    Failed,
    ForwardBackward,
    LoadState,
    MemoryReport,
    OptimStep,
    Outputs,
    PolicyMemory,
    PolicySpec,
    PolicyStatus,
    RemovePolicy,
    SaveState,
    Stepped,
    TrainerLimits,
)

from .exporting import export_revision
from .hf_config import BaseConfig, context_of, dtype_of, read_base
from .launcher import RankProcesses, Ranks, RanksDied
from .layout import check_spec, pairs_of
from .manifest import StateManifest, read_manifest, verify_files
from .replay import Change, Record, State, decode_answer, encode_answer
from .states import Snapshots, commit_draft, make_draft
from .topology import check_topology

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Changed = TypeVar("Changed", Outputs, Stepped)

_LOOK_S = 1.0
# how often an operation is tried on new ranks, and ranks are started one after another without success
_TRIES = 2
_STARTS = 3


def check_settings(settings: TrainerSettings) -> BaseConfig:
    """The base that is going to be trained. Raises InvalidRequest or Unfit where it can't be with these settings."""
    base = read_base(Path(settings.model_path))
    check_topology(settings, base)
    dtype_of(settings)
    context_of(settings, base)
    if settings.device == "cuda":
        check_share({**os.environ, **settings.env}, f"trainer {settings.name}")
    return base


class MegatronTrainer:
    """A ``TrainerBackend``. ``state_dir`` holds its snapshots and scratch files and is its own alone.

    Raises InvalidRequest or Unfit for settings that the base can't be trained with.
    """

    def __init__(
        self, settings: TrainerSettings, *, state_dir: Path, log_dir: Path, ranks: Ranks | None = None
    ) -> None:
        self.settings = settings
        self.detail = ""
        self._base = check_settings(settings)
        self._ranks = ranks or RankProcesses(settings, state_dir=state_dir, log_dir=log_dir)
        self._snapshots = Snapshots(state_dir / "snapshots")
        self._records: dict[str, Record] = {}
        # who holds it has the ranks, in the order of asking
        self._turn = asyncio.Lock()
        self._ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._failed_starts = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        if self._supervisor is None or self._supervisor.done():
            self.detail = ""
            self._failed_starts = 0
            self._supervisor = asyncio.create_task(self._supervise())

    async def health(self) -> Health:
        if self._supervisor is None or self._supervisor.done():
            return Health.DEAD
        return Health.READY if self._ready.is_set() and self._ranks.alive else Health.STARTING

    async def limits(self) -> TrainerLimits:
        async def do() -> TrainerLimits:
            return _one(await self._ask(AskLimits()), TrainerLimits)

        return await self._in_turn(do)

    async def create_policy(self, spec: PolicySpec) -> PolicyStatus:
        checked = check_spec(spec, self._base, self.settings.max_rank)

        async def do() -> PolicyStatus:
            record = self._records.get(spec.policy) or self._recalled(checked)
            if record.spec != checked:
                raise InvalidRequest(
                    f"the policy {spec.policy} is there already, with another specification", field="policy"
                )
            if not record.on_ranks:
                await self._restore(record)
            self._records[spec.policy] = record
            return PolicyStatus(
                policy=spec.policy,
                number=record.state.number,
                step=record.state.step,
                parameters=record.parameters,
            )

        return await self._in_turn(do)

    def durable(self, policy: str) -> int:
        record = self._records.get(policy)
        return record.durable if record is not None else 0

    async def forward_backward(self, policy: str, batch: Batch, *, number: int) -> Outputs:
        change = ForwardBackward(policy=policy, batch=batch)
        return await self._in_turn(lambda: self._change(policy, number, change, _merged))

    async def forward(self, policy: str, batch: Batch) -> Outputs:
        async def do() -> Outputs:
            await self._present(policy)
            return _merged(await self._ask(ForwardBackward(policy=policy, batch=batch, forward_only=True)))

        return await self._in_turn(do)

    async def optim_step(self, policy: str, adam: Adam, *, number: int) -> Stepped:
        change = OptimStep(policy=policy, adam=adam)
        return await self._in_turn(lambda: self._change(policy, number, change, lambda given: _one(given, Stepped)))

    async def save_state(self, policy: str, path: Path, *, with_optimizer: bool) -> None:
        async def do() -> None:
            record = await self._present(policy)
            plain = State(step=record.state.step)
            await self._save(record.spec, path, plain, optimizer=with_optimizer)

        await self._in_turn(do)

    async def load_state(self, policy: str, path: Path, *, with_optimizer: bool, number: int) -> None:
        async def do() -> None:
            record = await self._present(policy)
            if record.repeated(number) is not None:
                return
            manifest = read_manifest(path)
            manifest.check_base(self.settings.fingerprint)
            manifest.check_for(record.spec, optimizer=with_optimizer)
            await asyncio.to_thread(verify_files, path, manifest)
            try:
                done = _one(await self._ask(LoadState(policy=policy, path=str(path), optimizer=with_optimizer)), Done)
                # the checkpoint may change or go: what was loaded is ours to keep
                await self._snapshot(record, State(number, done.step, False, done))
            except RoostError:
                # the record still tells the state before
                record.on_ranks = False
                raise

        await self._in_turn(do)

    async def export_revision(
        self, policy: str, path: Path, *, dtype: str = "BF16", progress: Callable[[int, int], None] | None = None
    ) -> ArtifactFacts:
        async def do() -> ArtifactFacts:
            record = await self._present(policy)
            return await export_revision(self._ask_any, record.spec, self._base, path, dtype, progress)

        return await self._in_turn(do)

    async def remove_policy(self, policy: str) -> None:
        async def do() -> None:
            if self._records.pop(policy, None) is not None:
                await self._ask(RemovePolicy(policy=policy))
            await asyncio.to_thread(self._snapshots.remove, policy)

        await self._in_turn(do)

    async def memory(self) -> MemoryReport:
        async def do() -> MemoryReport:
            return _summed([_one([answer], MemoryReport) for answer in await self._ask(AskMemory())])

        return await self._in_turn(do)

    async def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        async with self._turn:
            if self._ready.is_set() and self._ranks.alive:
                with contextlib.suppress(RoostError):
                    for record in self._records.values():
                        if record.changes and record.on_ranks:
                            await self._snapshot(record, record.state)
            self._ready.clear()
            await self._ranks.stop()
            for record in self._records.values():
                record.on_ranks = False

    async def _in_turn(self, do: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Run ``do`` when the ranks are ours, again on new ranks if they die. A caller that leaves does not stop it."""
        task = asyncio.create_task(self._tried(do))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _tried(self, do: Callable[[], Awaitable[Answer]]) -> Answer:
        async with self._turn:
            for attempt in range(_TRIES):
                await self._until_ready()
                try:
                    return await do()
                except RanksDied as error:
                    _log.warning("%s (attempt %d)", error.message, attempt + 1)
                    self._lose_ranks()
            raise TrainerLost(f"trainer {self.settings.name} lost its ranks {_TRIES} times under this operation")

    async def _until_ready(self) -> None:
        """Raises EngineFailed where there will be no ranks."""
        while not self._ready.is_set() or not self._ranks.alive:
            if self._supervisor is None or self._supervisor.done():
                raise EngineFailed(f"trainer {self.settings.name} does not run")
            if self._ready.is_set():
                self._lose_ranks()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._ready.wait()

    def _lose_ranks(self) -> None:
        self._ready.clear()
        self._lost.set()
        for record in self._records.values():
            record.on_ranks = False

    async def _supervise(self) -> None:
        """Start the ranks, and again whenever they are gone."""
        while True:
            if self._ready.is_set() and not self._ranks.alive and not self._turn.locked():
                self._lose_ranks()
            if not self._ready.is_set():
                try:
                    await self._ranks.start()
                except RoostError as error:
                    self._failed_starts += 1
                    _log.warning("%s", error.message)
                    if self._failed_starts == _STARTS:
                        self.detail = error.message
                        return
                else:
                    self._failed_starts = 0
                    self._lost.clear()
                    self._ready.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._lost.wait()

    async def _ask(self, ask: AskOfRank) -> Sequence[AnswerOfRank]:
        """All ranks' answers. Raises what they refused it with, and RanksDied also where they don't agree on that."""
        answers = await self._ranks.ask(ask, timeout_s=self.settings.operation_timeout_s)
        failed = [answer for answer in answers if isinstance(answer, Failed)]
        if failed and len(failed) != len(answers):
            raise RanksDied(f"the ranks of trainer {self.settings.name} are not of one mind: {failed[0].message}")
        _raise_failed(failed)
        return answers

    async def _ask_any(self, ask: AskOfRank) -> Sequence[AnswerOfRank]:
        """The same for what changes no policy: one rank's refusal is all's."""
        answers = await self._ranks.ask(ask, timeout_s=self.settings.operation_timeout_s)
        _raise_failed([answer for answer in answers if isinstance(answer, Failed)])
        return answers

    async def _change(
        self, policy: str, number: int, change: Change, read: Callable[[Sequence[AnswerOfRank]], Changed]
    ) -> Changed:
        record = await self._present(policy)
        repeated = record.repeated(number)
        if repeated is not None:
            return read([repeated])
        started = time.monotonic()
        answer = read(await self._ask(change))
        record.made(change, answer, time.monotonic() - started)
        await self._bound_replay(record)
        return answer

    async def _present(self, policy: str) -> Record:
        """The policy's record, with the policy on the ranks. Raises NotFound, RanksDied."""
        record = self._records.get(policy)
        if record is None:
            raise NotFound(f"the trainer has no policy {policy}", field="policy")
        if not record.on_ranks:
            await self._restore(record)
        return record

    def _recalled(self, spec: PolicySpec) -> Record:
        """A record of a policy that this control has not seen: from the newest snapshot on disk, if there is one."""
        parameters = sum(sum(pair.elements) for pair in pairs_of(spec, self._base))
        found = self._snapshots.newest(spec.policy)
        if found is None:
            return Record(spec, parameters)
        folder, manifest = found
        manifest.check_base(self.settings.fingerprint)
        state = State(manifest.number, manifest.step, manifest.gradients, decode_answer(manifest.answer))
        return Record(manifest.spec, parameters, state, str(folder))

    async def _restore(self, record: Record) -> None:
        """Bring the ranks to the record's state: snapshot, then the changes since."""
        if record.snapshot:
            folder = Path(record.snapshot)
            await asyncio.to_thread(verify_files, folder, read_manifest(folder))
        await self._ask(CreatePolicy(spec=record.spec, snapshot=record.snapshot))
        for change in record.changes:
            await self._ask(change)
        record.on_ranks = True

    async def _bound_replay(self, record: Record) -> None:
        """Snapshot what would take long to make again, and the largest log while all together are too large."""
        if record.seconds > self.settings.snapshot_after_s:
            await self._try_snapshot(record)
        while sum(each.nbytes for each in self._records.values()) > self.settings.snapshot_after_bytes:
            largest = max(self._records.values(), key=lambda each: each.nbytes)
            if not await self._try_snapshot(largest):
                return

    async def _try_snapshot(self, record: Record) -> bool:
        """A snapshot that fails fails no operation: the log goes on growing. False then."""
        try:
            await self._present(record.spec.policy)
            await self._snapshot(record, record.state)
        except RanksDied as error:
            _log.warning("%s", error.message)
            self._lose_ranks()
            return False
        except RoostError as error:
            _log.warning("policy %s can't be snapshotted: %s", record.spec.policy, error.message)
            return False
        return True

    async def _snapshot(self, record: Record, state: State) -> None:
        """Keep the ranks' state, which is ``state``, instead of what leads to it."""
        policy = record.spec.policy
        folder = self._snapshots.folder(policy, state.number)
        await self._save(record.spec, folder, state, optimizer=True)
        record.snapshotted(state, str(folder))
        await asyncio.to_thread(self._snapshots.drop_others, policy, folder)

    async def _save(self, spec: PolicySpec, folder: Path, state: State, *, optimizer: bool) -> None:
        draft = make_draft(folder)
        try:
            answers = await self._ask_any(
                SaveState(policy=spec.policy, path=str(draft), optimizer=optimizer, gradients=state.gradients)
            )
            files = {name: digest for answer in answers for name, digest in _one([answer], Done).files.items()}
            manifest = StateManifest(
                spec=spec,
                step=state.step,
                optimizer=optimizer,
                gradients=state.gradients,
                files=files,
                number=state.number,
                answer=encode_answer(state.answer),
                base=self.settings.fingerprint,
            )
            await asyncio.to_thread(commit_draft, draft, folder, manifest)
        finally:
            await asyncio.to_thread(shutil.rmtree, draft, True)


def _raise_failed(failed: Sequence[Failed]) -> None:
    if failed:
        raise error_for(failed[0].outcome, failed[0].message, field=failed[0].field)


def _one(answers: Sequence[AnswerOfRank], kind: type[Answer]) -> Answer:
    """The first rank's answer, where all give the same. Raises EngineFailed for one of another kind."""
    if not isinstance(answers[0], kind):
        raise EngineFailed(f"a rank answered {type(answers[0]).__name__} instead of {kind.__name__}")
    return answers[0]


def _merged(answers: Sequence[AnswerOfRank]) -> Outputs:
    """Each datum's output, from the rank that has it."""
    outputs = [_one([answer], Outputs) for answer in answers]
    data = {place: output for each in outputs for place, output in each.data.items()}
    return Outputs(data=dict(sorted(data.items())), seconds=max(each.seconds for each in outputs))


def _summed(reports: Sequence[MemoryReport]) -> MemoryReport:
    policies = {
        name: PolicyMemory(
            **{
                field: sum(getattr(report.policies[name], field) for report in reports)
                for field in msgspec.structs.asdict(PolicyMemory())
            }
        )
        for name in reports[0].policies
    }
    return MemoryReport(
        policies=policies,
        base=sum(report.base for report in reports),
        scratch=sum(report.scratch for report in reports),
        peak=sum(report.peak for report in reports),
    )
