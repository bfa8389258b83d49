from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import msgpack
import pytest
from blake3 import blake3

from catalog.compaction import compact, first_event, opened_base
from catalog.environment import Environment
from catalog.replay import check_catalog, check_environment
from catalog.stats import stats
from catalog.stream import restore, write_base, write_export, write_snapshot
from catalog.view import CatalogView
from tests.catalog.harness import Catalog, add_base
from wire.events import Split
from wire.outcomes import InvalidRequest, JournalUnavailable, Outcome
from wire.registrar import CreateKey, JournalSlice, MoveChannel, ReadJournal, Refusal


@pytest.fixture
def full(catalog: Catalog) -> Catalog:
    """A catalog with some of everything that rows are made of."""
    for number in range(3):
        catalog.publish("acme/support", b"revision %d" % number)
        catalog.publish(f"zeta/p{number}", b"shared")
    catalog.run(MoveChannel(policy="acme/support", channel="canary", target=(Split(1, 9), Split(2))))
    catalog.run(CreateKey(key_id="k1", key_hash="d" * 64, tenant="acme", scopes=("invoke",)))
    return catalog


def snapshot_of(catalog: Catalog) -> bytes:
    out = io.BytesIO()
    write_snapshot(catalog.environment, out)
    return out.getvalue()


def export_of(catalog: Catalog) -> bytes:
    out = io.BytesIO()
    with opened_base(catalog.environment) as behind:
        write_export(catalog.environment, out, behind=behind)
    return out.getvalue()


def described(view: CatalogView) -> list[object]:
    """What a reader sees of a catalog, but for its history."""
    policies = view.policies()
    revisions = [view.revisions(record.policy) for record in policies]
    return [view.position(), view.bases(), policies, revisions, view.keys()]


def described_at(folder: Path) -> list[object]:
    with closing(CatalogView.open(folder)) as view:
        return described(view)


@pytest.mark.parametrize("written", [snapshot_of, export_of])
def test_what_is_restored_is_what_was_written(full: Catalog, tmp_path: Path, written: object) -> None:
    restored = tmp_path / "restored"
    summary = restore(io.BytesIO(written(full)), restored)  # type: ignore[operator]
    assert summary.position == full.view.position()
    assert described_at(restored) == described(full.view)
    assert check_catalog(restored).differences == ()


def test_an_export_brings_the_history_and_a_snapshot_only_its_end(full: Catalog, tmp_path: Path) -> None:
    restore(io.BytesIO(export_of(full)), tmp_path / "whole")
    restore(io.BytesIO(snapshot_of(full)), tmp_path / "view")
    history = full.view.history("acme/support")
    whole, view = CatalogView.open(tmp_path / "whole"), CatalogView.open(tmp_path / "view")
    assert whole.history("acme/support") == history
    assert view.history("acme/support") == []
    whole.close()
    view.close()


def test_a_catalog_is_never_restored_over_another(full: Catalog, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="restore into a fresh folder"):
        restore(io.BytesIO(snapshot_of(full)), full.environment.path)


def test_a_stream_that_was_cut_short_anywhere_leaves_nothing(full: Catalog, tmp_path: Path) -> None:
    whole = snapshot_of(full)
    for length in [0, 1, 20, 40, *range(50, len(whole), 97), len(whole) - 1]:
        with pytest.raises(InvalidRequest):
            restore(io.BytesIO(whole[:length]), tmp_path / "cut")
        assert list((tmp_path / "cut").iterdir()) == []


@pytest.mark.parametrize("more", [b"\0", b"x" * (40 << 20), None])
def test_a_stream_that_goes_on_after_its_trailer_is_refused(full: Catalog, tmp_path: Path, more: bytes | None) -> None:
    whole = snapshot_of(full)
    with pytest.raises(InvalidRequest, match="goes on after its trailer"):
        restore(io.BytesIO(whole + (whole if more is None else more)), tmp_path / "longer")
    assert list((tmp_path / "longer").iterdir()) == []


