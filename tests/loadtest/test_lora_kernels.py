"""The tuning of vLLM's LoRA kernels, without a GPU: what is asked, what is chosen, and what vLLM reads of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from loadtest import lora_kernels
from loadtest.lora_kernels.choosing import Launches, measure, summary
from loadtest.lora_kernels.configurations import Configuration, candidates, label
from loadtest.lora_kernels.shapes import Kernel, adapters_in, launched_for, read_work, work_of
from loadtest.lora_kernels.tuned_files import Entry, write_files
from loadtest.training.bases import QWEN3_4B
from ops.cli import main
from packer.shape import BaseShape
from wire.outcomes import InvalidRequest, Unfit

SHRINK = Kernel("shrink", (4096,))
DEFAULT: Configuration = {"block_m": 32, "num_warps": 4}
QUICK: Configuration = {"block_m": 64, "num_warps": 4}
SLOW: Configuration = {"block_m": 128, "num_warps": 4}
WRONG: Configuration = {"block_m": 16, "num_warps": 4}


class FakeBatch:
    """Takes as long as ``us`` says of a configuration, and a tenth of a microsecond for each adapter launched for."""

    def __init__(self, us: Callable[[Configuration], float]) -> None:
        self._us = us
        self.asked: list[Configuration] = []

    def default(self) -> Configuration:
        return DEFAULT

    def fault(self, configuration: Configuration) -> str | None:
        return "out of resource: shared memory" if configuration == WRONG else None

    def timer(self, configuration: Configuration, launched: int) -> Callable[[], float]:
        def timed() -> float:
            self.asked.append(configuration)
            return self._us(configuration) + launched / 10

        return timed


def of_table(table: dict[int | None, float]) -> FakeBatch:
    return FakeBatch(lambda configuration: table[configuration["block_m"]])


def test_a_dense_base_calls_each_of_its_products() -> None:
    work = work_of(BaseShape.from_config(json.dumps(QWEN3_4B).encode()))
    assert work.layers == 36
    assert work.calls == {
        Kernel("shrink", (2560, 2560, 2560)): 36, Kernel("expand", (4096, 1024, 1024)): 36,
        Kernel("shrink", (4096,)): 36, Kernel("shrink", (2560, 2560)): 36, Kernel("expand", (9728, 9728)): 36,
        Kernel("shrink", (9728,)): 36,
        # of o and of down, which are as wide
        Kernel("expand", (2560,)): 72,
    }  # fmt: skip


def test_experts_have_kernels_of_their_own() -> None:
    moe = QWEN3_4B | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    work = work_of(BaseShape.from_config(json.dumps(moe).encode()))
    assert {kernel.widths for kernel in work.calls} == {(2560,) * 3, (4096, 1024, 1024), (4096,), (2560,)}


def test_a_model_is_a_folder_or_its_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN3_4B))
    assert read_work(file) == read_work(tmp_path)
    file.write_text(json.dumps(QWEN3_4B | {"architectures": ["BertModel"]}))
    with pytest.raises(Unfit):
        read_work(file)


def test_adapters_of_a_batch_and_what_is_launched() -> None:
    assert [adapters_in(tokens, 8) for tokens in (1, 16, 64, 128, 192, 4096)] == [1, 1, 1, 2, 3, 8]
    assert {launched_for(adapters, 8, specialised=False) for adapters in range(1, 9)} == {9}
    assert [launched_for(adapters, 8, specialised=True) for adapters in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
    assert launched_for(3, 3, specialised=True) == 4
    assert launched_for(5, 6, specialised=True) == 7


@pytest.mark.parametrize(("op", "rank"), list(itertools.product(("shrink", "expand"), (1, 8, 16, 32, 64, 256))))
def test_candidates_are_blocks_that_a_kernel_can_have(op: str, rank: int) -> None:
    found = candidates(op, rank)
    assert len({label(one) for one in found}) == len(found) >= 10
    for one in found:
        for name in ("block_m", "block_n", "block_k"):
            size = one[name]
            assert size is not None
            assert size >= 16
            assert size & (size - 1) == 0


def test_the_fastest_is_taken_and_what_can_not_run_is_named() -> None:
    batch = of_table({32: 10.0, 64: 8.0, 128: 12.0})
    found = measure(batch, SHRINK, 64, Launches(9, 1), [DEFAULT, QUICK, SLOW, WRONG])
    assert (found.tuned, found.wins) == (QUICK, True)
    assert found.left_out == {label(WRONG): "out of resource: shared memory"}
    assert found.choosing == {"default": [10.9] * 5, label(QUICK): [8.9] * 5, label(SLOW): [12.9] * 5}
    assert found.samples(tuned=False, specialised=False) == [10.9] * 9
    assert found.samples(tuned=True, specialised=False) == [8.9] * 9
    assert found.samples(tuned=True, specialised=True) == [8.1] * 9
    # default and candidates take turns
    assert batch.asked[:6] == [DEFAULT, QUICK, SLOW] * 2


@pytest.mark.parametrize(("quick", "wins"), [(9.5, True), (9.9, False), (10.5, False)])
def test_a_small_gain_leaves_the_default(quick: float, wins: bool) -> None:
    found = measure(of_table({32: 10.0, 64: quick}), SHRINK, 64, Launches(1, 1), [QUICK])
    assert (found.tuned, found.wins) == (QUICK if wins else DEFAULT, wins)
    assert found.samples(tuned=True, specialised=False) == ([quick + 0.1] * 9 if wins else [10.1] * 9)


def test_a_gain_that_does_not_come_again_leaves_the_default() -> None:
    lucky = itertools.chain([5.0] * 5, itertools.repeat(10.0))
    batch = FakeBatch(lambda configuration: next(lucky) if configuration == QUICK else 10.0)
    found = measure(batch, SHRINK, 64, Launches(1, 1), [QUICK])
    assert (found.fastest, found.tuned) == (QUICK, DEFAULT)


def test_an_engine_that_launches_for_the_active_is_chosen_for_as_such() -> None:
    batch = of_table({32: 10.0, 64: 8.0})
    found = measure(batch, SHRINK, 64, Launches(9, 2, specialised=True), [QUICK])
    assert found.choosing == {"default": [10.2] * 5, label(QUICK): [8.2] * 5}
    assert found.wins


def test_figures_are_of_a_layer() -> None:
    work = work_of(BaseShape.from_config(json.dumps(QWEN3_4B).encode()))
    launches = Launches(10, 5)
    measured = [
        measure(of_table({32: 9.0, 64: 7.0 if kernel.op == "shrink" else 9.0}), kernel, 64, launches, [QUICK])
        for kernel in work.calls
    ]
    # four of either: at 10 us, and of the shrinks 8
    assert summary(work, measured) == {
        "layer_64_default_us": 80.0, "layer_64_tuned_us": 72.0, "layer_64_default_specialised_us": 76.0,
        "layer_64_tuned_specialised_us": 68.0, "layer_64_tuned_over_default": 0.9,
        "layer_64_tuned_specialised_over_default": 0.85,
        "kernels_tuned": 4, "kernels_at_default": 3, "candidates_left_out": 0,
    }  # fmt: skip


def test_vllm_reads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip(
        "vllm.lora.ops.triton_ops.utils", reason="vLLM's own reader of the files can't be imported"
    )
    files = _written(tmp_path)
    assert [file.name for file in files] == ["NVIDIA_H200_PCIe_SHRINK.json", "NVIDIA_H200_PCIe_EXPAND_TRUE.json"]
    utils.get_lora_op_configs.cache_clear()
    unset = utils.get_lora_op_configs("shrink", 9, 64, 2560, 32, 3)
    with _reading(utils, tmp_path, monkeypatch):
        read = utils.get_lora_op_configs
        assert read("shrink", max_loras=9, batch=64, hidden_size=4096, rank=32, num_slices=1) == QUICK
        assert read("shrink", max_loras=9, batch=64, hidden_size=9728, rank=32, num_slices=1) == SLOW
        assert read("shrink", max_loras=9, batch=200, hidden_size=4096, rank=32, num_slices=1) == DEFAULT
        asked = {"max_loras": 9, "rank": 32, "add_inputs": True}
        assert read("expand", batch=64, hidden_size=9728, num_slices=2, **asked) == QUICK
        # an engine with other slots, and adapters of another rank
        assert read("expand", max_loras=5, batch=1, hidden_size=9728, rank=16, num_slices=2, add_inputs=True) == QUICK
        # what the base has none of is as it was, instead of an error that ends the engine
        assert read("expand", batch=64, hidden_size=512, num_slices=3, **asked) == {"told": 3}
        assert read("shrink", max_loras=9, batch=64, hidden_size=2560, rank=32, num_slices=3) == {"told": 3} != unset


def _written(folder: Path) -> list[Path]:
    entries = [
        Entry("shrink", 1, 64, 4096, QUICK), Entry("shrink", 1, 64, 9728, SLOW), Entry("shrink", 1, 192, 4096, DEFAULT),
        Entry("expand", 2, 64, 9728, QUICK), Entry("expand", 1, 64, 2560, SLOW),
    ]  # fmt: skip
    return write_files(folder, "NVIDIA H200-PCIe", 8, 32, entries, lambda op, slices, tokens, width: {"told": slices})


@contextlib.contextmanager
def _reading(utils: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM as on that GPU, with the folder named; nothing of it is remembered."""
    with monkeypatch.context() as patched:
        patched.setenv("VLLM_TUNED_CONFIG_FOLDER", str(folder))
        patched.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200-PCIe")
        try:
            utils.load_lora_op_config.cache_clear()
            utils.get_lora_op_configs.cache_clear()
            yield
        finally:
            utils.load_lora_op_config.cache_clear()
            utils.get_lora_op_configs.cache_clear()


