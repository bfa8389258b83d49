"""Group commit, with the disk's part injected and no sockets."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import lmdb
import pytest

from catalog.blobs import Swept
from catalog.layout import Txn
from catalog.registrar import Registrar
from tests.catalog.harness import BASE, Catalog, add_base, upload
from wire.events import ArtifactFacts, Event
from wire.outcomes import Outcome
from wire.registrar import (
    AnyAnswer,
    AnyCommand,
    AwaitPosition,
    Collected,
    CollectOrphans,
    Committed,
    CreatePolicy,
    ImportedRevision,
    ImportRevisions,
    PublishRevision,
    Reached,
    ReadJournal,
    Refusal,
)


class SlowDisk:
    """A commit that lasts until it is let through; ``order`` is what happened, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.open = False
        self.error: Exception | None = None

    def __call__(self, txn: Txn) -> None:
        self.begun.release()
        if not self.open:
            assert self.gate.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        txn.commit()
        self.order.append("durable")


class Answered:
    """Stands for the socket's reply: notes what was answered, and when."""

    def __init__(self, order: list[str], name: str) -> None:
        self._order = order
        self._name = name
        self.expired = False
        self.answer: asyncio.Future[AnyAnswer] = asyncio.get_running_loop().create_future()

    def __call__(self, answer: AnyAnswer, /) -> None:
        self._order.append(f"answer {self._name}")
        self.answer.set_result(answer)


class Harness:
    def __init__(self, folder: Path, *, batch_max: int = 512) -> None:
        self.disk = SlowDisk()
        self.catalog = Catalog(folder, commit=self.disk)
        self.order = self.disk.order
        self.events: list[Event] = []
        self.broken_feed = False
        self.registrar = Registrar(self.catalog.ledger, publish=self._publish, batch_max=batch_max)

    def _publish(self, event: Event) -> None:
        if self.broken_feed:
            raise RuntimeError("the feed is broken")
        self.order.append(f"announce {event.seq}")
        self.events.append(event)

    def ask(self, command: AnyCommand, name: str = "") -> Answered:
        reply = Answered(self.order, name)
        self.registrar.take(command, reply)
        return reply

    async def committing(self) -> None:
        """Until the disk has been given a batch."""
        assert await asyncio.to_thread(self.disk.begun.acquire, timeout=30)

    def open_disk(self) -> None:
        """No commit waits from now on, the one that waits included."""
        self.disk.open = True
        self.disk.gate.release()

    async def close(self) -> None:
        self.open_disk()
        await self.registrar.stop()
        self.catalog.close()


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    made = Harness(tmp_path)
    yield made
    await made.close()


def policy(number: int) -> CreatePolicy:
    return CreatePolicy(policy=f"acme/p{number}", base=BASE)


async def test_nothing_is_answered_or_announced_before_it_is_durable(harness: Harness) -> None:
    reply = harness.ask(add_base(), "base")
    await harness.committing()
    await asyncio.sleep(0.05)
    assert harness.order == []
    harness.disk.gate.release()
    answer = await reply.answer
    assert answer == Committed(seq=1)
    assert harness.order == ["durable", "announce 1", "answer base"]


async def test_what_comes_during_an_fsync_shares_the_next_one(harness: Harness) -> None:
    harness.ask(add_base(), "base")
    await harness.committing()
    replies = [harness.ask(policy(number), str(number)) for number in range(100)]
    await asyncio.sleep(0.05)
    assert not any(reply.answer.done() for reply in replies)
    harness.open_disk()
    answers = await asyncio.gather(*(reply.answer for reply in replies))
    assert [answer.seq for answer in answers if isinstance(answer, Committed)] == list(range(2, 102))
    assert harness.order.count("durable") == 2
    assert harness.order[3] == "durable"
    assert [event.seq for event in harness.events] == list(range(1, 102))


async def test_a_batch_is_bounded(tmp_path: Path) -> None:
    harness = Harness(tmp_path, batch_max=10)
    harness.open_disk()
    replies = [harness.ask(add_base())] + [harness.ask(policy(number)) for number in range(34)]
    await asyncio.gather(*(reply.answer for reply in replies))
    assert harness.order.count("durable") == 4
    await harness.close()


