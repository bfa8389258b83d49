"""The object store as the registrar's ledger sees it: its one thread neither waits for the network nor is deceived.

Whether an artifact is there is looked up before a command's turn comes, off the ledger's thread, and remembered for a
moment. The sweep condemns orphans on the ledger's thread, where no publish can come between the look at the catalog
and the condemnation; from then on they count as absent, while a thread of its own deletes them.

Where several registrars share a journal, its ledger tells all of them what one of them removes: nobody names that while
it lasts, and what was seen of it before is forgotten.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import msgspec
import obstore

from wire.outcomes import ArtifactUnavailable

from ..blobs import Orphans, Swept, is_digest
from .faults import told
from .store import ObjectStore

_REMEMBER_S = 30.0
_REMEMBER_MOST = 65_536
_PAGE = 1000
_DELETED_AT_ONCE = 100
_DELETE_MOST_S = 600.0
# how long a step of the sweep may keep the ledger's thread waiting
_STEP_S = 0.005

# with several registrars, whose clocks differ, no sweep goes below this
_SHARED_LEAST_AGE_S = 1800.0

T = TypeVar("T")


class _Old(msgspec.Struct, frozen=True):
    """An object past its age; ``digest`` is empty for what an upload left unnamed. ``size`` in bytes."""

    key: str
    digest: str
    size: int


class Presence:
    """``look`` is for any thread, all else for the ledger's. ``shared``: other registrars write the same journal."""

    def __init__(self, store: ObjectStore, *, shared: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._shared = shared
        self._now = now
        self._lock = threading.Lock()
        self._found: OrderedDict[str, tuple[float, int | None]] = OrderedDict()
        self._missed: set[str] = set()
        # one set for each deletion under way: sweeps may overlap
        self._condemned: list[frozenset[str]] = []
        # raised by every condemnation and its end: an answer that was on its way then is not remembered
        self._epoch = 0

    def look(self, digest: str) -> int | None:
        """Ask the store, and remember. Bytes, or None; raises InvalidRequest and ArtifactUnavailable."""
        epoch, until = self._epoch, self._now() + _REMEMBER_S
        found = self._store.find(digest)
        size = None if found is None else found.size
        with self._lock:
            self._missed.discard(digest)
            if epoch == self._epoch:
                self._found[digest] = (until, size)
                self._found.move_to_end(digest)
                if len(self._found) > _REMEMBER_MOST:
                    self._found.popitem(last=False)
        return size

    @property
    def sweeping(self) -> bool:
        """Whether a deletion is under way."""
        return bool(self._condemned)

    def removing(self, digest: str) -> bool:
        with self._lock:
            return any(digest in digests for digests in self._condemned)

    def forget(self, digests: Iterable[str]) -> None:
        """Believe nothing that was seen of them before this moment, nor what is on its way."""
        with self._lock:
            self._epoch += 1
            for digest in digests:
                self._found.pop(digest, None)

    def size(self, digest: str) -> int | None:
        """What was found a moment ago. The store is not asked: the journal's lock may be held.

        Raises ArtifactUnavailable where nobody has looked, or too long ago; ``missed`` then has it.
        """
        if self.removing(digest):
            return None
        with self._lock:
            until, size = self._found.get(digest, (-math.inf, None))
            if until > self._now():
                return size
            if len(self._missed) < _REMEMBER_MOST:
                self._missed.add(digest)
        raise ArtifactUnavailable(
            f"artifact {digest} was not looked for in time: ask again", field="digest", retry_after_s=1.0
        )

    def missed(self) -> frozenset[str]:
        """What was asked for and nobody had looked for yet."""
        with self._lock:
            return frozenset(self._missed)

    def sweep_by_folder(self, orphans: Orphans, older_than_s: float) -> Iterator[Swept]:
        """Delete objects that are ``orphans``, past an age in seconds; short steps, many of them empty.

        An artifact that is uploaded again in the very moment of its deletion is lost, and its publisher told to upload
        it again: the registrar names nothing that is not there. Raises ArtifactUnavailable.
        """
        limit = self._store.now() - (max(older_than_s, _SHARED_LEAST_AGE_S) if self._shared else older_than_s)
        background = ThreadPoolExecutor(1, thread_name_prefix="sweep")
        try:
            for prefix in ("partial", "blobs"):
                pages = self._pages(prefix, limit)
                while (page := (yield from _steps(background.submit(_next_page, pages)))) is not None:
                    with orphans([old.digest for old in page if old.digest]) as unnamed:
                        gone = [old for old in page if not old.digest or old.digest in unnamed]
                        yield from self._delete(gone, background)
        finally:
            background.shutdown(wait=False, cancel_futures=True)

    def _delete(self, orphans: list[_Old], background: ThreadPoolExecutor) -> Iterator[Swept]:
        if not orphans:
            return
        condemned = frozenset(old.digest for old in orphans)
        with self._changing():
            self._condemned.append(condemned)
        deletion = background.submit(self._delete_now, [old.key for old in orphans])
        try:
            yield from _steps(deletion)
        finally:
            # whoever stops the sweep here waits for what is under way: it must not outlive the condemnation
            wait([deletion])
            with self._changing():
                self._condemned.remove(condemned)
        yield Swept(len(orphans), sum(old.size for old in orphans))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """While what is condemned changes, nothing that was seen before is remembered."""
        with self._lock:
            self._epoch += 1
            self._found.clear()
            yield

    def _delete_now(self, keys: list[str]) -> None:
        """Raises ArtifactUnavailable, also where it takes so long that it might outlive what registrars were told."""
        until = self._now() + _DELETE_MOST_S
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            if self._now() > until:
                raise ArtifactUnavailable("the object store removes too slowly: the clean-up is given up")
            with told("clean up the object store"):
                obstore.delete(self._store.handle, keys[start : start + _DELETED_AT_ONCE])

    def _pages(self, prefix: str, limit: float) -> Iterator[list[_Old]]:
        with told("list the object store"):
            for page in obstore.list(self._store.handle, prefix, chunk_size=_PAGE):
                old = [meta for meta in page if meta["last_modified"].timestamp() <= limit]
                yield [
                    _Old(meta["path"], "" if prefix == "partial" else meta["path"].rpartition("/")[2], meta["size"])
                    for meta in old
                    if prefix == "partial" or is_digest(meta["path"].rpartition("/")[2])
                ]


def _next_page(pages: Iterator[list[_Old]]) -> list[_Old] | None:
    return next(pages, None)


def _steps(work: Future[T]) -> Generator[Swept, None, T]:
    """Empty steps until ``work`` is done; its result is the value of ``yield from``."""
    while not wait([work], timeout=_STEP_S).done:
        yield Swept(0, 0)
    return work.result()
