"""Unpacking gives back what was packed; an engine gets what computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from packer.modules import DENSE_PATHS
from packer.revision import RevisionFile
from packer.shape import BaseShape
from packer.unpack import write_engine_peft, write_peft
from tests.packer.adapters import PREFIX, config_for, packed, shape_of, tensors_for, write_folder
from wire.outcomes import InvalidRequest

TENSORS = "adapter_model.safetensors"


def written_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "adapter_config.json").read_text()))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prefix", [PREFIX, "base_model.model."])
def test_the_tensor_file_comes_back_byte_for_byte(
    dtype: torch.dtype, prefix: str, shape: BaseShape, tmp_path: Path
) -> None:
    deep = shape_of(num_hidden_layers=11)
    folder = write_folder(tmp_path / "a", tensors_for(deep, dtype=dtype, prefix=prefix), config_for())
    file = packed(folder, deep)
    write_peft(file, tmp_path / "b", base_model="some/base")
    assert (tmp_path / "b" / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()
    assert written_config(tmp_path / "b")["base_model_name_or_path"] == "some/base"
    assert packed(tmp_path / "b", deep) == file


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_adapter_survives_the_round_trip(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    draw = data.draw
    shape = shape_of(num_hidden_layers=draw(st.integers(1, 12)))
    modules = tuple(draw(st.lists(st.sampled_from(list(DENSE_PATHS)), min_size=1, unique=True)))
    ranks = {module: draw(st.integers(1, 9)) for module in draw(st.sets(st.sampled_from(list(DENSE_PATHS))))}
    layer = draw(st.integers(0, shape.layers - 1))
    ranks |= {f"layers.{layer}.{module}": draw(st.integers(1, 9)) for module in modules[:1]}
    rank_pattern = {
        (f"layers.{layer}." if key.startswith("layers") else "") + DENSE_PATHS[key.rpartition(".")[2]]: rank
        for key, rank in sorted(ranks.items(), key=lambda item: not item[0].startswith("layers"))
    }
    alphas = st.floats(-64, 64, allow_nan=False) | st.integers(-9, 99)
    config = config_for(
        rank=draw(st.integers(1, 9)),
        modules=modules,
        lora_alpha=draw(alphas),
        use_rslora=draw(st.booleans()),
        rank_pattern=rank_pattern,
        alpha_pattern=draw(
            st.dictionaries(st.sampled_from(["q_proj", "mlp.down_proj", "layers.0.mlp.up_proj"]), alphas)
        ),
    )
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    tensors = tensors_for(shape, config["r"], modules=modules, ranks=ranks, dtype=dtype, seed=draw(st.integers(0, 99)))
    folder = write_folder(tmp_path_factory.mktemp("trip") / "a", tensors, config)
    file = packed(folder, shape)
    back = folder.with_name("b")
    write_peft(file, back)
    assert (back / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()
    assert packed(back, shape) == file
    computed = ("r", "lora_alpha", "use_rslora")
    assert [written_config(back)[name] for name in computed] == [config[name] for name in computed]


def test_an_adapter_of_some_layers_stays_one_of_these_layers(shape: BaseShape, tmp_path: Path) -> None:
    for number, keep in enumerate([("layers.1.",), ("layers.0.", "layers.1.mlp.up")]):
        tensors = {name: t for name, t in tensors_for(shape).items() if any(part in name for part in keep)}
        targets = sorted({name.removeprefix("base_model.model.").split(".lora")[0] for name in tensors})
        folder = write_folder(tmp_path / f"a{number}", tensors, config_for(target_modules=targets))
        file = packed(folder, shape)
        write_peft(file, tmp_path / f"b{number}")
        assert packed(tmp_path / f"b{number}", shape) == file


def test_a_uniform_adapter_reaches_the_engine_as_it_is(shape: BaseShape, tmp_path: Path) -> None:
    config = config_for(use_rslora=True, lora_alpha=7)
    folder = write_folder(tmp_path / "a", tensors_for(shape, dtype=torch.bfloat16), config)
    write_engine_peft(packed(folder, shape), tmp_path / "engine", dtype="bfloat16")
    assert (tmp_path / "engine" / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()
    written = written_config(tmp_path / "engine")
    assert (written["r"], written["lora_alpha"], written["use_rslora"]) == (4, 7, True)
    assert written["rank_pattern"] == written["alpha_pattern"] == {}


def test_an_engine_sees_the_usual_names(shape: BaseShape, tmp_path: Path) -> None:
    bare = write_folder(tmp_path / "a", tensors_for(shape, prefix="base_model.model."), config_for())
    write_engine_peft(packed(bare, shape), tmp_path / "engine")
    assert load_file(tmp_path / "engine" / TENSORS).keys() == tensors_for(shape).keys()


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_patterns_are_folded_as_the_engine_would_round(
    file_dtype: torch.dtype, engine_dtype: torch.dtype, shape: BaseShape, tmp_path: Path
) -> None:
    """The engine casts B to its dtype and multiplies in place; a plain adapter must end in the same bits."""
    ranks = {"q": 3, "layers.1.down": 7}
    config = config_for(
        rank_pattern={"q_proj": 3, "layers.1.mlp.down_proj": 7}, alpha_pattern={"v_proj": 11}, use_rslora=True
    )
    tensors = tensors_for(shape, ranks=ranks, dtype=file_dtype)
    file = packed(write_folder(tmp_path / "a", tensors, config), shape)
    write_engine_peft(file, tmp_path / "engine", dtype=str(engine_dtype).removeprefix("torch."))
    written = written_config(tmp_path / "engine")
    assert written["r"] == written["lora_alpha"] == 7
    assert not written["use_rslora"]
    assert written["rank_pattern"] == written["alpha_pattern"] == {}
    plain = load_file(tmp_path / "engine" / TENSORS)
    scales = {pair.place: RevisionFile(file).scale(pair) for pair in RevisionFile(file).pairs}
    assert plain.keys() == tensors.keys()
    for place, module in shape.places():
        name = f"{PREFIX}layers.{place.layer}.{module.path}"
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"].to(engine_dtype)
        b *= scales[place]
        got_a, got_b = plain[f"{name}.lora_A.weight"], plain[f"{name}.lora_B.weight"].to(engine_dtype)
        rank = a.shape[0]
        assert torch.equal(got_a[:rank], a)
        assert torch.equal(got_b[:, :rank], b)
        assert got_a.shape[0] == got_b.shape[1] == 7
        assert not got_a[rank:].any()
        assert not got_b[:, rank:].any()


def test_a_folder_appears_whole_or_not_at_all(revision: bytes, tmp_path: Path) -> None:
    write_peft(revision, tmp_path / "deep" / "er")
    assert names_in(tmp_path / "deep" / "er") == ["adapter_config.json", TENSORS]
    with pytest.raises(InvalidRequest, match="exists already"):
        write_peft(revision, tmp_path / "deep" / "er")
    with pytest.raises(InvalidRequest):
        write_peft(revision[:-1], tmp_path / "deep" / "other")
    assert names_in(tmp_path / "deep") == ["er"]


def test_a_full_disk_leaves_nothing(revision: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packer import unpack
    from wire.outcomes import StorageFull

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(unpack, "copy", full)
    with pytest.raises(StorageFull):
        write_peft(revision, tmp_path / "a")
    assert names_in(tmp_path) == []


def test_no_view_of_the_bytes_is_kept(revision: bytes, tmp_path: Path) -> None:
    extent = bytearray(revision)
    write_engine_peft(memoryview(extent), tmp_path / "a")
    write_peft(memoryview(extent), tmp_path / "b")
    extent.clear()  # raises BufferError if anything still looks at it
    assert not extent
