from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from catalog.artifact_check import check_artifacts
from tests.catalog.harness import Catalog, add_base


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    monkeypatch.setattr("catalog.artifact_check._PAGE", 3)
    with closing(Catalog(tmp_path)) as made:
        made.run(add_base())
        for number in range(10):
            made.publish("acme/support", b"revision %d" % number)
        yield made


def test_every_artifact_is_looked_for_page_by_page(filled: Catalog) -> None:
    filled.store.path(filled.resolve("acme/support@4").digest).unlink()
    damaged = filled.store.path(filled.resolve("acme/support@9").digest)
    damaged.chmod(0o600)
    damaged.write_bytes(b"revision X")
    told: list[tuple[int, int]] = []
    found = check_artifacts(filled.environment, filled.store, progress=lambda *counts: told.append(counts))
    assert (found.artifacts, found.verified, found.failed, found.missing) == (10, 8, 2, 1)
    # damage first: the missing may be what nobody has brought yet
    assert ["corrupt" in problem for problem in found.problems] == [True, False]
    few = check_artifacts(filled.environment, filled.store, most=1)
    assert (few.failed, few.problems) == (2, found.problems[:1])
    assert told == [(number, 10) for number in range(1, 11)]


def test_no_transaction_is_open_while_artifacts_are_read(filled: Catalog) -> None:
    readers: list[str] = []

    class Watching:
        size = filled.store.size

        def verify(self, digest: str) -> None:
            readers.append(filled.environment._env.readers())
            filled.store.verify(digest)

    check_artifacts(filled.environment, Watching())  # type: ignore[arg-type]
    idle = filled.environment._env.readers()
    assert set(readers) == {idle}
