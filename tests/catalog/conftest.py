from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.catalog.harness import Catalog, add_base


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    """A catalog that knows one base."""
    made = Catalog(tmp_path)
    made.run(add_base())
    yield made
    made.close()
