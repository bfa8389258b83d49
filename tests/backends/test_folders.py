from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends.folders import AdapterFolders
from wire.outcomes import InvalidRequest, StorageFull

ADAPTER, OTHER = f"acme@{'a' * 64}", f"acme@{'b' * 64}"


def fill(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")


def made_at(folder: Path, seconds: float) -> None:
    os.utime(folder, (seconds, seconds))


def test_a_folder_is_written_once(tmp_path: Path) -> None:
    folders = AdapterFolders(tmp_path)
    folder = folders.write(ADAPTER, fill)
    assert folder == folders.path(ADAPTER)
    assert folder.is_absolute()
    assert (folder / "adapter_config.json").exists()
    assert folders.write(ADAPTER, lambda _: pytest.fail("it is there")) == folder


def test_what_could_not_be_written_is_not_there(tmp_path: Path) -> None:
    def no_space(_: Path) -> None:
        raise StorageFull("no space")

    folders = AdapterFolders(tmp_path)
    with pytest.raises(StorageFull):
        folders.write(ADAPTER, no_space)
    assert not folders.path(ADAPTER).exists()


@pytest.mark.parametrize("name", ["", "acme", "../acme@" + "a" * 64, "acme@..", "acme@" + "A" * 64, "a/b@" + "a" * 64])
def test_names_that_are_not_ours_have_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="not the name of an adapter"):
        AdapterFolders(tmp_path).path(name)


def test_a_sweep_keeps_what_is_named_and_what_was_needed_lately(tmp_path: Path) -> None:
    folders = AdapterFolders(tmp_path, keep_s=100)
    named, forgotten = folders.write(ADAPTER, fill), folders.write(OTHER, fill)
    draft = tmp_path / ".draft"
    draft.mkdir()
    for folder in (named, forgotten, draft):
        made_at(folder, 1000)
    folders.sweep({ADAPTER}, now=1099)
    assert named.exists() and forgotten.exists() and draft.exists()
    folders.sweep({ADAPTER}, now=1101)
    assert named.exists()
    assert not forgotten.exists()
    assert not draft.exists()


def test_forgetting_starts_the_wait_anew(tmp_path: Path) -> None:
    folders = AdapterFolders(tmp_path, keep_s=100)
    folder = folders.write(ADAPTER, fill)
    made_at(folder, 1000)
    folders.forget(ADAPTER)
    needed = folder.stat().st_mtime
    folders.sweep(set(), now=needed + 99)
    assert folder.exists()
    folders.sweep(set(), now=needed + 101)
    assert not folder.exists()


def test_discarding_and_clearing_what_is_not_there_is_fine(tmp_path: Path) -> None:
    folders = AdapterFolders(tmp_path / "none")
    folders.discard(ADAPTER)
    folders.forget(ADAPTER)
    folders.sweep(set(), now=1e12)
    folders.clear()
    folders.write(ADAPTER, fill)
    folders.clear()
    assert not (tmp_path / "none").exists()
