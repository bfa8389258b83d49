"""What the training service tells the catalog: policies, revisions with their bytes, and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from catalog.artifacts import ArtifactStore
from catalog.checks import WriteCommand
from catalog.client import RegistrarClient
from wire.events import ArtifactFacts, Provenance, RecordKind, TrainingRecord
from wire.outcomes import JournalUnavailable, NotFound
from wire.registrar import ClaimPolicy, Committed, CreatePolicy, PublishRevision, ReleaseRecord, RetainRecord

from .copying import FollowingCopy
from .records import RunRecord, SamplerRecord, SavedRecord
from .transfers import Transfer, Transfers

_log = logging.getLogger(__name__)

# a registrar that restarts is waited for
_PATIENCE_S = 60.0
_RETRY_S = 0.5
# who is said to have asked for what no client did
_ACTOR = "training"


class Publication:
    """One revision from its first byte to its announcement. ``progress`` is for ``TrainerBackend.export_revision``."""

    def __init__(self, publisher: Publisher, run: RunRecord, copy: FollowingCopy, transfer: Transfer | None) -> None:
        self._publisher = publisher
        self._run = run
        self._copy = copy
        self._transfer = transfer
        self._clock = Stopwatch()

    def progress(self, done: int, total: int) -> None:
        """Nodes and the store have the bytes while they are written."""
        self._clock.begun()
        if self._transfer is not None:
            self._transfer.progress(done, total)
        self._copy.progress(done)

    async def commit(self, facts: ArtifactFacts, source: str) -> Committed:
        """Bytes first, then the event, which waits a moment for nodes that pull: the file is the newest revision."""
        self._clock.ended("export")
        if self._transfer is not None:
            self._transfer.bind(facts.digest)
        storing = asyncio.create_task(self._copy.commit(facts))
        try:
            if self._transfer is not None:
                await self._transfer.pulled(self._publisher.announce_wait_s)
                self._clock.ended("nodes")
        finally:
            await storing
        self._clock.ended("store")
        run = self._run
        provenance = Provenance(source=source, format=self._publisher.format, run=run.model_id, step=run.step)
        committed = await self._publisher.run(
            PublishRevision(
                actor=run.key_id,
                policy=run.policy,
                artifact=facts,
                provenance=provenance,
                create_over=run.base,
                writer=run.model_id,
            )
        )
        self._clock.ended("event")
        _log.info("%s@%d, %d bytes: %s", run.policy, committed.revision, facts.size, self._clock)
        return committed


class Publisher:
    """Over the artifact store and the registrar. Raises what they refuse with.

    Revisions are offered to nodes by ``transfers``, where there are any; an event waits ``announce_wait_s`` at most for
    nodes that pull what it names.
    """

    def __init__(
        self,
        store: ArtifactStore,
        registrar: RegistrarClient,
        *,
        format_name: str,
        transfers: Transfers | None = None,
        announce_wait_s: float = 0.0,
    ) -> None:
        self._store = store
        self._registrar = registrar
        self._transfers = transfers
        self.format = format_name
        self.announce_wait_s = announce_wait_s

    async def create(self, run: RunRecord) -> None:
        """The run's policy, where there is none yet. The run publishes to it from now on, and no other does."""
        await self.run(CreatePolicy(actor=run.key_id, policy=run.policy, base=run.base))
        await self.run(ClaimPolicy(actor=run.key_id, policy=run.policy, writer=run.model_id))

    @contextlib.asynccontextmanager
    async def publication(self, run: RunRecord, file: Path) -> AsyncIterator[Publication]:
        """Publish the revision that will be written to ``file``, which is removed in the end.

        Left without a commit, nothing remains of it.
        """
        transfer = None
        if self._transfers is not None:
            transfer = self._transfers.begin(file, policy=run.policy, base=run.base, rank=run.rank)
        copy = FollowingCopy(self._store, file)
        try:
            yield Publication(self, run, copy, transfer)
        except BaseException:
            if transfer is not None:
                transfer.withdraw()
            raise
        finally:
            if transfer is not None and self._transfers is not None:
                self._transfers.end(transfer)
            await copy.close()
            await asyncio.to_thread(file.unlink, missing_ok=True)

    async def retain(self, run: RunRecord, path: str) -> None:
        """The policy keeps hold of a checkpoint."""
        record = TrainingRecord(RecordKind.CHECKPOINT, path, step=run.step)
        await self.run(RetainRecord(actor=run.key_id, policy=run.policy, record=record))

    async def release(self, saved: SavedRecord) -> None:
        """It no longer does; nothing happens where it did not."""
        await self._release(saved.policy, RecordKind.CHECKPOINT, saved.path)

    async def retain_for(self, sampler: SamplerRecord) -> None:
        """The policy keeps hold of the revision that ``sampler`` is bound to, and of none that it was bound to before.

        Raises NotFound where that is gone.
        """
        record = TrainingRecord(RecordKind.ROLLOUT, _uri(sampler), revision=sampler.revision)
        await self.run(RetainRecord(actor=_ACTOR, policy=sampler.policy, record=record))

    async def release_for(self, sampler: SamplerRecord) -> None:
        """It no longer does; nothing happens where it did not."""
        await self._release(sampler.policy, RecordKind.ROLLOUT, _uri(sampler))

    async def run(self, command: WriteCommand) -> Committed:
        """Repeats what a registrar that is away can't answer: every command here may be repeated."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await self._registrar.run(command)
            except JournalUnavailable:
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _release(self, policy: str, kind: RecordKind, uri: str) -> None:
        with contextlib.suppress(NotFound):
            await self.run(ReleaseRecord(actor=_ACTOR, policy=policy, kind=kind, uri=uri))


def _uri(sampler: SamplerRecord) -> str:
    return f"tinker://{sampler.sampler_id}"


class Stopwatch:
    """How long each stage took, from the first byte on, for the log."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0
        self._stages: dict[str, float] = {}

    def begun(self) -> None:
        """The first byte is about to be written; known already, nothing happens."""
        if self._began is None:
            self._began = self._last = time.monotonic()

    def ended(self, stage: str) -> None:
        self.begun()
        now = time.monotonic()
        self._stages[stage] = now - self._last
        self._last = now

    def __str__(self) -> str:
        return " ".join(f"{stage}_s={seconds:.4f}" for stage, seconds in self._stages.items())
