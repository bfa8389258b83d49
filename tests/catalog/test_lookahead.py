"""What stands before the registrar where the store is a network away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from catalog.batch import refusal
from catalog.blobs import Stored
from catalog.lookahead import Lookahead
from catalog.registrar import Reply
from tests.catalog.harness import BASE, facts_of
from wire.outcomes import ArtifactUnavailable, Outcome
from wire.registrar import (
    AnyAnswer,
    AnyCommand,
    Committed,
    ImportedRevision,
    ImportRevisions,
    PublishRevision,
    Refusal,
    RestoreRevision,
)

DONE = Committed(seq=1)


class Asker:
    """One who waits for an answer."""

    def __init__(self) -> None:
        self.expired = False
        self.answer: asyncio.Future[AnyAnswer] = asyncio.get_running_loop().create_future()

    def __call__(self, answer: AnyAnswer, /) -> None:
        self.answer.set_result(answer)


class Store:
    """What was looked for; a look waits while it is ``shut``, and fails with ``trouble``."""

    def __init__(self) -> None:
        self.looked: list[str] = []
        self.missed: set[str] = set()
        self.trouble: Exception | None = None
        self.open = threading.Event()
        self.open.set()

    def look(self, digest: str) -> None:
        self.open.wait(10)
        if self.trouble is not None:
            raise self.trouble
        self.looked.append(digest)
        self.missed.discard(digest)


class Registrar:
    """Refuses commands while something is missed."""

    def __init__(self, store: Store) -> None:
        self.taken: list[AnyCommand] = []
        self._store = store

    def take(self, command: AnyCommand, reply: Reply) -> None:
        self.taken.append(command)
        reply(refusal(ArtifactUnavailable("ask again")) if self._store.missed else DONE)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def registrar(store: Store) -> Registrar:
    return Registrar(store)


@pytest.fixture
async def lookahead(store: Store, registrar: Registrar) -> AsyncIterator[Lookahead]:
    made = Lookahead(registrar.take, store.look, lambda: frozenset(store.missed))
    yield made
    store.open.set()
    await made.close()


def publish(digest: str = "a" * 64) -> PublishRevision:
    return PublishRevision(policy="acme/bot", artifact=facts_of(Stored(digest, 7)))


def imports(count: int, *, external: bool = False) -> ImportRevisions:
    facts = (facts_of(Stored(f"{number:064x}", 7)) for number in range(count))
    revisions = tuple(ImportedRevision(policy="acme/bot", base=BASE, artifact=artifact) for artifact in facts)
    return ImportRevisions(revisions=revisions, external=external)


async def asked(lookahead: Lookahead, command: AnyCommand) -> AnyAnswer:
    asker = Asker()
    lookahead.take(command, asker)
    return await asyncio.wait_for(asker.answer, 10)


async def test_all_artifacts_of_an_import_are_looked_for_before_it_is_handed_on(
    lookahead: Lookahead, store: Store, registrar: Registrar
) -> None:
    assert await asked(lookahead, imports(100)) == DONE
    assert len(set(store.looked)) == len(store.looked) == 100
    assert await asked(lookahead, imports(100, external=True)) == DONE
    assert len(store.looked) == 100


async def test_what_the_registrar_missed_is_looked_for_and_the_command_handed_on_again(
    lookahead: Lookahead, store: Store, registrar: Registrar
) -> None:
    store.missed.add("b" * 64)
    assert await asked(lookahead, RestoreRevision(policy="acme/bot", revision=1)) == DONE
    assert store.looked == ["b" * 64]
    assert len(registrar.taken) == 2


@pytest.mark.parametrize("trouble", [ArtifactUnavailable("too busy", retry_after_s=1.0), ValueError("odd")])
async def test_a_look_that_fails_refuses_its_command(
    lookahead: Lookahead, store: Store, registrar: Registrar, trouble: Exception
) -> None:
    store.trouble = trouble
    for command in (publish(), imports(100)):
        answer = await asked(lookahead, command)
        assert isinstance(answer, Refusal)
        assert (answer.outcome, answer.retry_after_s) == (Outcome.ARTIFACT_UNAVAILABLE, 1.0)
        assert str(trouble) in answer.message
    assert registrar.taken == []


async def test_nothing_is_looked_for_that_nobody_waits_for(
    lookahead: Lookahead, store: Store, registrar: Registrar
) -> None:
    asker = Asker()
    asker.expired = True
    lookahead.take(publish(), asker)
    answer = await asyncio.wait_for(asker.answer, 10)
    assert isinstance(answer, Refusal)
    assert answer.outcome is Outcome.DEADLINE
    assert store.looked == registrar.taken == []


async def test_those_who_wait_are_bounded_and_told_when_it_ends(
    lookahead: Lookahead, store: Store, registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catalog.lookahead._WAITING_MOST", 100)
    store.open.clear()
    waiting = Asker()
    lookahead.take(imports(100), waiting)
    refused = await asked(lookahead, publish())
    assert isinstance(refused, Refusal)
    assert (refused.outcome, refused.retry_after_s) == (Outcome.JOURNAL_UNAVAILABLE, 1.0)
    await asyncio.sleep(0)
    closing = asyncio.create_task(lookahead.close())
    told = await asyncio.wait_for(waiting.answer, 10)
    assert isinstance(told, Refusal)
    assert "stopping" in told.message
    store.open.set()
    await closing
    assert registrar.taken == []
