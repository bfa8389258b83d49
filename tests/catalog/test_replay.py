from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from catalog.layout import number_key, text_key
from catalog.records import PolicyRecord
from catalog.replay import check_catalog, check_environment
from tests.catalog.harness import Catalog, add_base
from wire.events import ChannelMoved, Event, KeyRevoked, Split
from wire.outcomes import JournalUnavailable

POLICY = "acme/support"


@pytest.fixture
def published(catalog: Catalog) -> Catalog:
    for content in (b"one", b"two"):
        catalog.publish(POLICY, content)
    return catalog


def test_an_untouched_view_is_what_the_journal_makes(published: Catalog, tmp_path: Path) -> None:
    replay = check_environment(published.environment, tmp_path)
    assert (replay.events, replay.differences) == (4, ())
    # four events and their rows: a base, a policy, two revisions, two artifacts, a route, a line of the index by base
    assert replay.rows == 4 + 1 + 1 + 2 + 2 + 1 + 1


def test_a_catalog_may_be_checked_by_its_folder(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.run(add_base())
    catalog.close()
    assert check_catalog(tmp_path / "catalog").events == 1
    with pytest.raises(JournalUnavailable, match="no catalog"):
        check_catalog(tmp_path / "nowhere")


def test_a_changed_record_is_found(published: Catalog) -> None:
    tables = published.environment.tables
    record = published.view.policy(POLICY)
    assert isinstance(record, PolicyRecord)
    with published.environment.begin(write=True) as txn:
        tables.policies.put(txn, text_key(POLICY), msgspec.structs.replace(record, latest=1))
    (difference,) = check_environment(published.environment).differences
    assert difference == f"policies '{POLICY}' is not what the journal makes of it"


@pytest.mark.parametrize("table", ["routes", "revisions", "artifacts"])
def test_a_lost_record_is_found(published: Catalog, table: str) -> None:
    handle = published.environment.tables.named()[table]
    with published.environment.begin(write=True) as txn:
        key = handle.last_key(txn)
        assert key is not None
        handle.delete(txn, key)
    (difference,) = check_environment(published.environment).differences
    assert f"the journal makes {table} " in difference


def test_a_record_that_no_event_made_is_found(published: Catalog) -> None:
    with published.environment.begin(write=True) as txn:
        published.environment.tables.key_ids.put(txn, b"intruder", "0" * 64)
    (difference,) = check_environment(published.environment).differences
    assert "the view has key_ids 'intruder'" in difference


def test_a_gap_in_the_journal_is_found(published: Catalog) -> None:
    with published.environment.begin(write=True) as txn:
        published.environment.tables.journal.delete(txn, number_key(3))
    with pytest.raises(JournalUnavailable, match="event 4 can't follow event 2"):
        check_environment(published.environment)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (ChannelMoved("acme/other", "stable"), "no policy acme/other"),
        (ChannelMoved(POLICY, "stable", (Split(7),)), "no revision 7"),
        (KeyRevoked("nobody"), "no key nobody"),
    ],
)
def test_an_event_that_contradicts_those_before_it_is_found(
    published: Catalog, body: ChannelMoved | KeyRevoked, reason: str
) -> None:
    with published.environment.begin(write=True) as txn:
        published.environment.tables.journal.put(txn, number_key(5), Event(5, 1, "", body))
    with pytest.raises(JournalUnavailable, match=f"damaged at event 5 .*{reason}"):
        check_environment(published.environment)
