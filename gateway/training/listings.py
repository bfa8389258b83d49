"""What there is, newest first, as its owners look through it: sessions, runs, and what runs have saved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from .journal import place_of
from .paths import SAMPLER_WEIGHTS, WEIGHTS
from .records import RunRecord, SavedRecord, SessionRecord
from .store import Store, Table

T = TypeVar("T")
R = TypeVar("R", SessionRecord, RunRecord, SavedRecord)

_AT_ONCE = 1000

# whether a tenant is the asker's
Reaches = Callable[[str], bool]


class Page(NamedTuple, Generic[T]):
    """Some of ``total``."""

    items: list[T]
    total: int


class RunListed(NamedTuple):
    """``asked_ms`` is when its newest operation came; ``metadata`` is its session's."""

    run: RunRecord
    asked_ms: int
    checkpoint: SavedRecord | None
    sampler: SavedRecord | None
    metadata: dict[str, str]


class Listings:
    """Reads of an open store, for the event loop's thread.

    The order is that of beginnings, which never changes: between two pages what is new moves the rest on, so that an
    item may be seen twice, but none is missed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def sessions(self, reaches: Reaches, offset: int, limit: int) -> Page[SessionRecord]:
        return await self._page(self._store.sessions, reaches, offset, limit)

    async def runs(self, reaches: Reaches, offset: int, limit: int) -> Page[RunListed]:
        page = await self._page(self._store.runs, reaches, offset, limit)
        listed = []
        for run in page.items:
            listed.append(self.run(run))
            await asyncio.sleep(0)
        return Page(listed, page.total)

    async def saved(self, reaches: Reaches, offset: int, limit: int) -> Page[SavedRecord]:
        return await self._page(self._store.saved, reaches, offset, limit)

    def saved_by(self, run: RunRecord) -> list[SavedRecord]:
        """All of it."""
        with self._store.read() as txn:
            found = list(self._store.saved.values(txn, f"tinker://{run.model_id}/"))
        return sorted((each for each in found if not each.removed_ms), key=_order_of_saved, reverse=True)

    def run(self, run: RunRecord) -> RunListed:
        saved = self.saved_by(run)
        with self._store.read() as txn:
            session = self._store.sessions.get(txn, run.session_id)
        return RunListed(
            run,
            self._asked_ms(run),
            _first(saved, f"tinker://{run.model_id}/{WEIGHTS}/"),
            _first(saved, f"tinker://{run.model_id}/{SAMPLER_WEIGHTS}/"),
            session.metadata if session is not None else {},
        )

    def of_session(self, session: SessionRecord) -> tuple[list[str], list[str]]:
        """The ids of its runs and of its sampling sessions, in the order of their numbers."""
        with self._store.read() as txn:
            runs = [each.model_id for each in self._store.runs.values(txn, f"{session.session_id}:")]
            samplers = [each.sampler_id for each in self._store.samplers.values(txn, f"{session.session_id}:")]
        return sorted(runs, key=_number), sorted(samplers, key=_number)

    def _asked_ms(self, run: RunRecord) -> int:
        """Only the newest with a result and those without one are looked at: a run has many."""
        prefix = run.model_id.encode() + b"\0"
        newest = run.created_ms
        start = place_of(run.model_id, max(run.next_seq - 1, 0))
        with self._store.read() as txn:
            for key, request_id in self._store.places.items(txn, start=start):
                if not key.startswith(prefix):
                    break
                operation = self._store.operations.get(txn, request_id.decode())
                newest = max(newest, operation.accepted_ms if operation is not None else 0)
        return newest

    async def _page(self, table: Table[R], reaches: Reaches, offset: int, limit: int) -> Page[R]:
        """A few records at a time, so that others have their turn."""
        found: list[tuple[int, str]] = []
        last = ""
        while True:
            with self._store.read() as txn:
                some = table.behind(txn, last, _AT_ONCE)
            if not some:
                break
            found += [(each.created_ms, key) for key, each in some if reaches(each.tenant) and _is_there(each)]
            last = some[-1][0]
            await asyncio.sleep(0)
        found.sort(reverse=True)
        with self._store.read() as txn:
            items = [table.get(txn, key) for _, key in found[offset : offset + limit]]
        return Page([each for each in items if each is not None], len(found))


def _is_there(record: SessionRecord | RunRecord | SavedRecord) -> bool:
    return not isinstance(record, SavedRecord) or not record.removed_ms


def _order_of_saved(saved: SavedRecord) -> tuple[int, str]:
    return saved.created_ms, saved.path


def _first(saved: Iterable[SavedRecord], prefix: str) -> SavedRecord | None:
    return next((each for each in saved if each.path.startswith(prefix)), None)


def _number(name: str) -> int:
    return int(name.rpartition(":")[2])
