from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from catalog.backup import backup
from catalog.compaction import compact, opened_base
from catalog.environment import Environment
from catalog.replay import check_environment
from catalog.stream import restore, write_export
from catalog.view import CatalogView
from tests.catalog.harness import Catalog
from wire.outcomes import InvalidRequest, JournalUnavailable


@pytest.fixture
def open_umask() -> Iterator[None]:
    former = os.umask(0)
    yield
    os.umask(former)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_copy_is_a_catalog_of_its_own(catalog: Catalog, tmp_path: Path, open_umask: None, *, compacted: bool) -> None:
    catalog.publish("acme/support", b"one")
    if compacted:
        compact(catalog.environment)
    catalog.publish("acme/support", b"two")
    copy = tmp_path / "backups" / "copy"
    backup(catalog.environment, copy)
    names = {"data.mdb", "journal-base.roost"} if compacted else {"data.mdb"}
    assert {file.name for file in copy.iterdir()} == names
    assert {stat.S_IMODE(file.stat().st_mode) for file in copy.iterdir()} == {0o600}
    out = io.BytesIO()
    with closing(Environment.open(copy)) as environment:
        assert check_environment(environment).differences == ()
        with opened_base(environment) as behind:
            write_export(environment, out, behind=behind)
    restore(io.BytesIO(out.getvalue()), tmp_path / "restored")
    for folder in (copy, tmp_path / "restored"):
        with closing(CatalogView.open(folder)) as view:
            assert view.position() == catalog.view.position()
            assert view.revisions("acme/support") == catalog.view.revisions("acme/support")


def test_a_copy_that_a_compaction_cut_apart_is_none(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog.publish("acme/support", b"one")
    copy = Environment.copy

    def compact_then_copy(environment: Environment, folder: Path) -> None:
        compact(environment)
        copy(environment, folder)

    monkeypatch.setattr(Environment, "copy", compact_then_copy)
    with pytest.raises(JournalUnavailable, match="compacted meanwhile"):
        backup(catalog.environment, tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []


def test_nothing_is_copied_over_anything(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="not empty"):
        backup(catalog.environment, tmp_path)
