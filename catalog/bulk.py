"""Bulk import: revisions from a source, in batches, through the registrar or, while none runs, straight into LMDB.

A batch is one command and one transaction. What is there already is left alone, so an import that was killed is simply
started again; a bookmark beside it spares it the part that was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol

import msgspec

from wire.events import ArtifactFacts, Provenance
from wire.outcomes import InvalidRequest, JournalUnavailable, RoostError, TooLarge, error_for
from wire.registrar import Committed, ImportedRevision, ImportRevisions, Refusal

from . import inputs
from .artifacts import RegistrarStore
from .client import RegistrarClient
from .collector import collecting_rarely
from .exclusive import ExclusiveFolder
from .ledger import Ledger
from .lookahead import named_by
from .migrations import open_to_write
from .names import shown
from .settings import RegistrarSettings

BATCH = 2000
# a source that takes its time (adapters are packed as they are read) has less in a batch, and less to lose
_LONGEST_BATCH_S = 2.0
MAX_LINE_BYTES = 1 << 16
_COUNT_BYTES = 1 << 20
# batches on their way to the registrar, which makes one transaction of those that wait: a page that several of them
# change is then written once: with sixteen, half the bytes that eight write
_UNDER_WAY = 16
_BATCH_TIMEOUT_S = 120.0
# looks into an object store at a time
_LOOKS = 16


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a JSON lines file. ``artifact`` is all facts, or the digest of an artifact in the store."""

    policy: str
    base: str
    artifact: ArtifactFacts | str
    revision: Annotated[int, msgspec.Meta(ge=0, lt=inputs.MAX_NUMBER)] = 0
    provenance: Provenance = Provenance()


class Item(msgspec.Struct, frozen=True):
    """A revision to import, and where its source goes on after it."""

    revision: ImportedRevision
    resume_at: str


class Importer(Protocol):
    """Where batches go."""

    async def run(self, command: ImportRevisions) -> Committed:
        """Raises a RoostError where the batch is refused; nothing of it was imported then."""


class Totals(msgspec.Struct):
    """What an import came to. ``skipped`` folders hold no adapter."""

    seen: int = 0
    published: int = 0
    skipped: int = 0


async def import_all(
    items: Iterable[Item],
    importer: Importer,
    *,
    actor: str,
    external: bool,
    done: Callable[[int, str], object],
) -> Totals:
    """Import everything. ``done`` is called, in order, with the revisions of each batch and where to go on after it.

    Raises the RoostError that a batch was refused with; those before it are imported.
    """
    with collecting_rarely():
        return await _import_all(items, importer, actor, external, done)


async def _import_all(
    items: Iterable[Item], importer: Importer, actor: str, external: bool, done: Callable[[int, str], object]
) -> Totals:
    totals = Totals()
    under_way: deque[tuple[asyncio.Task[Committed], list[Item]]] = deque()

    async def settle() -> None:
        task, batch = under_way.popleft()
        committed = await task
        totals.seen += len(batch)
        totals.published += committed.count
        done(len(batch), batch[-1].resume_at)

    try:
        source = iter(items)
        while batch := _next_batch(source):
            command = ImportRevisions(actor=actor, revisions=tuple(item.revision for item in batch), external=external)
            under_way.append((asyncio.ensure_future(importer.run(command)), batch))
            # lets the batch leave before the next one is read
            await asyncio.sleep(0)
            while under_way and (len(under_way) == _UNDER_WAY or under_way[0][0].done()):
                await settle()
        while under_way:
            await settle()
    finally:
        for task, _ in under_way:
            task.cancel()
    return totals


def _next_batch(source: Iterator[Item]) -> list[Item]:
    batch: list[Item] = []
    ends_at = time.monotonic() + _LONGEST_BATCH_S
    for item in source:
        batch.append(item)
        if len(batch) == BATCH or time.monotonic() >= ends_at:
            break
    return batch


class OnlineImporter:
    """Through the registrar."""

    def __init__(self, client: RegistrarClient) -> None:
        self._client = client

    async def run(self, command: ImportRevisions) -> Committed:
        return await self._client.run(command, timeout_s=_BATCH_TIMEOUT_S)


