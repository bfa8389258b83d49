"""Adapters of experts: every architecture, every layout, bit for bit there and back; what is doubtful is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from packer.inspect import inspect
from packer.peft import pack_peft
from packer.revision import RevisionFile, check_fit
from packer.unpack import write_engine_peft, write_peft
from tests.packer.adapters import PREFIX, Tensors, packed
from tests.packer.moe import CONFIGS, WITH_EXPERTS, base, config, folder_of, outer, per_expert, stacked
from wire.outcomes import InvalidRequest, RoostError, Unfit

TENSORS = "adapter_model.safetensors"
PARAMETERS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "peft_version": "0.21.2"}


def assert_round_trip(folder: Path, name: str) -> bytes:
    """The folder's tensor file comes back byte for byte, and what comes back packs to the same revision."""
    shape = base(name)
    file = packed(folder, shape)
    check_fit(RevisionFile(file), shape)
    back = folder.with_name(f"{folder.name}-back")
    write_peft(file, back)
    assert (back / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()
    assert packed(back, shape) == file
    for path, against in ((folder, shape), (folder, None)):
        seen = inspect(path, against)
        assert seen.refusal == ""
        assert seen.facts == RevisionFile(file).facts()
    return file


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_experts_with_tensors_of_their_own(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = per_expert(base(name), dtype=dtype)
    file = assert_round_trip(folder_of(tmp_path / "a", tensors, config()), name)
    out = load(file)
    wide = torch.float32 if dtype == torch.float16 else dtype
    for place, module in base(name).places():
        if place.module == "experts.gate_up":
            continue
        stem = f"{PREFIX}layers.{place.layer}.{module.path}"
        for factor in "AB":
            names = [f"{stem.replace('{}', str(e))}.lora_{factor}.weight" for e in range(module.experts or 1)]
            whole = torch.stack([tensors[n] for n in names]) if module.experts else tensors[names[0]]
            assert torch.equal(out[f"{place}.{factor}"], whole.to(wide))


@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.parametrize("only", ["", "experts.gate_up", "experts.down"])
def test_parameters_that_peft_stacks(name: str, only: str, tmp_path: Path) -> None:
    tensors, stacks = stacked(base(name), only=only)
    settings = {**PARAMETERS, "target_parameters": [f"{only}_proj"]} if only else PARAMETERS
    file = assert_round_trip(folder_of(tmp_path / "a", tensors, config(**settings)), name)
    out = load(file)
    for place, (a, b) in stacks.items():
        assert torch.equal(out[f"{place}.A"], a)
        assert torch.equal(out[f"{place}.B"], b)


@pytest.mark.parametrize("name", WITH_EXPERTS)
@pytest.mark.parametrize("shared", [True, False])
def test_the_outer_layout(name: str, shared: bool, tmp_path: Path) -> None:
    shape = base(name)
    tensors = outer(shape, shared=shared)
    file = assert_round_trip(folder_of(tmp_path / "a", tensors, config()), name)
    layer = next(place.layer for place, _ in shape.places() if place.expert)
    out = load(file)
    assert out[f"layers.{layer}.experts.gate.A"].shape[0] == (1 if shared else 4)
    whole = tensors[f"{PREFIX}layers.{layer}.mlp.experts.w2.lora_B.weight"]
    assert torch.equal(out[f"layers.{layer}.experts.down.B"], whole)


def stacked_config(rank: int = 3, **changes: Any) -> dict[str, Any]:
    """What a tool that is not PEFT might write."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "experts"]
    return config(rank, **{"target_modules": targets, **changes})


def qwen(**kwargs: Any) -> Tensors:
    tensors, _ = stacked(base("Qwen3-MoE"), **kwargs)
    return {name: tensor for name, tensor in tensors.items() if ".mlp.down_proj" not in name}


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("where", ["config", "metadata"])
def test_a_column_order_that_is_said_is_followed(block: bool, where: str, tmp_path: Path) -> None:
    order = {"expert_order": "block" if block else "fastest"}
    settings = stacked_config(**(order if where == "config" else {}))
    metadata = order if where == "metadata" else {}
    folder = folder_of(tmp_path / "a", qwen(block=block), settings, **metadata)
    file = packed(folder, base("Qwen3-MoE"))
    _, stacks = stacked(base("Qwen3-MoE"), block=block)
    out = load(file)
    assert all(torch.equal(out[f"{place}.B"], b) for place, (_, b) in stacks.items())
    write_peft(file, tmp_path / "b")
    again = load((tmp_path / "b" / TENSORS).read_bytes())
    assert all(torch.equal(again[name], tensor) for name, tensor in qwen(block=block).items())
    assert packed(tmp_path / "b", base("Qwen3-MoE")) == file


def test_a_column_order_that_is_not_said_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", qwen(), stacked_config())
    with pytest.raises(InvalidRequest, match="doesn't say which"):
        packed(folder, base("Qwen3-MoE"))
    assert "doesn't say which" in inspect(folder).refusal
    both = folder_of(tmp_path / "b", qwen(), stacked_config(expert_order="block"), expert_order="fastest")
    with pytest.raises(InvalidRequest, match="expert_order is said to be"):
        packed(both, base("Qwen3-MoE"))
    with pytest.raises(InvalidRequest, match="not fastest or block"):
        packed(folder_of(tmp_path / "c", qwen(), stacked_config(expert_order="rank")), base("Qwen3-MoE"))


def test_at_rank_one_both_orders_are_one(tmp_path: Path) -> None:
    files = {
        packed(folder_of(tmp_path / str(block), qwen(rank=1, block=block), stacked_config(1)), base("Qwen3-MoE"))
        for block in (False, True)
    }
    assert len(files) == 1


def test_what_an_old_peft_turned_round_is_refused(tmp_path: Path) -> None:
    tensors, _ = stacked(base("Qwen3-MoE"))
    turned: Tensors = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            turned[name] = tensor
            continue
        other = name.replace("lora_A", "lora_X").replace("lora_B", "lora_A").replace("lora_X", "lora_B")
        turned[other] = tensor.T.contiguous()
    folder = folder_of(tmp_path / "a", turned, config(**{**PARAMETERS, "peft_version": "0.18.0"}))
    with pytest.raises(Unfit, match=r"PEFT before 0\.19"):
        packed(folder, base("Qwen3-MoE"))
    # where input and output have one size, the version alone can tell
    square = {"moe_intermediate_size": 16, "hidden_size": 16}
    tensors, _ = stacked(base("Qwen3-MoE", **square), only="experts.down")
    for version, works in (("0.21.2", True), ("0.18.1", False), ("", False)):
        settings = config(target_parameters=["experts.down_proj"], peft_version=version)
        folder = folder_of(tmp_path / f"square{version}", tensors, settings)
        if works:
            assert packed(folder, base("Qwen3-MoE", **square))
        else:
            with pytest.raises(Unfit, match=r"PEFT before 0\.19"):
                packed(folder, base("Qwen3-MoE", **square))


def expert_name(expert: int, layer: int = 0, factor: str = "A") -> str:
    return f"{PREFIX}layers.{layer}.mlp.experts.{expert}.up_proj.lora_{factor}.weight"


def changed(name: str, tensor: torch.Tensor | None) -> Tensors:
    tensors = per_expert(base("Qwen3-MoE"), dtype=torch.float32)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return tensors


@pytest.mark.parametrize(
    ("tensors", "settings", "error", "reason"),
    [
        (changed(expert_name(2), None), {}, InvalidRequest, "lacks .*experts.2.up_proj"),
        (changed(expert_name(4), torch.zeros(3, 16)), {}, Unfit, "no such module in the base"),
        (changed(expert_name(2), torch.zeros(3, 15)), {}, InvalidRequest, r"experts.2.up_proj.lora_A.* \[3, 15\], but"),
        (changed(expert_name(2), torch.full((3, 16), torch.inf)), {}, InvalidRequest, "experts.2.up_proj.*not finite"),
        (changed(expert_name(2), torch.zeros(2, 16)), {}, InvalidRequest, "shape"),
        (changed(expert_name(0, 2), torch.zeros(3, 16, 1)), {}, InvalidRequest, "shape"),
        (per_expert(base("Qwen3-MoE")), {"target_modules": ["q_proj"]}, InvalidRequest, "does not ask for"),
        (
            per_expert(base("Qwen3-MoE")),
            {"target_modules": [*"qkvo", "experts.1.up_proj"]},
            Unfit,
            "adapts 1 of 4 experts",
        ),
        (per_expert(base("Qwen3-MoE")), {"rank_pattern": {"experts.1.up_proj": 2}}, Unfit, "unlike ranks"),
    ],
)  # fmt: skip
def test_a_wrong_expert_is_refused_by_name(
    tensors: Tensors, settings: dict[str, Any], error: type[RoostError], reason: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "a", tensors, config(**settings))
    with pytest.raises(error, match=reason):
        packed(folder, base("Qwen3-MoE"))


def test_another_number_of_experts_is_another_base(tmp_path: Path) -> None:
    file = packed(folder_of(tmp_path / "a", outer(base("Qwen3-MoE")), config()), base("Qwen3-MoE"))
    with pytest.raises(Unfit, match="for 4 experts, but the base has 8"):
        check_fit(RevisionFile(file), base("Qwen3-MoE", num_experts=8))
    with pytest.raises(Unfit, match="no module of the base"):
        check_fit(RevisionFile(file), base("Qwen3"))


def test_layers_that_predict_further_are_adapted_where_the_trainer_built_them(tmp_path: Path) -> None:
    tensors = {name: t for name, t in per_expert(base("GLM-5")).items() if ".layers.3." not in name}
    usual = packed(folder_of(tmp_path / "a", tensors, config()), base("GLM-5"))
    assert not any(name.startswith("layers.3.") for name in load(usual))
    whole = packed(folder_of(tmp_path / "b", per_expert(base("GLM-5")), config()), base("GLM-5"))
    assert "layers.3.eh.A" in load(whole)


def test_patterns_of_experts(tmp_path: Path) -> None:
    settings = config(alpha_pattern={"mlp.experts.\\d+.gate_proj": 3, "layers.2.mlp.experts.\\d+.up_proj": 5})
    folder = folder_of(tmp_path / "a", per_expert(base("Qwen3-MoE")), settings)
    file = assert_round_trip(folder, "Qwen3-MoE")
    assert RevisionFile(file).manifest.alphas == {"experts.gate": 3, "layers.2.experts.up": 5}
    write_engine_peft(file, tmp_path / "engine", dtype="bfloat16")
    plain = load((tmp_path / "engine" / TENSORS).read_bytes())
    tensors = per_expert(base("Qwen3-MoE"))
    assert plain.keys() == tensors.keys()
    name = f"{PREFIX}layers.2.mlp.experts.3.up_proj.lora_B.weight"
    assert torch.equal(plain[name].bfloat16(), tensors[name] * (5 / 3))


def test_engines_get_stacks_as_they_came(tmp_path: Path) -> None:
    tensors, _ = stacked(base("gpt-oss"))
    folder = folder_of(tmp_path / "a", tensors, config(**PARAMETERS))
    write_engine_peft(packed(folder, base("gpt-oss")), tmp_path / "engine", base=base("gpt-oss"))
    assert (tmp_path / "engine" / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()


def test_fused_gate_up_is_not_split_for_a_base_that_nobody_knows(tmp_path: Path) -> None:
    """gpt-oss's rows alternate: halves of them would be a wrong answer."""
    folder = folder_of(tmp_path / "a", stacked(base("gpt-oss"))[0], config(**PARAMETERS))
    with pytest.raises(Unfit, match=r"config\.json"):
        write_engine_peft(packed(folder, base("gpt-oss")), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_engines_get_every_expert_whole_under_the_names_of_the_base(name: str, tmp_path: Path) -> None:
    shape = base(name)
    down = "w2" if name == "Mixtral" else "down_proj"
    settings = config(target_modules=rf".*\.experts\.\d+\.{down}")
    experts = {key: tensor for key, tensor in per_expert(shape).items() if ".experts." in key}
    adapted = {key: tensor for key, tensor in experts.items() if f".{down}." in key}
    file = packed(folder_of(tmp_path / "a", adapted, settings), shape)
    write_engine_peft(file, tmp_path / "engine", base=shape)
    written = load((tmp_path / "engine" / TENSORS).read_bytes())
    assert written.keys() == experts.keys()
    for key, tensor in written.items():
        assert tensor.shape == experts[key].shape
        assert torch.equal(tensor, experts[key]) if key in adapted else not tensor.any()


def test_gate_and_up_can_not_be_adapted_twice(tmp_path: Path) -> None:
    file = packed(folder_of(tmp_path / "a", stacked(base("gpt-oss"))[0], config(**PARAMETERS)), base("gpt-oss"))
    tensors = load(file)
    manifest = RevisionFile(file).manifest
    tensors["layers.0.experts.gate.A"] = torch.zeros(4, 3, 16)
    tensors["layers.0.experts.gate.B"] = torch.zeros(4, 24, 3)
    save_file(tensors, tmp_path / "twice", metadata={"roost": manifest.encode()})
    with pytest.raises(InvalidRequest):
        RevisionFile((tmp_path / "twice").read_bytes())


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = folder_of(tmp_path / "a", stacked(base("Mixtral"))[0], config(**PARAMETERS))
    pack_peft(folder, base("Mixtral"), io.BytesIO(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