async def test_who_has_stopped_waiting_is_not_obeyed(harness: Harness) -> None:
    harness.ask(add_base())
    await harness.committing()
    late, patient = harness.ask(policy(1)), harness.ask(policy(2))
    late.expired = True
    harness.open_disk()
    await patient.answer
    answer = await late.answer
    assert isinstance(answer, Refusal)
    assert answer.outcome is Outcome.DEADLINE
    assert harness.catalog.view.policy("acme/p1") is None
    assert harness.catalog.view.policy("acme/p2") is not None


async def test_stopping_finishes_what_was_taken_and_takes_no_more(harness: Harness) -> None:
    taken = harness.ask(add_base())
    await harness.committing()
    also_taken = harness.ask(policy(1))
    stopping = asyncio.ensure_future(harness.registrar.stop())
    await asyncio.sleep(0)
    refused = await harness.ask(policy(2)).answer
    assert isinstance(refused, Refusal)
    assert refused.outcome is Outcome.JOURNAL_UNAVAILABLE
    harness.open_disk()
    await stopping
    assert isinstance(taken.answer.result(), Committed)
    assert isinstance(also_taken.answer.result(), Committed)


@pytest.mark.parametrize("broken", [lmdb.Error("mdb_txn_commit: something new"), RuntimeError("a defect")])
async def test_a_journal_that_cannot_be_trusted_ends_the_registrar(harness: Harness, broken: Exception) -> None:
    harness.disk.error = broken
    first = harness.ask(add_base())
    await harness.committing()
    second = harness.ask(policy(1))
    harness.disk.gate.release()
    for reply in (first, second):
        answer = await reply.answer
        assert isinstance(answer, Refusal)
        assert answer.outcome is Outcome.JOURNAL_UNAVAILABLE
    assert (await harness.registrar.failed).outcome is Outcome.JOURNAL_UNAVAILABLE
    harness.disk.error = None
    after = await harness.ask(add_base()).answer
    assert isinstance(after, Refusal)
    assert harness.catalog.view.position() == 0
    assert harness.events == []


async def test_a_full_disk_ends_nothing(harness: Harness) -> None:
    full = lmdb.Error("mdb_txn_commit")
    vars(full).update(code=errno.ENOSPC)
    harness.disk.error = full
    harness.open_disk()
    answer = await harness.ask(add_base()).answer
    assert isinstance(answer, Refusal)
    assert answer.outcome is Outcome.STORAGE_FULL
    assert answer.retry_after_s is not None
    harness.disk.error = None
    assert isinstance(await harness.ask(add_base()).answer, Committed)


async def test_orphans_are_removed_between_batches(harness: Harness) -> None:
    harness.open_disk()
    store = harness.catalog.store
    kept, orphan = upload(store, b"kept"), upload(store, b"orphan")
    await harness.ask(add_base()).answer
    await harness.ask(PublishRevision(policy="acme/a", artifact=kept, create_over=BASE)).answer
    for facts in (kept, orphan):
        os.utime(store.path(facts.digest), (1.0, 1.0))
    collecting = harness.ask(CollectOrphans(older_than_s=3600))
    published = harness.ask(policy(1))
    assert await collecting.answer == Collected(removed=1, bytes=6)
    assert isinstance(await published.answer, Committed)
    assert store.size(kept.digest) == 4
    refused = await harness.ask(PublishRevision(policy="acme/a", artifact=orphan)).answer
    assert isinstance(refused, Refusal)
    assert refused.outcome is Outcome.ARTIFACT_UNAVAILABLE