def test_a_stream_with_any_byte_changed_is_refused(full: Catalog, tmp_path: Path) -> None:
    whole = export_of(full)
    for place in range(0, len(whole), 41):
        damaged = bytearray(whole)
        damaged[place] ^= 0x15
        with pytest.raises(InvalidRequest):
            restore(io.BytesIO(bytes(damaged)), tmp_path / "damaged")
        assert list((tmp_path / "damaged").iterdir()) == []


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"roost": "catalog", "format": 1, "layout": 1, "position": 0}, "has layout 1"),
        ({"roost": "catalog", "format": 9, "layout": 2, "position": 0}, "no snapshot or export"),
        ({"roost": "catalog"}, "damaged"),
        ([1, 2, 3], "damaged"),
        (b"x" * (5 << 20), "damaged"),
    ],
)
def test_other_streams_are_refused_at_their_beginning(tmp_path: Path, header: object, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        restore(io.BytesIO(msgpack.packb(header)), tmp_path / "other")


@pytest.mark.parametrize("left", ["data.mdb", "journal-base.roost"])
def test_nothing_is_restored_beside_what_another_catalog_left(full: Catalog, tmp_path: Path, left: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / left).write_bytes(b"left")
    with pytest.raises(InvalidRequest, match=f"what is left of one.*{left}"):
        restore(io.BytesIO(export_of(full)), tmp_path / "other")
    assert [file.name for file in (tmp_path / "other").iterdir()] == [left]


@pytest.mark.parametrize("moved", [-1, 1])
def test_a_position_that_the_rows_are_not_at_is_refused(full: Catalog, tmp_path: Path, moved: int) -> None:
    position = full.view.position()
    stream = io.BytesIO(snapshot_of(full))
    unpacker = msgpack.Unpacker(stream)
    header, *rows, _ = unpacker
    packed = b"".join(map(msgpack.packb, [header | {"position": position + moved}, *rows]))
    trailer = {"entries": len(rows), "digest": blake3(packed).hexdigest()}
    with pytest.raises(InvalidRequest, match="are at event"):
        restore(io.BytesIO(packed + msgpack.packb(trailer)), tmp_path / "moved")
    assert list((tmp_path / "moved").iterdir()) == []


class TestCompaction:
    def test_a_snapshot_of_another_journal_is_not_taken_for_its_own(self, full: Catalog, tmp_path: Path) -> None:
        with closing(Catalog(tmp_path / "other")) as other:
            for number in range(40):
                other.run(add_base(f"base{number}"))
            compact(other.environment)
            stale = (other.environment.path / "journal-base.roost").read_bytes()
        (full.environment.path / "journal-base.roost").write_bytes(stale)
        for use in (check_environment, lambda environment: export_of(full)):
            with pytest.raises(InvalidRequest, match="is not of this journal"):
                use(full.environment)

    def test_a_lost_snapshot_is_missed(self, full: Catalog) -> None:
        compact(full.environment)
        (full.environment.path / "journal-base.roost").unlink()
        for use in (check_environment, lambda environment: export_of(full)):
            with pytest.raises(InvalidRequest, match="before it is missing"):
                use(full.environment)

    def test_no_journal_begins_beside_an_old_snapshot(self, full: Catalog, tmp_path: Path) -> None:
        compact(full.environment)
        (tmp_path / "fresh").mkdir()
        (tmp_path / "fresh" / "journal-base.roost").write_bytes(b"left")
        with pytest.raises(JournalUnavailable, match="the catalog that continues it is gone"):
            Environment.create(tmp_path / "fresh", map_bytes=1 << 20)

    def test_replay_is_the_snapshot_and_the_events_behind_it(self, full: Catalog) -> None:
        before = described(full.view)
        position = full.view.position()
        compacted = compact(full.environment)
        assert (compacted.position, compacted.removed) == (position, position - 1)
        assert first_event(full.environment) == position
        assert described(full.view) == before
        full.publish("acme/support", b"afterwards")
        replay = check_environment(full.environment)
        assert (replay.events, replay.differences) == (1, ())

    def test_it_may_be_done_again_and_again(self, full: Catalog) -> None:
        for number in range(3):
            compact(full.environment)
            full.publish("acme/support", b"round %d" % number)
            assert check_environment(full.environment).differences == ()

    def test_a_changed_row_is_still_found(self, full: Catalog) -> None:
        compact(full.environment)
        with full.environment.begin(write=True) as txn:
            full.environment.tables.key_ids.put(txn, b"intruder", "0" * 64)
        (difference,) = check_environment(full.environment).differences
        assert "the view has key_ids 'intruder'" in difference

    def test_who_asks_for_older_events_is_told_to_begin_from_a_snapshot(self, full: Catalog) -> None:
        compact(full.environment)
        position = full.view.position()
        (old,) = full.answers(ReadJournal(after=0))
        assert isinstance(old, Refusal)
        assert (old.outcome, old.field) == (Outcome.NOT_FOUND, "after")
        assert "begin from a snapshot" in old.message
        (new,) = full.answers(ReadJournal(after=position - 1))
        assert isinstance(new, JournalSlice)
        assert [event.seq for event in new.events] == [position]
        (none,) = full.answers(ReadJournal(after=position))
        assert isinstance(none, JournalSlice)
        assert none.events == ()

    def test_an_export_of_a_compacted_catalog_is_whole(self, full: Catalog, tmp_path: Path) -> None:
        compact(full.environment)
        full.publish("acme/support", b"afterwards")
        restore(io.BytesIO(export_of(full)), tmp_path / "restored")
        assert described_at(tmp_path / "restored") == described(full.view)
        assert check_catalog(tmp_path / "restored").differences == ()

    def test_killed_before_the_events_went_it_has_lost_nothing(self, full: Catalog) -> None:
        write_base(full.environment)
        full.publish("acme/support", b"afterwards")
        assert check_environment(full.environment).differences == ()
        assert first_event(full.environment) == 1


def test_statistics_add_up(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.run(add_base())
    catalog.publish("acme/a", b"one")
    found = stats(catalog.environment)
    assert (found.position, found.first_event, found.tables["policies"].rows) == (3, 1, 1)
    assert sum(table.bytes for table in found.tables.values()) + found.free_bytes == found.file_bytes
    assert found.map_bytes >= found.file_bytes
    catalog.close()
