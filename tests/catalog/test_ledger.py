from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb
import msgspec
import pytest

from catalog.batch import BatchCommand
from catalog.environment import Environment
from catalog.layout import LAYOUT_KEY, Txn
from catalog.replay import check_environment
from catalog.view import CatalogView
from tests.catalog.harness import BASE, Catalog, add_base, upload
from wire.events import Split
from wire.outcomes import InvalidRequest, JournalUnavailable, Outcome
from wire.registrar import (
    CollectOrphans,
    Committed,
    CreatePolicy,
    JournalSlice,
    MoveChannel,
    PublishRevision,
    ReadJournal,
    Refusal,
    Rollback,
)

POLICY = "acme/support"


class Commit:
    """LMDB's commit, which can be told to fail."""

    def __init__(self) -> None:
        self.count = 0
        self.error: lmdb.Error | None = None

    def __call__(self, txn: Txn) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error
        txn.commit()


def failed_with(code: int) -> lmdb.Error:
    """What the binding raises for an error of the system."""
    error = lmdb.Error("mdb_txn_commit")
    vars(error).update(code=code)
    return error


@pytest.fixture
def commit() -> Commit:
    return Commit()


@pytest.fixture
def counted(tmp_path: Path, commit: Commit) -> Iterator[Catalog]:
    made = Catalog(tmp_path, commit=commit)
    made.run(add_base())
    commit.count = 0
    yield made
    made.close()


def test_a_batch_is_one_commit_in_which_each_command_sees_those_before_it(counted: Catalog, commit: Commit) -> None:
    one, two = upload(counted.store, b"one"), upload(counted.store, b"two")
    batch = counted.ledger.run(
        [
            Rollback(policy=POLICY),
            CreatePolicy(policy=POLICY, base=BASE),
            PublishRevision(policy=POLICY, artifact=one),
            PublishRevision(policy=POLICY, artifact=two, expected_version=9),
            PublishRevision(policy=POLICY, artifact=two, expected_version=2),
            MoveChannel(policy=POLICY, channel="canary", target=(Split(2),)),
            MoveChannel(policy=POLICY, channel="canary", target=(Split(3),)),
            ReadJournal(after=1),
        ]
    )
    assert commit.count == 1
    outcomes = [answer.outcome if isinstance(answer, Refusal) else Outcome.OK for answer in batch.answers]
    assert outcomes == [
        Outcome.NOT_FOUND,
        Outcome.OK,
        Outcome.OK,
        Outcome.VERSION_CONFLICT,
        Outcome.OK,
        Outcome.OK,
        Outcome.NOT_FOUND,
        Outcome.OK,
    ]
    assert [event.seq for event in batch.events] == [2, 3, 4, 5]
    assert batch.answers[-1] == JournalSlice(events=tuple(batch.events), last=5)
    assert counted.resolve(f"{POLICY}:canary").revision == 2
    assert check_environment(counted.environment).differences == ()


def test_of_two_that_publish_the_first_only_one_is(counted: Catalog) -> None:
    publishes = [
        PublishRevision(policy=POLICY, artifact=upload(counted.store, content), create_over=BASE, expected_version=0)
        for content in (b"one", b"two")
    ]
    first, second = counted.answers(*publishes)
    assert isinstance(first, Committed)
    assert isinstance(second, Refusal)
    assert second.outcome is Outcome.VERSION_CONFLICT
    assert len(counted.view.revisions(POLICY)) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_refuses_the_batch_and_leaves_nothing(counted: Catalog, commit: Commit, code: int) -> None:
    commands: list[BatchCommand] = [
        CreatePolicy(policy=POLICY, base=BASE),
        ReadJournal(after=0),
        CreatePolicy(policy="a/b", base=BASE),
    ]
    commit.error = failed_with(code)
    batch = counted.ledger.run(commands)
    assert batch.events == []
    assert [answer.outcome for answer in batch.answers if isinstance(answer, Refusal)] == [Outcome.STORAGE_FULL] * 2
    assert isinstance(batch.answers[1], JournalSlice)
    assert batch.answers[1].last == 1
    assert counted.view.policies() == []
    commit.error = None
    assert all(not isinstance(answer, Refusal) for answer in counted.answers(*commands))
    assert counted.view.position() == 3


