"""Packing a PEFT folder: what is right comes out bit for bit, what is wrong is refused with the tensor's name."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from packer.peft import pack_peft
from packer.revision import RevisionFile
from packer.shape import BaseShape
from tests.packer.adapters import (
    PREFIX,
    Tensors,
    config_for,
    packed,
    rewritten_header,
    shape_of,
    tensors_for,
    write_folder,
)
from wire.outcomes import InvalidRequest, RoostError, Unfit

Q0A, Q0B = f"{PREFIX}layers.0.self_attn.q_proj.lora_A.weight", f"{PREFIX}layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_in_the_revision_bit_for_bit(dtype: torch.dtype, shape: BaseShape, tmp_path: Path) -> None:
    tensors = tensors_for(shape, dtype=dtype)
    out = load(packed(write_folder(tmp_path / "a", tensors, config_for()), shape))
    assert len(out) == len(tensors)
    for place, module in shape.places():
        for factor in "AB":
            original = tensors[f"{PREFIX}layers.{place.layer}.{module.path}.lora_{factor}.weight"]
            assert torch.equal(out[f"{place}.{factor}"], original)
            assert out[f"{place}.{factor}"].dtype == dtype


def test_facts_are_those_of_the_file(adapter: Path, shape: BaseShape) -> None:
    out = io.BytesIO()
    facts = pack_peft(adapter, shape, out)
    assert facts == RevisionFile(out.getvalue()).facts()
    assert facts.size == len(out.getvalue())
    assert (facts.rank, facts.dtype, facts.tensors) == (4, "float32", 2 * 3 * 7)
    assert facts.targets == ("q", "k", "v", "o", "gate", "up", "down")
    assert facts.parameters == sum(tensor.numel() for tensor in load(out.getvalue()).values())


def test_equal_content_has_one_digest_wherever_it_came_from(shape: BaseShape, tmp_path: Path) -> None:
    tensors = tensors_for(shape)
    one = write_folder(tmp_path / "one", tensors, config_for(lora_alpha=16))
    other = write_folder(
        tmp_path / "other",
        dict(reversed(tensors.items())),
        config_for(lora_alpha=16.0, target_modules="all-linear", base_model_name_or_path="x", lora_dropout=0),
    )
    assert packed(one, shape) == packed(other, shape)


def test_what_is_computed_changes_the_digest(shape: BaseShape, tmp_path: Path) -> None:
    configs = [{}, {"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 9}}]
    files = {
        packed(write_folder(tmp_path / str(i), tensors_for(shape), config_for(**config)), shape)
        for i, config in enumerate(configs)
    }
    assert len(files) == len(configs)


def test_half_precision_is_kept_in_full(shape: BaseShape, tmp_path: Path) -> None:
    tensors = tensors_for(shape, dtype=torch.float16)
    tensors[Q0A][0, 0] = 6e-8
    file = packed(write_folder(tmp_path / "a", tensors, config_for()), shape)
    assert torch.equal(load(file)["layers.0.q.A"], tensors[Q0A].float())
    assert RevisionFile(file).facts().dtype == "float32"


def test_the_names_of_a_bare_model_are_understood(shape: BaseShape, tmp_path: Path) -> None:
    usual = write_folder(tmp_path / "a", tensors_for(shape), config_for())
    bare = write_folder(tmp_path / "b", tensors_for(shape, prefix="base_model.model."), config_for())
    assert load(packed(usual, shape)).keys() == load(packed(bare, shape)).keys()


def test_progress_ends_at_the_whole(adapter: Path, shape: BaseShape) -> None:
    seen: list[tuple[int, int]] = []
    pack_peft(adapter, shape, io.BytesIO(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_download_cache_of_links_is_read(adapter: Path, shape: BaseShape, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(adapter, blobs)
    snapshot.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert packed(snapshot, shape) == packed(adapter, shape)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def plus(name: str, *size: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.zeros(size, dtype=dtype)}


def holding(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        tensors[name][-1, -1] = value
        return tensors

    return change


@pytest.mark.parametrize(
    ("change", "config", "error", "reason"),
    [
        (without(Q0B), {}, InvalidRequest, f"lacks tensor '{Q0B}'"),
        (without(Q0A), {}, InvalidRequest, f"lacks tensor '{Q0A}'"),
        (without(Q0A, Q0B), {}, InvalidRequest, f"lacks tensor '{Q0A}' and 1 more, which target_modules asks for"),
        (lambda _: {}, {}, InvalidRequest, "holds no tensors"),
        (plus(f"{PREFIX}layers.3.self_attn.q_proj.lora_A.weight", 4, 16), {}, Unfit, "layers.3.self_attn.q_proj"),
        (plus("stray", 1), {}, Unfit, "'stray'"),
        (plus("base_model.model.lm_head.weight", 4, 4), {}, Unfit, "output layer"),
        (plus("base_model.model.model.embed_tokens.lora_embedding_A", 4, 4), {}, Unfit, "embeddings"),
        (plus(f"{PREFIX}layers.0.self_attn.q_proj.lora_magnitude_vector", 4), {}, Unfit, "DoRA"),
        (plus(f"{PREFIX}layers.0.self_attn.q_proj.lora_B.bias", 4), {}, Unfit, "biases"),
        (plus(Q0A, 4, 17), {}, Unfit, "layers.0.q adapts 17 -> 16, but the base's module is 16 -> 16"),
        (plus(Q0A, 5, 16), {}, InvalidRequest, f"{Q0A} has rank 5, but the configuration says 4"),
        (plus(Q0B, 16, 5), {}, InvalidRequest, f"{Q0B} has rank 5, but the configuration says 4"),
        (plus(Q0A, 64), {}, InvalidRequest, f"{Q0A} has the shape"),
        (plus(Q0A, 4, 0), {}, InvalidRequest, f"{Q0A} has the shape"),
        (plus(Q0A, 4, 16, dtype=torch.bfloat16), {}, InvalidRequest, "mixes dtypes: F32"),
        (holding(Q0A, float("nan")), {}, InvalidRequest, f"{Q0A} holds a value that is not finite"),
        (holding(Q0B, float("-inf")), {}, InvalidRequest, f"{Q0B} holds a value that is not finite"),
        (None, {"r": 8}, InvalidRequest, "has rank 4, but the configuration says 8"),
        (None, {"rank_pattern": {"k_proj": 2}}, InvalidRequest, "k_proj.lora_A.weight has rank 4"),
        (None, {"target_modules": ["q_proj"]}, InvalidRequest, "which the configuration does not ask for"),
        (None, {"target_modules": ["c_attn"]}, Unfit, "matches no module of the base"),
        (None, {"target_modules": ["q_proj", "lm_head"]}, Unfit, "lm_head, which is not served"),
        (None, {"modules_to_save": ["lm_head"]}, Unfit, "modules_to_save"),
        (None, {"target_modules": "(q_proj"}, InvalidRequest, "no regular expression"),
    ],
)  # fmt: skip
def test_a_wrong_adapter_is_refused_by_name(
    change: Callable[[Tensors], Tensors] | None,
    config: dict[str, Any],
    error: type[RoostError],
    reason: str,
    shape: BaseShape,
    tmp_path: Path,
) -> None:
    tensors = (change or dict)(tensors_for(shape))
    folder = write_folder(tmp_path / "a", tensors, config_for(**config))
    with pytest.raises(error) as refused:
        packed(folder, shape)
    assert reason in refused.value.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_narrow_values_that_are_not_finite_are_found(
    dtype: torch.dtype, value: float, shape: BaseShape, tmp_path: Path
) -> None:
    tensors = tensors_for(shape, dtype=dtype)
    name = f"{PREFIX}layers.2.mlp.up_proj.lora_A.weight"
    tensors[name][2, 3] = value
    with pytest.raises(InvalidRequest, match=name):
        packed(write_folder(tmp_path / "a", tensors, config_for()), shape)


def test_the_largest_finite_values_pass(shape: BaseShape, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensors = tensors_for(shape, dtype=dtype)
        tensors[Q0A][:] = torch.finfo(dtype).max
        tensors[Q0B][:] = torch.finfo(dtype).min
        assert packed(write_folder(tmp_path / str(dtype), tensors, config_for()), shape)


def test_an_adapter_of_a_larger_base_is_unfit(adapter: Path) -> None:
    for other in (shape_of(num_hidden_layers=2), shape_of(hidden_size=32), shape_of(intermediate_size=20)):
        with pytest.raises(Unfit):
            packed(adapter, other)


def test_an_integer_adapter_is_refused(shape: BaseShape, tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.int8) for name, tensor in tensors_for(shape).items()}
    with pytest.raises(InvalidRequest, match="dtype I8"):
        packed(write_folder(tmp_path / "a", tensors, config_for()), shape)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file[: len(file) // 2], "truncated"),
        (lambda file: file[:100], "truncated"),
        (lambda file: file[:3], "too short"),
        (lambda file: b"", "empty"),
        (lambda file: file + b"\0", "after its last tensor"),
        (lambda file: (1 << 40).to_bytes(8, "little") + file[8:], "declares a header of 1099511627776 bytes"),
        (lambda file: rewritten_header(file, lambda h: h[Q0A].update(data_offsets=[0, 256])), "overlaps"),
        (lambda file: rewritten_header(file, lambda h: h[Q0A].update(shape=[4, 1 << 40])), "takes another number"),
    ],
)
def test_a_lying_file_is_refused(
    spoil: Callable[[bytes], bytes], reason: str, adapter: Path, shape: BaseShape, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(InvalidRequest, match=reason):
        packed(folder, shape)


def test_a_pickle_is_refused_unopened(adapter: Path, shape: BaseShape, tmp_path: Path) -> None:
    folder = shutil.copytree(adapter, tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidRequest, match=r"adapter_model\.bin, a pickle"):
        packed(folder, shape)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_out_of_the_folder_and_absent_files_are_refused(
    name: str, adapter: Path, shape: BaseShape, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapter, tmp_path / "a")
    (folder / name).unlink()
    with pytest.raises(InvalidRequest, match=f"no readable {name}"):
        packed(folder, shape)
    (folder / name).symlink_to(adapter / name)
    with pytest.raises(InvalidRequest, match="leads out of"):
        packed(folder, shape)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(InvalidRequest, match="not a regular file"):
        packed(folder, shape)


def test_a_folder_that_is_none_is_refused(shape: BaseShape, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="is not a folder"):
        packed(tmp_path / "absent", shape)


def test_what_is_left_unread_does_not_matter(adapter: Path, shape: BaseShape, tmp_path: Path) -> None:
    folder = shutil.copytree(adapter, tmp_path / "a")
    (folder / "README.md").write_text("# A model card")
    (folder / "optimizer.pt").write_bytes(b"whatever")
    assert packed(folder, shape) == packed(adapter, shape)
    assert json.loads((folder / "adapter_config.json").read_text())["lora_dropout"] == 0.1
    assert load_file(folder / "adapter_model.safetensors")
