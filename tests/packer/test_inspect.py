"""A person is told what an adapter is, and why it would be refused."""

from __future__ import annotations

from pathlib import Path

import torch

from packer.inspect import PEFT, REVISION, inspect, ranges
from packer.revision import RevisionFile
from packer.shape import BaseShape
from tests.packer.adapters import config_for, packed, shape_of, tensors_for, write_folder


def test_a_folder_is_described_with_its_digest_to_be(
    adapter: Path, revision: bytes, shape: BaseShape, tmp_path: Path
) -> None:
    for base in (shape, None):
        seen = inspect(adapter, base)
        assert (seen.kind, seen.refusal, seen.trained_on, seen.task) == (PEFT, "", "some/base", "CAUSAL_LM")
        assert seen.facts == RevisionFile(revision).facts()
    path = tmp_path / "r.safetensors"
    path.write_bytes(revision)
    assert inspect(path).facts == inspect(path, shape).facts == RevisionFile(revision).facts()
    assert inspect(path).kind == REVISION
    assert inspect(path).modules == inspect(adapter).modules


def test_modules_are_grouped_by_what_they_compute(shape: BaseShape, tmp_path: Path) -> None:
    config = config_for(rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"k_proj": 2}, use_rslora=True)
    folder = write_folder(tmp_path / "a", tensors_for(shape, ranks={"layers.1.q": 2}), config)
    rows = {(row.module, row.layers): row for row in inspect(folder).modules}
    assert len(rows) == 8
    assert rows["q", "1"].rank == 2
    assert rows["q", "0, 2"].scale == 8 / 4**0.5
    assert rows["k", "0-2"].scale == 2 / 4**0.5
    assert (rows["down", "0-2"].inputs, rows["down", "0-2"].outputs) == (24, 16)
    assert rows["down", "0-2"].parameters == 3 * 4 * (24 + 16)


def test_a_refusal_is_told_with_what_is_known(adapter: Path, revision: bytes, shape: BaseShape, tmp_path: Path) -> None:
    other = inspect(adapter, shape_of(hidden_size=32))
    assert "for another base" in other.refusal
    assert other.facts is None
    assert other.tensors == 42
    tensors = tensors_for(shape)
    next(iter(tensors.values()))[0, 0] = torch.nan
    bad = inspect(write_folder(tmp_path / "nan", tensors, config_for()))
    assert "not finite" in bad.refusal
    assert len(bad.modules) == 7
    path = tmp_path / "r"
    path.write_bytes(revision[:-4])
    assert "truncated" in inspect(path).refusal
    assert "no readable adapter_config.json" in inspect(tmp_path).refusal
    assert inspect(tmp_path / "absent").refusal
    path.write_bytes(packed(adapter, shape))
    assert "for another base" in inspect(path, shape_of(hidden_size=32)).refusal


def test_layers_are_written_as_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""