async def test_one_sweep_at_a_time_and_none_goes_on_when_the_registrar_stops(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def endless(command: CollectOrphans) -> Iterator[Swept]:
        while True:
            loop.call_soon_threadsafe(begun.set)
            assert gate.wait(timeout=30)
            yield Swept(1, 1)

    monkeypatch.setattr(harness.catalog.ledger, "sweep", endless)
    running = harness.ask(CollectOrphans())
    await begun.wait()
    refused = await harness.ask(CollectOrphans()).answer
    assert isinstance(refused, Refusal)
    assert "running already" in refused.message
    stopping = asyncio.ensure_future(harness.registrar.stop())
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(stopping, 10)
    ended = await running.answer
    assert isinstance(ended, Refusal)
    assert "stopping" in ended.message


async def test_a_sweep_without_an_age_is_refused(harness: Harness) -> None:
    answer = await harness.ask(CollectOrphans(older_than_s=float("nan"))).answer
    assert isinstance(answer, Refusal)
    assert (answer.outcome, answer.field) == (Outcome.INVALID_REQUEST, "older_than_s")


async def test_reading_the_journal_needs_no_event(harness: Harness) -> None:
    harness.open_disk()
    await harness.ask(add_base()).answer
    await harness.ask(ReadJournal(after=0)).answer
    assert len(harness.events) == 1


async def test_the_queue_is_bounded(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catalog.registrar._QUEUE_MAX", 3)
    harness.ask(add_base())
    await harness.committing()
    waiting = [harness.ask(policy(number)) for number in range(3)]
    refused = await harness.ask(policy(3)).answer
    assert isinstance(refused, Refusal)
    assert (refused.outcome, refused.retry_after_s) == (Outcome.JOURNAL_UNAVAILABLE, 1.0)
    harness.open_disk()
    for reply in waiting:
        assert isinstance(await reply.answer, Committed)


async def test_those_who_wait_for_a_position_keep_no_writer_out(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catalog.registrar._QUEUE_MAX", 3)
    monkeypatch.setattr("catalog.registrar._WAITERS_MAX", 5)
    harness.open_disk()
    waiting = [harness.ask(AwaitPosition(seq=2)) for _ in range(5)]
    refused = await harness.ask(AwaitPosition(seq=2)).answer
    assert isinstance(refused, Refusal)
    assert (refused.outcome, refused.retry_after_s) == (Outcome.JOURNAL_UNAVAILABLE, 1.0)
    assert await harness.ask(AwaitPosition(seq=0)).answer == Reached(position=0)
    assert isinstance(await harness.ask(add_base()).answer, Committed)
    assert isinstance(await harness.ask(policy(1)).answer, Committed)
    assert {(await reply.answer) for reply in waiting} == {Reached(position=2)}


async def test_a_position_that_no_journal_reaches_is_refused(harness: Harness) -> None:
    answer = await harness.ask(AwaitPosition(seq=1 << 50)).answer
    assert isinstance(answer, Refusal)
    assert (answer.outcome, answer.field) == (Outcome.INVALID_REQUEST, "seq")


async def test_what_breaks_after_a_commit_ends_the_registrar_and_leaves_nobody_waiting(harness: Harness) -> None:
    harness.open_disk()
    harness.broken_feed = True
    replies = [harness.ask(add_base()), harness.ask(policy(1))]
    replies.append(harness.ask(policy(2)))
    answers = await asyncio.wait_for(asyncio.gather(*(reply.answer for reply in replies)), 10)
    assert {answer.outcome for answer in answers if isinstance(answer, Refusal)} == {Outcome.JOURNAL_UNAVAILABLE}
    assert len(answers) == 3
    assert harness.registrar.failed.done()


async def test_the_next_batch_is_on_its_way_to_the_disk_before_the_last_one_is_answered(harness: Harness) -> None:
    first = harness.ask(add_base(), "base")
    await harness.committing()
    second = harness.ask(policy(1), "policy")
    harness.disk.gate.release()
    await first.answer
    await harness.committing()
    assert harness.order == ["durable", "announce 1", "answer base"]
    harness.open_disk()
    assert await second.answer == Committed(seq=2, policy="acme/p1", version=1)
    assert harness.order[3:] == ["durable", "announce 2", "answer policy"]


async def test_of_an_import_the_last_event_alone_is_announced(harness: Harness) -> None:
    harness.open_disk()
    await harness.ask(add_base()).answer
    facts = ArtifactFacts("a" * 64, 1000, 8, ("q", "v"), "bf16", 4, 1024)
    revisions = tuple(ImportedRevision(policy=f"acme/p{number}", base=BASE, artifact=facts) for number in range(1500))
    answer = await harness.ask(ImportRevisions(revisions=revisions, external=True)).answer
    assert isinstance(answer, Committed)
    assert [event.seq for event in harness.events] == [1, answer.seq]
    assert answer.seq == 3001
