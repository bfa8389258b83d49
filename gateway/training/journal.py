"""What is durable, and when: operations before they are acknowledged, results and their effects together.

An operation is known by its owner (a run or a sampling session) and its seq; asked again, it is the same one. A change
(what the trainer numbers) keeps its ask until the trainer's own snapshot has it: see ``forget_changes``.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from wire.outcomes import InvalidRequest, NotFound, Retired, VersionConflict

from .records import OperationRecord, RunRecord, SamplerRecord, SavedRecord, SessionRecord
from .store import Store, Txn
from .work import (
    AnyAsk,
    AnyResult,
    Category,
    Failed,
    Sample,
    TrainingAsk,
    decode_ask,
    decode_result,
    encode,
    fingerprint,
    loaded_path,
)

# in one transaction
_MAX_PRUNED = 10_000
_ALL = (1 << 63) - 1
# more than a load takes: batches need not be looked into
_MAX_LOAD_BYTES = 2048


class Accepted(NamedTuple):
    """``new``: it was not known before."""

    operation: OperationRecord
    new: bool


class _Loading(NamedTuple):
    tenant: str
    path: str
    run: str


class Effects(NamedTuple):
    """What an operation changed besides its result. ``change``: the trainer counted it, and has it not on disk."""

    run: RunRecord
    change: bool = False
    saved: SavedRecord | None = None
    sampler: SamplerRecord | None = None


class Journal:
    """Over an open store. Writes return once they are durable, and raise StorageFull and JournalUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # reading

    def session(self, session_id: str) -> SessionRecord | None:
        with self._store.read() as txn:
            return self._store.sessions.get(txn, session_id)

    def run(self, model_id: str) -> RunRecord | None:
        with self._store.read() as txn:
            return self._store.runs.get(txn, model_id)

    def ending(self) -> list[RunRecord]:
        """Runs whose session is finished, and that have not ended."""
        with self._store.read() as txn:
            runs = [run for run in self._store.runs.values(txn) if not run.ended]
            sessions = {name: self._store.sessions.get(txn, name) for name in {run.session_id for run in runs}}
        finished = {name for name, session in sessions.items() if session is not None and session.finished}
        return [run for run in runs if run.session_id in finished]

    def sampler(self, sampler_id: str) -> SamplerRecord | None:
        with self._store.read() as txn:
            return self._store.samplers.get(txn, sampler_id)

    def held(self) -> list[SamplerRecord]:
        """The sampling sessions whose revisions are kept for them."""
        with self._store.read() as txn:
            found = (self._store.samplers.get(txn, key.decode()) for key, _ in self._store.held.items(txn))
            return [sampler for sampler in found if sampler is not None]

    def holder(self, sampler_id: str) -> SamplerRecord | None:
        """The sampling session, if a revision is kept for it."""
        with self._store.read() as txn:
            if self._store.held.get(txn, sampler_id.encode()) is None:
                return None
            return self._store.samplers.get(txn, sampler_id)

    def saved(self, path: str, *, removed: bool = False) -> SavedRecord | None:
        """What ``path`` names; with ``removed`` also what was removed, for as long as that is known."""
        with self._store.read() as txn:
            found = self._store.saved.get(txn, path)
        return found if found is not None and (removed or not found.removed_ms) else None

    def due(self, now_ms: int) -> list[SavedRecord]:
        """What has to go: saved for a time that is over and no run's to load, or removed with bytes left."""
        with self._store.read() as txn:
            found = [each for each in self._store.saved.values(txn) if _is_due(each, now_ms)]
            needed = {(each.tenant, each.path) for each in (self._loading(txn) if found else ())}
        return [each for each in found if each.removed_ms or (each.tenant, each.path) not in needed]

    def operation(self, request_id: str) -> OperationRecord | None:
        with self._store.read() as txn:
            return self._store.operations.get(txn, request_id)

    def ask(self, request_id: str) -> AnyAsk:
        """What was asked for. Raises NotFound once it is kept no more."""
        with self._store.read() as txn:
            found = self._store.asks.get(txn, request_id.encode())
        if found is None:
            raise NotFound(f"what {request_id} asked for is kept no more", field="request_id")
        return decode_ask(found)

    def result(self, request_id: str) -> AnyResult | None:
        """None while there is none. Raises Retired for one that was kept long enough."""
        with self._store.read() as txn:
            found = self._store.results.get(txn, request_id.encode())
            if found is not None:
                return decode_result(found)
            operation = self._store.operations.get(txn, request_id)
        if operation is None or operation.resolved_ms:
            raise Retired("the result was kept long enough, and is gone", field="request_id")
        return None

    def pending(self) -> list[OperationRecord]:
        """Operations that were accepted and have no result."""
        with self._store.read() as txn:
            found = (self._store.operations.get(txn, key.decode()) for key, _ in self._store.pending.items(txn))
            return [operation for operation in found if operation is not None]

    def changes(self, model_id: str, after: int) -> Iterator[tuple[int, str]]:
        """Number and request id of a run's changes behind ``after``, in order, as far as they are kept."""
        prefix = model_id.encode() + b"\0"
        with self._store.read() as txn:
            found = []
            for key, request_id in self._store.changes.items(txn, start=place_of(model_id, after + 1)):
                if not key.startswith(prefix):
                    break
                found.append((int.from_bytes(key[len(prefix) :], "big"), request_id.decode()))
        yield from found

    # writing

    async def open_session(self, tenant: str, key_id: str, metadata: dict[str, str]) -> SessionRecord:
        record = SessionRecord(secrets.token_hex(8), tenant, key_id, _now_ms(), metadata)
        await self._store.commit(lambda txn: self._store.sessions.put(txn, record.session_id, record))
        return record

    async def finish(self, session_id: str, how: str) -> list[RunRecord]:
        """A session takes no more operations; the first word on how it ended stays. Its runs that have not ended."""

        def change(txn: Txn) -> list[RunRecord]:
            session = self._store.sessions.get(txn, session_id)
            if session is not None and not session.finished:
                self._store.sessions.put(txn, session_id, replace(session, finished=how))
            return [run for run in self._store.runs.values(txn, f"{session_id}:") if not run.ended]

        return await self._store.commit(change)

    async def end_run(self, model_id: str) -> None:
        """The trainer has it no more: what its changes asked for is not needed again."""

        def change(txn: Txn) -> None:
            run = self._store.runs.get(txn, model_id)
            if run is not None:
                self._store.runs.put(txn, model_id, replace(run, ended=True))

        await self._store.commit(change)
        await self.forget_changes(model_id, _ALL)

    async def begin_run(self, run: RunRecord, ask: TrainingAsk) -> Accepted:
        """A run and the operation that makes it, which is its operation 0. Raises VersionConflict, InvalidRequest."""

        def change(txn: Txn) -> Accepted:
            self._check_open(txn, run.session_id)
            accepted = self._accept(txn, run.model_id, 0, run.tenant, encode(ask), passed=0)
            if accepted.new:
                self._store.runs.put(txn, run.model_id, run)
            return accepted

        return await self._store.commit(change)

    async def accept(self, model_id: str, seq: int, tenant: str, ask: TrainingAsk) -> Accepted:
        """Log a run's operation. Raises NotFound; VersionConflict where another has its place; InvalidRequest for one
        whose session is finished.
        """
        encoded = encode(ask)

        def change(txn: Txn) -> Accepted:
            run = self._store.runs.get(txn, model_id)
            if run is None:
                raise NotFound(f"there is no run {model_id}", field="model_id")
            self._check_open(txn, run.session_id)
            return self._accept(txn, model_id, seq, tenant, encoded, passed=run.next_seq)

        return await self._store.commit(change)

    async def accept_sample(self, sampler_id: str, seq: int, tenant: str, ask: Sample) -> Accepted:
        """Log a sample. Raises VersionConflict where another has its place."""
        encoded = encode(ask)
        return await self._store.commit(lambda txn: self._accept(txn, sampler_id, seq, tenant, encoded, passed=0))

    async def open_sampler(self, record: SamplerRecord) -> None:
        """Raises VersionConflict where another has its id."""

        def change(txn: Txn) -> None:
            known = self._store.samplers.get(txn, record.sampler_id)
            if known is not None and known != record:
                raise VersionConflict(
                    f"the sampling session {record.sampler_id} is there already, on something else",
                    field="sampling_session_seq_id",
                )
            self._store.samplers.put(txn, record.sampler_id, record)

        await self._store.commit(change)

    async def hold(self, sampler_id: str) -> None:
        """The revision of a sampling session is kept for it from now on."""
        await self._store.commit(lambda txn: self._store.held.put(txn, sampler_id.encode(), b""))

    async def let_go(self, sampler_id: str) -> None:
        """No longer."""
        await self._store.commit(lambda txn: self._store.held.delete(txn, sampler_id.encode()))

    async def resolve(self, operation: OperationRecord, result: AnyResult, effects: Effects | None = None) -> None:
        """The result, with all that the operation changed. A run's cursor moves behind it."""
        encoded = encode(result)
        await self._store.commit(lambda txn: self._resolve(txn, operation, encoded, effects))

    async def resolve_lost(self, model_id: str) -> list[OperationRecord]:
        """Fail the operations that wait behind one which never came; the run goes on behind the last of them.

        All of them or none: what was left over would be run. None where it came after all.
        """

        def change(txn: Txn) -> list[OperationRecord]:
            run = self._store.runs.get(txn, model_id)
            assert run is not None, "operations are logged for runs that are there"
            waiting = list(self._waiting(txn, run))
            if not waiting or waiting[0].seq == run.next_seq:
                return []
            error = f"operation {run.next_seq} of {model_id} never came, so what was sent behind it can't run"
            failed = encode(Failed(error=error, category=Category.USER))
            for operation in waiting:
                self._resolve(txn, operation, failed, None)
            self._store.runs.put(txn, model_id, replace(run, next_seq=waiting[-1].seq + 1))
            return waiting

        return await self._store.commit(change)

    async def forget_changes(self, model_id: str, upto: int) -> None:
        """What changes up to number ``upto`` asked for is not needed again."""
        known = [(number, request_id) for number, request_id in self.changes(model_id, 0) if number <= upto]
        if not known:
            return

        def change(txn: Txn) -> None:
            for number, request_id in known:
                self._store.changes.delete(txn, place_of(model_id, number))
                self._store.asks.delete(txn, request_id.encode())

        await self._store.commit(change)

    async def keep_until(self, path: str, expires_ms: int) -> None:
        """What ``path`` names expires then (0: never). Raises NotFound."""
        await self._store.commit(
            lambda txn: self._store.saved.put(txn, path, replace(self._named(txn, path), expires_ms=expires_ms))
        )

    async def remove_saved(self, path: str) -> SavedRecord:
        """Nobody sees any more what ``path`` names; removed already, it is as it is.

        Raises NotFound, and InvalidRequest where a run has it to load.
        """

        def change(txn: Txn) -> SavedRecord:
            found = self._named(txn, path, removed=True)
            if found.removed_ms:
                return found
            for loading in self._loading(txn):
                if (loading.tenant, loading.path) == (found.tenant, path):
                    raise InvalidRequest(
                        f"{path} is in use: {loading.run} loads it, or has since its trainer's last snapshot",
                        field="path",
                    )
            removed = replace(found, removed_ms=_now_ms())
            self._store.saved.put(txn, path, removed)
            return removed

        return await self._store.commit(change)

    async def bytes_removed(self, record: SavedRecord) -> None:
        """Nothing of what was removed is left; what has been saved in its place stays."""

        def change(txn: Txn) -> None:
            if self._store.saved.get(txn, record.path) == record:
                self._store.saved.put(txn, record.path, replace(record, folder=""))

        await self._store.commit(change)

    async def forget_removed(self, before_ms: int) -> None:
        """Know no longer of what was removed, wholly, before then."""
        with self._store.read() as txn:
            saved = list(self._store.saved.values(txn))
        old = [each for each in saved if 0 < each.removed_ms < before_ms and not each.folder]

        def change(txn: Txn) -> None:
            for record in old:
                if self._store.saved.get(txn, record.path) == record:
                    self._store.saved.delete(txn, record.path)

        if old:
            await self._store.commit(change)

    async def prune(self, before_ms: int) -> int:
        """Drop results that are older; samples altogether, so that they can be asked for anew. Returns how many."""

        def change(txn: Txn) -> int:
            old: list[bytes] = []
            for key, _ in self._store.resolved.items(txn):
                if int.from_bytes(key[:8], "big") >= before_ms or len(old) == _MAX_PRUNED:
                    break
                old.append(key)
            for key in old:
                self._store.resolved.delete(txn, key)
                self._store.results.delete(txn, key[8:])
                operation = self._store.operations.get(txn, key[8:].decode())
                if operation is not None and self._store.runs.get(txn, operation.owner) is None:
                    self._store.operations.delete(txn, operation.request_id)
                    self._store.places.delete(txn, place_of(operation.owner, operation.seq))
            return len(old)

        return await self._store.commit(change)

    def _named(self, txn: Txn, path: str, *, removed: bool = False) -> SavedRecord:
        found = self._store.saved.get(txn, path)
        if found is None or (found.removed_ms and not removed):
            raise NotFound(f"there is no checkpoint {path}", field="path")
        return found

    def _loading(self, txn: Txn) -> Iterator[_Loading]:
        """What runs have to load, now or when their trainer is told their changes again."""
        waiting = (key for key, _ in self._store.pending.items(txn))
        changes = (request_id for _, request_id in self._store.changes.items(txn))
        for key in itertools.chain(waiting, changes):
            operation = self._store.operations.get(txn, key.decode())
            if operation is None or operation.nbytes > _MAX_LOAD_BYTES:
                continue
            encoded = self._store.asks.get(txn, key)
            path = "" if encoded is None else loaded_path(decode_ask(encoded))
            if path:
                yield _Loading(operation.tenant, path, operation.owner)

    def _check_open(self, txn: Txn, session_id: str) -> None:
        """Within the transaction: what is let in behind a finish would be of a run that nobody ends."""
        session = self._store.sessions.get(txn, session_id)
        if session is not None:
            must_be_open(session)

    def _accept(self, txn: Txn, owner: str, seq: int, tenant: str, encoded: bytes, *, passed: int) -> Accepted:
        mark = fingerprint(encoded)
        known = self._store.places.get(txn, place_of(owner, seq))
        if known is not None:
            operation = self._store.operations.get(txn, known.decode())
            if operation is not None and operation.fingerprint == mark:
                return Accepted(operation, False)
            raise VersionConflict(f"operation {seq} of {owner} was sent already, with other contents", field="seq_id")
        if seq < passed:
            raise VersionConflict(f"{owner} is past operation {seq} already", field="seq_id")
        operation = OperationRecord(secrets.token_hex(16), owner, seq, tenant, mark, len(encoded), _now_ms())
        key = operation.request_id.encode()
        self._store.operations.put(txn, operation.request_id, operation)
        self._store.asks.put(txn, key, encoded)
        self._store.places.put(txn, place_of(owner, seq), key)
        self._store.pending.put(txn, key, b"")
        return Accepted(operation, True)

    def _waiting(self, txn: Txn, run: RunRecord) -> Iterator[OperationRecord]:
        """The operations of a run that have no result, in order."""
        prefix = run.model_id.encode() + b"\0"
        for key, request_id in self._store.places.items(txn, start=place_of(run.model_id, run.next_seq)):
            if not key.startswith(prefix):
                return
            operation = self._store.operations.get(txn, request_id.decode())
            if operation is not None and not operation.resolved_ms:
                yield operation

    def _resolve(self, txn: Txn, operation: OperationRecord, encoded: bytes, effects: Effects | None) -> None:
        request_id = operation.request_id
        resolved = replace(operation, resolved_ms=_now_ms())
        self._store.operations.put(txn, request_id, resolved)
        self._store.results.put(txn, request_id.encode(), encoded)
        self._store.pending.delete(txn, request_id.encode())
        self._store.resolved.put(txn, resolved.resolved_ms.to_bytes(8, "big") + request_id.encode(), b"")
        if effects is None or not effects.change:
            self._store.asks.delete(txn, request_id.encode())
        if effects is not None:
            self._apply(txn, operation, effects)

    def _apply(self, txn: Txn, operation: OperationRecord, effects: Effects) -> None:
        run = effects.run
        self._store.runs.put(txn, run.model_id, run)
        if effects.change:
            self._store.changes.put(txn, place_of(run.model_id, run.number), operation.request_id.encode())
        if effects.saved is not None:
            self._store.saved.put(txn, effects.saved.path, effects.saved)
        if effects.sampler is not None:
            self._store.samplers.put(txn, effects.sampler.sampler_id, effects.sampler)


def must_be_open(session: SessionRecord) -> None:
    """Raises InvalidRequest for a session that takes no more operations."""
    if session.finished:
        raise InvalidRequest(f"the session {session.session_id} is finished ({session.finished})", field="session_id")


def _is_due(saved: SavedRecord, now_ms: int) -> bool:
    return bool(saved.folder) if saved.removed_ms else 0 < saved.expires_ms <= now_ms


def place_of(owner: str, number: int) -> bytes:
    return owner.encode() + b"\0" + number.to_bytes(8, "big")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
