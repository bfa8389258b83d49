"""What the training service tells the catalog: policies, revisions with their bytes, and checkpoints."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from catalog.artifacts import ArtifactStore
from catalog.checks import WriteCommand
from catalog.client import RegistrarClient
from wire.events import ArtifactFacts, Provenance, RecordKind, TrainingRecord
from wire.outcomes import JournalUnavailable, NotFound
from wire.registrar import Committed, CreatePolicy, PublishRevision, ReleaseRecord, RetainRecord

from .records import RunRecord, SavedRecord

_COPY_BYTES = 4 << 20
# a registrar that restarts is waited for
_PATIENCE_S = 60.0
_RETRY_S = 0.5


class Publisher:
    """Over the artifact store and the registrar. Raises what they refuse with."""

    def __init__(self, store: ArtifactStore, registrar: RegistrarClient, *, format_name: str) -> None:
        self._store = store
        self._registrar = registrar
        self._format = format_name

    async def create(self, run: RunRecord) -> None:
        """The run's policy, where there is none yet."""
        await self._commit(CreatePolicy(actor=run.key_id, policy=run.policy, base=run.base))

    async def publish(self, run: RunRecord, file: Path, facts: ArtifactFacts, source: str) -> Committed:
        """Bytes first, then the event: the revision file ``file`` becomes the newest revision of the run's policy."""
        await asyncio.to_thread(self._keep, file, facts)
        provenance = Provenance(source=source, format=self._format, run=run.model_id, step=run.step)
        return await self._commit(
            PublishRevision(
                actor=run.key_id, policy=run.policy, artifact=facts, provenance=provenance, create_over=run.base
            )
        )

    async def retain(self, run: RunRecord, path: str) -> None:
        """The policy keeps hold of a checkpoint."""
        record = TrainingRecord(RecordKind.CHECKPOINT, path, step=run.step)
        await self._commit(RetainRecord(actor=run.key_id, policy=run.policy, record=record))

    async def release(self, saved: SavedRecord, actor: str) -> None:
        """It no longer does; nothing happens where it did not."""
        command = ReleaseRecord(actor=actor, policy=saved.policy, kind=RecordKind.CHECKPOINT, uri=saved.path)
        try:
            await self._commit(command)
        except NotFound:
            return

    def _keep(self, file: Path, facts: ArtifactFacts) -> None:
        if self._store.size(facts.digest) == facts.size:
            return
        with self._store.writer(facts.digest) as writer, file.open("rb") as source:
            while piece := source.read(_COPY_BYTES):
                writer.write(piece)
            writer.commit(facts.digest)

    async def _commit(self, command: WriteCommand) -> Committed:
        """Repeats what a registrar that is away can't answer: every command here may be repeated."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await self._registrar.run(command)
            except JournalUnavailable:
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(_RETRY_S)
