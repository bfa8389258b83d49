"""Reads of one process beside each other: a long one holds up neither a look-up nor, for good, a map that grows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from catalog.names import parse_reference
from catalog.view import CatalogView
from wire.outcomes import InvalidRequest
from wire.registrar import RetirePolicy

from .harness import Catalog, add_base

POLICY = "acme/support"
# more than a reader maps of its own accord
_GROWN = """
import sys
from pathlib import Path
from catalog.environment import Environment
environment = Environment.create(Path(sys.argv[1]), map_bytes=1 << 26)
with environment.begin(write=True) as txn:
    for number in range(4):
        txn.put(b"filler%d" % number, bytes(8 << 20), db=environment.meta)
environment.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A catalog with some policies that nobody writes."""
    made = Catalog(tmp_path, map_bytes=1 << 20)
    made.run(add_base())
    for name in (POLICY, "acme/a", "acme/b"):
        made.publish(name, name.encode())
    made.close()
    return tmp_path / "catalog"


@pytest.fixture
def view(folder: Path) -> Iterator[CatalogView]:
    view = CatalogView.open(folder)
    yield view
    view.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def grow(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", _GROWN, str(folder)], check=True, cwd=Path(__file__).parents[2])


def test_a_scan_holds_up_no_look_up_and_no_other_scan(view: CatalogView, threads: ThreadPoolExecutor) -> None:
    with view._scanning() as scan:
        rows = scan.all_policies(prefix="", after="")
        first = next(rows)
        resolved = threads.submit(view.resolve, parse_reference(POLICY))
        listed = threads.submit(view.policies)
        assert resolved.result(timeout=30).revision == 1
        assert len(listed.result(timeout=30)) == 3
        assert [first, *rows] == listed.result()


def test_a_grown_map_is_adopted_once_the_scans_have_ended(
    folder: Path, view: CatalogView, threads: ThreadPoolExecutor
) -> None:
    with view._scanning() as scan:
        rows = scan.all_policies(prefix="", after="")
        first = next(rows)
        grow(folder)
        waiting: list[Future[object]] = [threads.submit(view.resolve, parse_reference(POLICY)) for _ in range(3)]
        waiting += [threads.submit(view.policies) for _ in range(3)]
        assert wait(waiting, timeout=0.2).done == set()
        # its pages are where they were
        assert [record.policy for record in (first, *rows)] == ["acme/a", "acme/b", POLICY]
    for one in waiting:
        assert one.result(timeout=30)
    assert view.position() > 0


def test_the_view_closes_once_its_scans_have_ended(folder: Path, threads: ThreadPoolExecutor) -> None:
    view = CatalogView.open(folder)
    with view._scanning() as scan:
        closing = threads.submit(view.close)
        assert wait([closing], timeout=0.2).done == set()
        assert len(list(scan.all_policies(prefix="", after=""))) == 3
    closing.result(timeout=30)


def test_a_history_comes_in_pages_the_newest_first(catalog: Catalog) -> None:
    for content in (b"one", b"two", b"three"):
        catalog.publish(POLICY, content)
    catalog.publish("rival/bot", b"bot")
    whole = catalog.view.history(POLICY)
    newest = catalog.view.history(POLICY, limit=2)
    assert newest == whole[-2:]
    assert catalog.view.history(POLICY, before=newest[0].seq, limit=1) == whole[-3:-2]
    assert catalog.view.history(POLICY, before=whole[0].seq) == []
    for other in (catalog.view.history("rival/bot")[-1].seq, 1 << 60):
        with pytest.raises(InvalidRequest, match="none of acme/support"):
            catalog.view.history(POLICY, before=other)


def test_what_is_live_can_be_asked_for_alone(catalog: Catalog) -> None:
    for name in ("acme/a", "acme/b", "acme/c"):
        catalog.publish(name, name.encode())
    catalog.run(RetirePolicy(policy="acme/b"))
    assert [record.policy for record in catalog.view.search(live=True).policies] == ["acme/a", "acme/c"]
    assert len(catalog.view.search().policies) == 3
