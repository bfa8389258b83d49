"""A folder of adapters is imported by what it holds now, however often."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from catalog.view import CatalogView
from ops.cli import main
from ops.layout import Layout
from tests.catalog.harness import Catalog
from tests.packer.adapters import CONFIG, config_for, shape_of, tensors_for, write_folder
from wire.registrar import AddBase

BASE = "tiny"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    made = Catalog(tmp_path / "state")
    made.run(AddBase(name=BASE, fingerprint="b" * 64, path="/models/tiny", config=json.dumps(CONFIG).encode()))
    made.close()
    return tmp_path / "state"


def put(folder: Path, seed: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder, tensors_for(shape_of(), seed=seed), config_for())


def imported(
    state: Path, adapters: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, int]:
    """How many revisions were seen, and published."""
    words = ["catalog", "import", str(adapters), "--tenant", "acme", "--base", BASE, "--json"]
    monkeypatch.setattr(sys, "argv", ["roost", "--state-dir", str(state), *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr().err
    totals = json.loads(capsys.readouterr().out)
    return totals["seen"], totals["published"]


def test_a_folder_that_changed_behind_the_last_name_is_imported_too(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = tmp_path / "adapters"
    for seed, name in enumerate(("a", "b", "z")):
        put(adapters / name, seed)
    # as an import leaves it that was killed behind the last one
    (adapters / ".roost-import").write_text(json.dumps({"source": f"acme:{BASE}", "resume_at": "z"}))
    assert imported(state, adapters, monkeypatch, capsys) == (3, 3)
    put(adapters / "a", 9)
    put(adapters / "c", 10)
    assert imported(state, adapters, monkeypatch, capsys) == (4, 2)
    assert imported(state, adapters, monkeypatch, capsys) == (4, 0)
    view = CatalogView.open(Layout.of(str(state)).catalog)
    try:
        assert {record.policy: record.latest for record in view.policies()} == {
            "acme/a": 2, "acme/b": 1, "acme/c": 1, "acme/z": 1,
        }  # fmt: skip
    finally:
        view.close()
