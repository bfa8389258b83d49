from __future__ import annotations

from pathlib import Path

import pytest

from catalog.view import CatalogView
from gateway.catalog_source import CatalogSource
from tests.catalog.harness import Catalog
from wire.outcomes import JournalUnavailable


def test_a_catalog_that_is_not_there_yet_is_looked_for_now_and_then(tmp_path: Path) -> None:
    now = [0.0]
    made: list[Catalog] = []
    looked: list[Path] = []

    def open_view(folder: Path) -> CatalogView:
        looked.append(folder)
        if not made:
            raise JournalUnavailable("no catalog there")
        return CatalogView(made[0].environment)

    source = CatalogSource(tmp_path, open_view=open_view, clock=lambda: now[0])
    for _ in range(3):
        with pytest.raises(JournalUnavailable, match="no catalog there") as caught:
            source.view()
        assert caught.value.retry_after_s == 1.0
    assert len(looked) == 1
    made.append(Catalog(tmp_path))
    now[0] = 1.0
    assert source.view().position() == 0
    assert source.view() is source.view()
    assert len(looked) == 2
    source.close()
