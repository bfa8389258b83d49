"""What each operation of a run does. Everything here may be done twice: what counts is resolved once."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from backends.trainer import TrainerBackend
from catalog.checks.common import must_write
from gateway.catalog_source import CatalogSource
from packer.modules import EXPERT_PATHS, SHARED_PATHS
from wire.outcomes import InvalidRequest, NotFound, VersionConflict
from wire.trainer import Outputs

from .fairness import Stage
from .journal import Effects, Journal
from .paths import SAMPLER_WEIGHTS, WEIGHTS, SavedPath, parse_path
from .publishing import Publisher
from .records import RunRecord, SamplerRecord, SavedRecord
from .removal import Removal
from .retention import Retention
from .trainees import Trainees, spec_of
from .work import (
    AnyResult,
    Created,
    CreateRun,
    Load,
    Loaded,
    Refused,
    ResumeRun,
    Save,
    Saved,
    SavedForSampler,
    SaveForSampler,
    Step,
    Stepped,
    Train,
    Trained,
    TrainingAsk,
)

_MLP = {"gate", "up", "down", *SHARED_PATHS, *EXPERT_PATHS}


class Done(NamedTuple):
    """A result, and what is to be recorded with it."""

    result: AnyResult
    effects: Effects


class Executor:
    """``folder`` is where checkpoints lie and revisions are written before they are in the store."""

    def __init__(
        self,
        journal: Journal,
        trainees: Trainees,
        publisher: Publisher,
        retention: Retention,
        removal: Removal,
        catalog: CatalogSource,
        folder: Path,
        *,
        revision_dtype: str,
    ) -> None:
        self._journal = journal
        self._trainees = trainees
        self._publisher = publisher
        self._retention = retention
        self._removal = removal
        self._catalog = catalog
        self._checkpoints = folder / "checkpoints"
        self._exports = folder / "exports"
        self._dtype = revision_dtype
        # what an earlier life was writing when it ended
        shutil.rmtree(self._exports, ignore_errors=True)
        self._exports.mkdir(parents=True, mode=0o700)

    async def run(self, run: RunRecord, ask: TrainingAsk, more: Callable[[], bool]) -> Done:
        """Do it; ``more`` says whether the run's next operation is there. Raises the RoostError that it fails with;
        the run is then as it was."""
        if not run.targets and not isinstance(ask, CreateRun | ResumeRun):
            raise InvalidRequest(f"{run.model_id} could not be made: see the error of its creation", field="model_id")
        match ask:
            case CreateRun():
                return await self._create(run)
            case ResumeRun():
                return await self._resume(run, ask)
            case Train():
                return await self._train(run, ask, more)
            case Step():
                return await self._step(run, ask, more)
            case Save():
                return await self._save(run, ask, more)
            case Load():
                return await self._load(run, ask, more)
            case SaveForSampler():
                return await self._save_for_sampler(run, ask, more)
            case Refused():
                raise InvalidRequest(ask.message)

    async def _create(self, run: RunRecord) -> Done:
        async with self._trainees.first_turn(run) as trainer:
            made = await self._made(run, trainer)
        return Done(Created(model_id=run.model_id), Effects(made))

    async def _resume(self, run: RunRecord, ask: ResumeRun) -> Done:
        saved = self.checkpoint(ask.path, run.tenant)
        number = run.number + 1
        async with self._trainees.first_turn(run) as trainer:
            made = await self._made(run, trainer)
            await trainer.load_state(run.model_id, Path(saved.folder), with_optimizer=ask.optimizer, number=number)
            again = trainer.durable(run.model_id) < number
        made = replace(made, number=number, step=saved.step if ask.optimizer else 0)
        return Done(Loaded(path=ask.path, model_id=run.model_id), Effects(made, change=again))

    async def _made(self, run: RunRecord, trainer: TrainerBackend) -> RunRecord:
        """The run on the trainer and in the catalog; it writes its policy from now on."""
        limits = await trainer.limits()
        wanted = {True: run.mlp, False: run.attention}
        targets = run.targets or tuple(name for name in limits.targets if wanted[name in _MLP])
        if not targets:
            raise InvalidRequest("lora_config: nothing is to be trained", field="lora_config")
        made = replace(run, targets=targets)
        await trainer.create_policy(spec_of(made))
        await self._publisher.create(made)
        return made

    async def _train(self, run: RunRecord, ask: Train, more: Callable[[], bool]) -> Done:
        number = run.number + 1
        async with self._trainees.turn(run, Stage.GRADIENTS, more) as trainer:
            if ask.forward_only:
                outputs = await trainer.forward(run.model_id, ask.batch)
            else:
                outputs = await trainer.forward_backward(run.model_id, ask.batch, number=number)
        result = _trained(outputs)
        if ask.forward_only:
            return Done(result, Effects(run))
        return Done(result, Effects(replace(run, number=number), change=True))

    async def _step(self, run: RunRecord, ask: Step, more: Callable[[], bool]) -> Done:
        number = run.number + 1
        async with self._trainees.turn(run, Stage.OPTIMISER, more) as trainer:
            stepped = await trainer.optim_step(run.model_id, ask.adam, number=number)
        metrics = {"grad_norm:mean": stepped.grad_norm, "step:max": float(stepped.step)}
        return Done(Stepped(metrics=metrics), Effects(replace(run, number=number, step=stepped.step), change=True))

    async def _save(self, run: RunRecord, ask: Save, more: Callable[[], bool]) -> Done:
        path = str(SavedPath(run.model_id, WEIGHTS, ask.name))
        if not ask.overwrite and self._journal.saved(path) is not None:
            raise InvalidRequest(f"{path} is there already: overwrite it, or choose another name", field="path")
        folder = self._checkpoints / run.model_id / ask.name
        await self._removal.saving(run.model_id, path)
        async with self._trainees.turn(run, Stage.RESULT, more) as trainer:
            await trainer.save_state(run.model_id, folder, with_optimizer=True)
        await self._publisher.retain(run, path)
        size = await asyncio.to_thread(_size_of, folder)
        saved = replace(_saved(run, path, ask.ttl_s), folder=str(folder), size=size)
        return Done(Saved(path=path), Effects(run, saved=saved))

    async def _load(self, run: RunRecord, ask: Load, more: Callable[[], bool]) -> Done:
        saved = self.checkpoint(ask.path, run.tenant)
        number = run.number + 1
        async with self._trainees.turn(run, Stage.GRADIENTS, more) as trainer:
            await trainer.load_state(run.model_id, Path(saved.folder), with_optimizer=ask.optimizer, number=number)
            again = trainer.durable(run.model_id) < number
        loaded = replace(run, number=number, step=saved.step if ask.optimizer else 0)
        return Done(Loaded(path=ask.path, model_id=run.model_id), Effects(loaded, change=again))

    async def _save_for_sampler(self, run: RunRecord, ask: SaveForSampler, more: Callable[[], bool]) -> Done:
        policy = self._catalog.view().policy(run.policy)
        if policy is not None:
            must_write(policy, run.model_id)
        self._check_sampler(run, ask)
        path = str(SavedPath(run.model_id, SAMPLER_WEIGHTS, ask.name)) if ask.name else ""
        file = self._exports / secrets.token_hex(8)
        async with self._publisher.publication(run, file) as publication:
            async with self._trainees.turn(run, Stage.RESULT, more) as trainer:
                facts = await trainer.export_revision(
                    run.model_id, file, dtype=self._dtype, progress=publication.progress
                )
            committed = await publication.commit(facts, path or f"tinker://{run.model_id}")
        revision = committed.revision
        run = replace(run, inflight=revision) if ask.follows else run
        saved = replace(_saved(run, path, ask.ttl_s), revision=revision, size=facts.size) if path else None
        sampler = None
        if ask.sampler:
            follows = run.model_id if ask.follows else ""
            sampler = SamplerRecord(ask.sampler, run.tenant, run.base, run.policy, revision, follows=follows)
            self._retention.bound(sampler)
        return Done(SavedForSampler(path=path, sampler=ask.sampler), Effects(run, saved=saved, sampler=sampler))

    def _check_sampler(self, run: RunRecord, ask: SaveForSampler) -> None:
        """A sampling session is bound to another revision only where it follows its run. Raises VersionConflict."""
        known = self._journal.sampler(ask.sampler)
        if known is not None and not (ask.follows and known.follows == run.model_id):
            raise VersionConflict(
                f"the sampling session {ask.sampler} is there already, on something else",
                field="sampling_session_seq_id",
            )

    def recorded(self, model_id: str) -> None:
        """What the run's last operation came to is in the journal."""
        self._removal.recorded(model_id)

    async def end(self, run: RunRecord) -> None:
        """The trainer forgets the run; what it saved and published stays."""
        await self._trainees.remove(run)
        await self._journal.end_run(run.model_id)

    def checkpoint(self, path: str, tenant: str) -> SavedRecord:
        """The checkpoint that ``path`` names. Raises InvalidRequest and NotFound, also for another tenant's."""
        parse_path(path, WEIGHTS)
        saved = self._journal.saved(path)
        if saved is None or saved.tenant != tenant:
            raise NotFound(f"there is no checkpoint {path}", field="path")
        return saved


def _size_of(folder: Path) -> int:
    """Bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _trained(outputs: Outputs) -> Trained:
    data = tuple(outputs.data[place] for place in sorted(outputs.data))
    tokens = sum(len(datum.logprobs) // 4 for datum in data)
    return Trained(data=data, metrics={"loss:sum": outputs.loss, "tokens:sum": float(tokens)})


def _saved(run: RunRecord, path: str, ttl_s: int) -> SavedRecord:
    now_ms = time.time_ns() // 1_000_000
    return SavedRecord(
        path=path,
        model_id=run.model_id,
        tenant=run.tenant,
        policy=run.policy,
        base=run.base,
        created_ms=now_ms,
        expires_ms=now_ms + ttl_s * 1000 if ttl_s else 0,
        step=run.step,
        rank=run.rank,
        alpha=run.alpha,
        seed=run.seed,
        attention=run.attention,
        mlp=run.mlp,
        targets=run.targets,
    )
