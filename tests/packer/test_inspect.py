"""A person is told what an adapter is, and why it would be refused."""

from __future__ import annotations

from pathlib import Path

import torch

from packer.inspect import MEGATRON, PEFT, REVISION, inspect, ranges
from packer.revision import RevisionFile
from packer.shape import BaseShape
from tests.packer import moe
from tests.packer.adapters import config_for, packed, shape_of, tensors_for, write_folder
from tests.packer.test_megatron_core import Groups, trained


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


def test_what_is_refused_at_first_sight_is_measured_all_the_same(
    shape: BaseShape, revision: bytes, tmp_path: Path
) -> None:
    magnitudes = inspect(write_folder(tmp_path / "dora", tensors_for(shape), config_for(use_dora=True)))
    assert "DoRA" in magnitudes.refusal
    assert (magnitudes.tensors, magnitudes.dtypes) == (42, ("F32",))
    tensors = tensors_for(shape)
    name = next(iter(tensors))
    tensors[name] = tensors[name].half()
    mixed = inspect(write_folder(tmp_path / "mixed", tensors, config_for()))
    assert "mixes dtypes" in mixed.refusal
    assert mixed.dtypes == ("F16", "F32")
    stock = inspect(tmp_path / "mixed" / "adapter_model.safetensors")
    assert "not a revision file" in stock.refusal
    assert stock.tensors == 42
    (tmp_path / "text").write_text("no tensors at all")
    assert inspect(tmp_path / "text").tensors == 0


def test_a_job_says_how_it_was_split(tmp_path: Path) -> None:
    shape = moe.base("GLM-5")
    groups = Groups(4, tensor=2, expert=4)
    folder = trained(tmp_path / "s", moe.per_expert(shape), moe.CONFIGS["GLM-5"], groups, moe.config())
    seen = inspect(folder, shape)
    assert (seen.kind, seen.job) == (MEGATRON, "tensor 2 (experts whole), expert 4, pipeline 1")
    assert seen.further == "3"


def test_fused_experts_are_told_as_the_base_has_them(tmp_path: Path) -> None:
    for name, alternating in (("gpt-oss", True), ("Qwen3-MoE", False)):
        settings = moe.config(target_parameters=["experts.gate_up_proj", "experts.down_proj"])
        folder = moe.folder_of(tmp_path / name, moe.stacked(moe.base(name))[0], settings)
        fused = {row.module: row for row in inspect(folder, moe.base(name)).modules}
        assert fused["experts.gate_up"].alternating is alternating
        assert not fused["experts.down"].alternating
        assert not any(row.alternating for row in inspect(folder).modules), "unknown without a base"


def test_layers_are_written_as_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""
    assert ranges([4]) == "4"
    assert ranges([0, 1, 2, *range(6, 75, 4), 77]) == "0-2, 6-74 by 4, 77"
    assert ranges([1, 3, 5]) == "1, 3, 5"
    assert ranges([0, 2, 4, 6, 7, 8, 9]) == "0-6 by 2, 7-9"
