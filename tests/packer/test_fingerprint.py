"""A base's fingerprint changes with what it computes and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packer.fingerprint import fingerprint
from wire.outcomes import InvalidRequest

FILES = {
    "config.json": b'{"hidden_size": 1}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "model-00001-of-00002.safetensors": b"w" * 100,
    "model-00002-of-00002.safetensors": b"v" * 100,
    "model.safetensors.index.json": b"{}",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def test_it_is_stable_and_carries_the_config(model: Path) -> None:
    first = fingerprint(model)
    assert first == fingerprint(model)
    assert first.config == FILES["config.json"]
    assert len(first.value) == 64


@pytest.mark.parametrize("name", FILES)
def test_every_covered_file_counts(name: str, model: Path) -> None:
    before = fingerprint(model).value
    (model / name).write_bytes(FILES[name].replace(b"w", b"x").replace(b"v", b"x") + b" ")
    changed = fingerprint(model).value
    assert changed != before
    (model / name).write_bytes(FILES[name])
    assert fingerprint(model).value == before


def test_a_moved_byte_between_files_counts(model: Path) -> None:
    before = fingerprint(model).value
    (model / "model-00001-of-00002.safetensors").write_bytes(b"w" * 100 + b"v")
    (model / "model-00002-of-00002.safetensors").write_bytes(b"v" * 99)
    assert fingerprint(model).value != before


def test_what_an_engine_does_not_compute_from_does_not_count(model: Path) -> None:
    before = fingerprint(model).value
    (model / "README.md").write_text("hello")
    (model / ".cache").mkdir()
    os.utime(model / "config.json", (0, 0))
    assert fingerprint(model).value == before


def test_links_are_followed(model: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in FILES:
        (linked / name).symlink_to(model / name)
    assert fingerprint(linked) == fingerprint(model)


def test_progress_reaches_the_sum_of_the_sizes(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    fingerprint(model, lambda done, total: seen.append((done, total)))
    whole = sum(len(content) for content in FILES.values())
    assert seen[-1] == (whole, whole)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("missing", ["config.json", "model-0000"])
def test_a_folder_that_is_no_model_is_refused(missing: str, model: Path) -> None:
    for path in model.iterdir():
        if path.name.startswith(missing):
            path.unlink()
    with pytest.raises(InvalidRequest, match=r"config\.json|safetensors"):
        fingerprint(model)
    with pytest.raises(InvalidRequest, match="not a readable folder"):
        fingerprint(model / "absent")
