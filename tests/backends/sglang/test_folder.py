"""What an SGLang server is given to load computes what the revision computes, read as SGLang reads it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from backends.sglang.folder import write_for_sglang
from packer.modules import Place
from packer.peft import pack_peft
from packer.revision import RevisionFile
from packer.shape import BaseShape
from tests.packer.moe import base, config, folder_of, outer, per_expert, stacked
from wire.outcomes import Unfit

HEAD = "base_model.model.model.layers."
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
ATTENTION = ("q_proj", "k_proj", "v_proj")


PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]


def revision_of(tmp_path: Path, shape: BaseShape, tensors: dict[str, torch.Tensor], **about: Any) -> bytes:
    packed = io.BytesIO()
    modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
    targets = {} if "target_parameters" in about else {"target_modules": modules}
    pack_peft(folder_of(tmp_path / "peft", tensors, config(**targets, **about)), shape, packed)
    return packed.getvalue()


def some(tensors: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if any(f".{wanted}." in name for wanted in names)}


def deltas_of(revision: bytes) -> dict[Place, torch.Tensor]:
    """What each module's weights are changed by, experts stacked and gate_up as gate and up."""
    file = RevisionFile(revision)
    found = {}
    for pair in file.pairs:
        a, b = (
            torch.frombuffer(bytearray(file.tensor(f"{pair.place}.{factor}")), dtype=DTYPES[file.dtype])
            .float()
            .view(shape)
            for factor, shape in zip("AB", pair.shapes, strict=True)
        )
        delta = file.scale(pair) * (b @ a)
        if pair.place.module == "experts.gate_up":
            found[Place(pair.place.layer, "experts.gate")], found[Place(pair.place.layer, "experts.up")] = delta.chunk(
                2, dim=-2
            )
        else:
            found[pair.place] = delta
    return found


class Written:
    """A folder as SGLang understands it: one rank, one scale of alpha over r, modules by the ends of their names."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "adapter_config.json").read_text())
        self.tensors = load_file(folder / "adapter_model.safetensors")

    def delta(self, place: Place, path: str) -> torch.Tensor:
        stem = f"{HEAD}{place.layer}.{path.replace('.{}', '')}"
        a, b = (self.tensors[f"{stem}.lora_{factor}.weight"].float() for factor in "AB")
        assert a.shape[-2] == b.shape[-1] == self.config["r"]
        return self.config["lora_alpha"] / self.config["r"] * (b @ a)

    def modules(self) -> set[str]:
        return {name.removeprefix(HEAD).partition(".lora_")[0] for name in self.tensors}


def write(tmp_path: Path, revision: bytes, shape: BaseShape | None) -> Written:
    write_for_sglang(revision, tmp_path / "written", dtype="float32", base=shape)
    return Written(tmp_path / "written")


DENSE = base("Qwen3")
EXPERTS = base("Qwen3-MoE", mlp_only_layers=[])


@pytest.mark.parametrize(
    "about",
    [
        {"rank": 4, "lora_alpha": 6},
        {"rank": 4, "lora_alpha": 6, "use_rslora": True},
        {"rank": 4, "alpha_pattern": {"k_proj": 3}},
        {"rank": 4, "use_rslora": True, "alpha_pattern": {r"layers.1.self_attn.q_proj": 11}},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_every_scale_comes_out_as_one_alpha(tmp_path: Path, shape: BaseShape, about: dict[str, Any]) -> None:
    left = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    revision = revision_of(tmp_path, shape, some(per_expert(shape, 4), *left), **about)
    written = write(tmp_path, revision, shape)
    assert not written.config["use_rslora"]
    assert written.config["rank_pattern"] == written.config["alpha_pattern"] == {}
    for place, delta in deltas_of(revision).items():
        module = shape.get(place)
        assert module is not None
        torch.testing.assert_close(written.delta(place, module.path), delta, rtol=1e-5, atol=1e-6)


def test_unlike_ranks_become_the_largest(tmp_path: Path) -> None:
    tensors = some(per_expert(DENSE, 4), "q_proj", "v_proj") | some(per_expert(DENSE, 2), "o_proj")
    revision = revision_of(tmp_path, DENSE, tensors, rank=4, rank_pattern={"o_proj": 2})
    written = write(tmp_path, revision, DENSE)
    assert written.config["r"] == 4
    for place, delta in deltas_of(revision).items():
        torch.testing.assert_close(
            written.delta(place, DENSE.modules[0][place.module].path), delta, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    "given", [("k_proj",), ("v_proj",), ("q_proj", "v_proj"), ("up_proj",), ("gate_proj",)], ids=str
)
def test_a_group_is_whole_and_what_was_missing_changes_nothing(tmp_path: Path, given: tuple[str, ...]) -> None:
    revision = revision_of(tmp_path, DENSE, some(per_expert(DENSE), *given))
    written = write(tmp_path, revision, DENSE)
    group = ATTENTION if given[0] in ATTENTION else ("gate_proj", "up_proj")
    for layer in range(DENSE.layers):
        inside = {name.rpartition(".")[2] for name in written.modules() if name.startswith(f"{layer}.")}
        assert inside == set(group)
        for place, module in ((Place(layer, name), path) for name, path in DENSE.modules[layer].items()):
            if module.path.endswith(group) and not module.path.endswith(given):
                assert not written.delta(place, module.path).any()


@pytest.mark.parametrize("layout", ["stacked", "outer"])
def test_experts_of_any_layout_are_stacked_whole(tmp_path: Path, layout: str) -> None:
    shape = EXPERTS
    tensors, about = (outer(shape), {}) if layout == "outer" else (stacked(shape)[0], {"target_parameters": PARAMETERS})
    revision = revision_of(tmp_path, shape, tensors, **about)
    written = write(tmp_path, revision, shape)
    deltas = deltas_of(revision)
    for layer in range(shape.layers):
        for name in ("experts.gate", "experts.up", "experts.down"):
            module = shape.modules[layer][name]
            delta = written.delta(Place(layer, name), module.path)
            assert len(delta) == module.experts
            torch.testing.assert_close(delta, deltas[Place(layer, name)].expand_as(delta), rtol=1e-5, atol=1e-6)


def test_what_can_not_be_known_without_the_base_is_said(tmp_path: Path) -> None:
    revision = revision_of(tmp_path, DENSE, some(per_expert(DENSE), "v_proj"))
    with pytest.raises(Unfit, match=r"layers\.0\.q .* model_path"):
        write(tmp_path, revision, None)


@pytest.mark.parametrize(
    ("name", "module", "reason"),
    [
        ("gpt-oss", "", "it takes no adapters of this base"),
        ("Qwen3-MoE", "mlp.gate_proj", "can't change layers.1.gate: of this base it takes experts.down"),
        ("DeepSeek-V3", "kv_a_proj_with_mqa", "can't change layers.0.kv_a"),
    ],
)
def test_what_sglang_would_leave_out_is_refused(tmp_path: Path, name: str, module: str, reason: str) -> None:
    shape = base(name)
    if module:
        tensors = per_expert(shape)
        revision = revision_of(tmp_path, shape, {key: tensors[key] for key in tensors if f".{module}." in key})
    else:
        revision = revision_of(tmp_path, shape, stacked(shape)[0], target_parameters=PARAMETERS)
    with pytest.raises(Unfit, match=reason):
        write(tmp_path, revision, shape)
    assert not (tmp_path / "written").exists()
