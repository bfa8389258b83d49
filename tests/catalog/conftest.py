from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.postgres import PostgresServer
from tests.catalog.harness import Catalog, add_base
from tests.catalog.postgres.harness import PostgresCatalog


@pytest.fixture(scope="session")
def shared_database(postgres: PostgresServer) -> str:
    """The address of a database that each user empties first."""
    return postgres.database()


@pytest.fixture(params=["lmdb", "postgres"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Catalog]:
    """A catalog that knows one base, with its journal in the one place or the other."""
    if request.param == "lmdb":
        made = Catalog(tmp_path)
    else:
        made = PostgresCatalog(tmp_path, request.getfixturevalue("shared_database"))
    made.run(add_base())
    yield made
    made.close()
