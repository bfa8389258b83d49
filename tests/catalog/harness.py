"""A catalog without sockets, and what tests put into it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb

from catalog.batch import BatchAnswer, BatchCommand
from catalog.blobs import BlobStore, Stored
from catalog.environment import Environment
from catalog.layout import Txn
from catalog.ledger import Ledger
from catalog.names import parse_reference
from catalog.replay import check_environment
from catalog.view import CatalogView, Resolution
from wire.events import ArtifactFacts
from wire.outcomes import error_for
from wire.registrar import AddBase, Committed, PublishRevision, Refusal

BASE = "tiny"
BASE_FINGERPRINT = "b" * 64
TARGETS = ("q", "v")
POLICY = "acme/support"


def facts_of(stored: Stored, *, rank: int = 8) -> ArtifactFacts:
    return ArtifactFacts(stored.digest, stored.size, rank, TARGETS, "bf16", 4, 1024)


def upload(store: BlobStore, content: bytes) -> ArtifactFacts:
    with store.writer() as writer:
        writer.write(content)
        return facts_of(writer.commit())


def add_base(name: str = BASE, fingerprint: str = BASE_FINGERPRINT) -> AddBase:
    return AddBase(name=name, fingerprint=fingerprint, path=f"/models/{name}", config=b"{}")


class Clock:
    """The time, and as much as a test wants it to be ahead."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class Sweeping:
    """What a sweep is told: all but ``named`` are orphans. ``asked`` is what it asked for."""

    def __init__(self, *named: str, everything_is_named: bool = False) -> None:
        self.asked: list[str] = []
        self._named = named
        self._everything = everything_is_named

    @contextlib.contextmanager
    def __call__(self, digests: Sequence[str], /) -> Iterator[frozenset[str]]:
        self.asked += digests
        yield frozenset() if self._everything else frozenset(digests) - set(self._named)


class Catalog:
    """A ledger over ``folder`` and the view of the same environment. Its clock ticks once a reading."""

    def __init__(
        self, folder: Path, *, map_bytes: int = 1 << 26, commit: Callable[[Txn], None] = lmdb.Transaction.commit
    ) -> None:
        self.environment = Environment.create(folder / "catalog", map_bytes=map_bytes)
        self.store = BlobStore(folder / "store")
        ticks = itertools.count(1_000)
        self.ledger = Ledger(self.environment, self.store, now_ms=lambda: next(ticks), commit=commit)
        self.view = CatalogView(self.environment)

    def answers(self, *commands: BatchCommand) -> list[BatchAnswer]:
        return self.ledger.run(commands).answers

    def run(self, command: BatchCommand) -> Committed:
        """The answer to a command alone. Raises what it was refused with."""
        answer = self.ledger.run([command]).answers[0]
        if isinstance(answer, Refusal):
            raise error_for(answer.outcome, answer.message, field=answer.field)
        assert isinstance(answer, Committed)
        return answer

    def publish(self, policy: str, content: bytes, *, create_over: str = BASE, writer: str = "") -> Committed:
        facts = upload(self.store, content)
        return self.run(PublishRevision(policy=policy, artifact=facts, create_over=create_over, writer=writer))

    def resolve(self, text: str, *, selector: bytes = b"") -> Resolution:
        return self.view.resolve(parse_reference(text), selector=selector)

    def close(self) -> None:
        self.environment.close()


def with_revisions(catalog: Catalog, *contents: bytes) -> Catalog:
    """``catalog`` with a revision of one policy for each of ``contents``."""
    for content in contents:
        catalog.publish(POLICY, content)
    return catalog


def is_what_the_journal_makes(catalog: Catalog) -> None:
    assert check_environment(catalog.environment).differences == ()


def live(catalog: Catalog, policy: str = POLICY) -> list[int]:
    return [record.revision for record in catalog.view.revisions(policy) if not record.retired_ms]