def test_a_run_writes_a_report_and_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    fake = SimpleNamespace(
        Engine=lambda *told: SimpleNamespace(slots=told[0], rank=told[1]), Job=lambda *told: told,
        compile_all=lambda jobs, workers: compiled.extend(jobs),
        GpuBatch=lambda *told: FakeBatch(lambda one: 10.0 if one == DEFAULT else float(one.get("split_k") or 20)),
        default_of=lambda engine, op, slices, tokens, width: DEFAULT,
        torch=SimpleNamespace(cuda=SimpleNamespace(get_device_name=lambda: "NVIDIA H200")),
    )  # fmt: skip
    monkeypatch.setattr(lora_kernels, "_kernels", lambda: fake)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    said: list[str] = []
    report, folder = tmp_path / "report.json", tmp_path / "tuned"
    figures = lora_kernels.run(report, model=tmp_path, tokens=(192, 17, 16, 192), configs=folder, say=said.append)
    found = msgspec.json.decode(report.read_bytes())
    assert found["summary"] == figures
    assert figures["layer_192_tuned_over_default"] < 1
    assert found["environment"]["accelerator"] == "NVIDIA H200"
    assert found["samples"].keys() == {
        f"{kernel}_at_{n}" for kernel in read_work(tmp_path).calls for n in (16, 17, 192)
    }
    shrink = found["samples"]["shrink_4096_at_192"]
    assert shrink["launched"] == {"every": 9, "active": 4, "specialised": False}
    assert shrink["tuned"] == "m64 n32 k64 warps4 group8 stages4"
    assert "default" in shrink["choosing_us"]
    tuned = json.loads((folder / "NVIDIA_H200_SHRINK.json").read_bytes())
    assert tuned["9"]["1"]["192"]["4096"]["32"]["split_k"] == 1
    assert json.loads((folder / "NVIDIA_H200_EXPAND_TRUE.json").read_bytes())["9"]["3"]["16"]["32"]["4096"] == DEFAULT
    # once for batches of a multiple of 16, once for the others; vLLM's own may differ by batch
    assert {job[3] for job in compiled if job[2] is not None} == {(16, 17)}
    assert {job[3] for job in compiled if job[2] is None} == {(16, 17, 192)}
    assert said[1] == "A process that compiled has died: what is left is compiled while it is measured"


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"slots": -1}, {"tokens": (16, 0)}, {"tokens": ()}])
def test_numbers_below_one_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="above 0"):
        lora_kernels.run(tmp_path / "report.json", model=tmp_path, **wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    command = ["roost", "loadtest", "lora-kernels", "--model", str(tmp_path), "--json", str(tmp_path / "report.json")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err
        == "error: this measures vLLM's LoRA kernels on a CUDA GPU, and there is no CUDA device here\n"
    )


def test_another_vllm_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("loadtest.lora_kernels.kernels", reason="vLLM's kernels can't be imported")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert lora_kernels._kernels() is kernels
    monkeypatch.setattr(kernels.lora_shrink_op, "_lora_shrink", lambda inputs, output: None)
    with pytest.raises(InvalidRequest, match=r"has not those of vllm 0\.22: too many positional arguments"):
        lora_kernels._kernels()
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", "/somewhere")
    with pytest.raises(InvalidRequest, match="unset it"):
        lora_kernels._kernels()


@pytest.mark.parametrize("kernel", [Kernel("shrink", (96, 96)), Kernel("expand", (128, 32, 32))])
def test_a_batch_calls_the_kernel_as_an_engine_does(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("loadtest.lora_kernels.kernels", reason="vLLM's kernels can't be imported")
    module = kernels._MODULES[kernel.op]

    def product(inputs: Any, weights: Any, output: Any, mapping: Any, *rest: Any) -> None:
        """What the kernel computes, by each token's adapter; wrong where it is configured to be."""
        configuration = module.get_lora_op_configs(kernel.op)
        if configuration.get("block_m") == 128:
            raise RuntimeError("out of resource\nand more")
        off = 1.1 if configuration.get("block_m") == 16 else 1.0
        own = [weight[mapping.long(), 0].float() for weight in weights]
        if kernel.op == "shrink":
            output.copy_(torch.stack([torch.einsum("tk,trk->tr", inputs.float(), one) for one in own]) * off)
        else:
            pieces = [torch.einsum("tr,tnr->tn", one, weight) for one, weight in zip(inputs, own, strict=True)]
            output += torch.cat(pieces, 1) * off

    monkeypatch.setattr(module, f"_lora_{kernel.op}", product)
    asked = module.get_lora_op_configs
    batch = kernels.GpuBatch(kernels.Engine(4, 16, device="cpu"), kernel, tokens=48, adapters=3)
    assert batch.default()["num_warps"] == 4
    assert batch.fault(QUICK) is None
    assert batch.fault(WRONG) == "its output is 0.1 of its size away from the default's"
    assert batch.fault(SLOW) == "out of resource"
    assert module.get_lora_op_configs is asked