class OfflineImporter:
    """Into LMDB itself."""

    def __init__(self, ledger: Ledger, store: RegistrarStore) -> None:
        self._ledger = ledger
        self._store = store

    async def run(self, command: ImportRevisions) -> Committed:
        if self._store.look is not None:
            with ThreadPoolExecutor(_LOOKS) as threads:
                list(threads.map(self._store.look, named_by(command)))
        (answer,) = self._ledger.run([command]).answers
        if isinstance(answer, Refusal):
            raise error_for(answer.outcome, answer.message, field=answer.field)
        assert isinstance(answer, Committed)
        return answer


@contextlib.asynccontextmanager
async def open_importer(settings: RegistrarSettings, store: RegistrarStore) -> AsyncIterator[Importer]:
    """The catalog itself while no registrar has it, else its registrar: always that where the journal is elsewhere.

    Raises JournalUnavailable.
    """
    catalog_dir = Path(settings.catalog_dir)
    folder = None
    if not settings.journal:
        with contextlib.suppress(JournalUnavailable):
            folder = ExclusiveFolder(catalog_dir)
    if folder is None:
        with contextlib.closing(RegistrarClient(settings.endpoint, curve=settings.curve)) as client:
            yield OnlineImporter(client)
        return
    with folder, contextlib.closing(open_to_write(catalog_dir, settings.map_bytes)) as environment:
        yield OfflineImporter(Ledger(environment, store), store)


def read_lines(file: BinaryIO, facts_of: Callable[[str], ArtifactFacts]) -> Iterator[Item]:
    """Revisions from JSON lines, from where ``file`` stands; ``facts_of`` opens an artifact that is only named.

    Raises InvalidRequest and TooLarge that name the line, and what ``facts_of`` raises.
    """
    decode = msgspec.json.Decoder(Line).decode
    offset = file.tell()
    while raw := file.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise TooLarge(f"line {_number_of(file, offset)} has over {MAX_LINE_BYTES} bytes", field="file")
        begun, offset = offset, offset + len(raw)
        if raw.isspace():
            continue
        try:
            line = decode(raw)
            facts = line.artifact if isinstance(line.artifact, ArtifactFacts) else facts_of(line.artifact)
            inputs.check_facts(facts)
            inputs.check_provenance(line.provenance)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"line {_number_of(file, begun)} is no revision: {error}", field="file") from None
        except RoostError as error:
            message = f"line {_number_of(file, begun)}: {error.message}"
            raise error_for(error.outcome, message, field=error.field, retry_after_s=error.retry_after_s) from None
        imported = ImportedRevision(
            policy=line.policy, base=line.base, artifact=facts, revision=line.revision, provenance=line.provenance
        )
        yield Item(imported, str(offset))


def _number_of(file: BinaryIO, offset: int) -> int:
    """Of the line that begins at ``offset``: counted only when it is to be told."""
    file.seek(0)
    lines, left = 1, offset
    while left and (data := file.read(min(left, _COUNT_BYTES))):
        lines += data.count(b"\n")
        left -= len(data)
    return lines


class _Mark(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    resume_at: str


class Bookmark:
    """Where an import goes on after it was killed: a small file, replaced in one step, gone when the import is done.

    ``source`` identifies what is imported: a bookmark of another source, or of another version of it, is not used.
    """

    def __init__(self, file: Path, source: str) -> None:
        self._file = file
        self._source = source

    def read(self) -> str:
        """Where to go on; empty at the beginning. Raises InvalidRequest for a file that is no bookmark."""
        try:
            mark = msgspec.json.decode(self._file.read_bytes(), type=_Mark)
        except FileNotFoundError:
            return ""
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{shown(str(self._file))} is no bookmark of an import: {error}") from None
        return mark.resume_at if mark.source == self._source else ""

    def write(self, resume_at: str) -> None:
        # losing the newest bookmark in a crash costs time, not revisions: no fsync
        part = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        part.write_bytes(msgspec.json.encode(_Mark(self._source, resume_at)))
        part.replace(self._file)

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)