def test_a_write_cut_short_is_a_full_disk_only_where_nothing_is_left(
    counted: Catalog, commit: Commit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB calls a short write EIO."""
    commit.error = failed_with(errno.EIO)
    with pytest.raises(JournalUnavailable, match="can't be written"):
        counted.ledger.run([CreatePolicy(policy=POLICY, base=BASE)])
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    (answer,) = counted.answers(CreatePolicy(policy=POLICY, base=BASE))
    assert isinstance(answer, Refusal)
    assert answer.outcome is Outcome.STORAGE_FULL


def test_the_map_grows_by_itself_and_readers_follow(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path, map_bytes=1 << 17)
    before = catalog.environment.map_bytes
    catalog.run(add_base())
    commands = [CreatePolicy(policy=f"acme/p{number}", base=BASE) for number in range(3000)]
    assert all(isinstance(answer, Committed) for answer in catalog.answers(*commands))
    assert catalog.environment.map_bytes > before
    assert len(catalog.view.policies(limit=5000)) == 3000
    assert check_environment(catalog.environment).differences == ()
    catalog.close()


def test_a_slice_of_the_journal_is_bounded_in_number_and_bytes(catalog: Catalog) -> None:
    for number in range(12):
        catalog.run(add_base(f"base{number}"))
    (some,) = catalog.answers(ReadJournal(after=2, limit=3))
    assert isinstance(some, JournalSlice)
    assert [event.seq for event in some.events] == [3, 4, 5]
    assert some.last == 13
    for bad in (ReadJournal(after=-1), ReadJournal(after=0, limit=0), ReadJournal(after=0, limit=1 << 40)):
        (answer,) = catalog.answers(bad)
        assert isinstance(answer, Refusal)
        assert answer.outcome is Outcome.INVALID_REQUEST


def test_large_events_come_in_several_slices(catalog: Catalog) -> None:
    large = b" " * (1 << 20)
    for number in range(8):
        command = add_base(f"base{number}")
        catalog.run(type(command)(name=command.name, fingerprint=command.fingerprint, path="/m", config=large))
    seen: list[int] = []
    slices = 0
    while not seen or seen[-1] < 9:
        (part,) = catalog.answers(ReadJournal(after=seen[-1] if seen else 0))
        assert isinstance(part, JournalSlice)
        assert len(msgspec.msgpack.encode(part)) <= 5 << 20
        seen += [event.seq for event in part.events]
        slices += 1
    assert seen == list(range(1, 10))
    assert slices > 1


def test_a_sweep_knows_what_is_named_at_the_moment_of_removal(catalog: Catalog) -> None:
    """A publish between two steps of a sweep is seen by the next step."""
    uploads = [upload(catalog.store, b"content %d" % number) for number in range(20)]
    for facts in uploads:
        os.utime(catalog.store.path(facts.digest), (1.0, 1.0))
    steps = catalog.ledger.sweep(CollectOrphans(older_than_s=60))
    next(steps)
    swept = next(steps)
    left = [facts for facts in uploads if catalog.store.size(facts.digest) is not None]
    assert len(left) == len(uploads) - swept.removed
    saved = left[-1]
    catalog.run(PublishRevision(policy=POLICY, artifact=saved, create_over=BASE))
    removed = swept.removed + sum(step.removed for step in steps)
    assert removed == len(uploads) - 1
    assert catalog.store.size(saved.digest) == saved.size


@pytest.mark.parametrize("age", [-1.0, float("nan"), float("inf")])
def test_a_sweep_needs_an_age(catalog: Catalog, age: float) -> None:
    with pytest.raises(InvalidRequest):
        catalog.ledger.sweep(CollectOrphans(older_than_s=age))


class TestOpening:
    def test_a_catalog_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(JournalUnavailable, match="there is no catalog in"):
            CatalogView.open(tmp_path / "catalog")

    def test_a_catalog_that_is_being_made_is_told(self, tmp_path: Path) -> None:
        lmdb.open(str(tmp_path / "catalog"), max_dbs=4).close()
        with pytest.raises(JournalUnavailable, match="not complete"):
            CatalogView.open(tmp_path / "catalog")

    def test_garbage_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "data.mdb").write_bytes(b"garbage" * 10_000)
        for attempt in (lambda: CatalogView.open(tmp_path), lambda: Environment.create(tmp_path, map_bytes=1 << 20)):
            with pytest.raises(JournalUnavailable, match="can't be opened"):
                attempt()

    def test_another_layout_is_refused_by_readers_and_by_the_writer(self, tmp_path: Path) -> None:
        path = tmp_path / "catalog"
        environment = Environment.create(path, map_bytes=1 << 20)
        with environment.begin(write=True) as txn:
            txn.put(LAYOUT_KEY, b"99", db=environment.meta)
        environment.close()
        for attempt in (lambda: CatalogView.open(path), lambda: Environment.create(path, map_bytes=1 << 20)):
            with pytest.raises(JournalUnavailable, match="layout '99', and this release reads 2"):
                attempt()

    def test_what_was_committed_is_there_after_opening_again(self, tmp_path: Path) -> None:
        catalog = Catalog(tmp_path)
        catalog.run(add_base())
        catalog.publish(POLICY, b"one")
        found = catalog.resolve(POLICY)
        catalog.close()
        view = CatalogView.open(tmp_path / "catalog")
        assert view.position() == 3
        assert view.revision(POLICY, 1) is not None
        view.close()
        again = Catalog(tmp_path)
        assert again.resolve(POLICY) == found
        assert again.publish(POLICY, b"two").revision == 2
        again.close()
