from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from loadtest.install import adapters as adapters_module
from loadtest.install.adapters import SCALE, Adapters, map_extent
from loadtest.install.bases import NARROW, Base, slot_rank
from loadtest.install.figures import Gaps, Round, Rounds, intervals_ms, named
from loadtest.install.streaming import TokenStream
from packer.revision import RevisionFile, check_fit


def test_ratios_are_of_the_rounds_that_stood_beside_each_other() -> None:
    ours = [[Round(4, [1, 2, 3, 4], 0.01), Round(4, [1, 2, 3, 5], 0.03)], [Round(4, [9, 9, 9, 9], 0.04)]]
    rounds = Rounds(ours, [Round(4, [100.0] * 4, 2.0), Round(4, [300.0] * 4, 6.0)])
    assert rounds.figures() == {
        "ours_4_p50_ms": 3, "ours_4_p95_ms": 9, "ours_4_total_s": 0.03,
        "stock_4_p50_ms": 100, "stock_4_total_s": 4, "speedup_4": 125,
    }  # fmt: skip


def test_a_stock_round_tells_of_the_smaller_ones() -> None:
    ours = [[Round(n, [1.0] * n, n / 1e3)] for n in (1, 2, 4)]
    rounds = Rounds(ours, [Round(4, [100.0, 100.0, 300.0, 500.0], 1.001)])
    figures = rounds.figures()
    assert [figures[f"stock_{n}_total_s"] for n in (1, 2, 4)] == [0.1, 0.2, 1.001]
    assert [figures[f"stock_{n}_p50_ms"] for n in (1, 2)] == [100, 100]
    assert [figures[f"speedup_{n}"] for n in (1, 2)] == [100, 100]
    assert "stock_4_total_s" not in Rounds(ours, [Round(2, [100.0, 100.0], 0.2)]).figures()


def test_a_way_that_was_not_measured_has_no_figures() -> None:
    rounds = Rounds([[Round(1, [5.0], 0.005)]], [])
    assert rounds.figures() == {"ours_1_p50_ms": 5, "ours_1_p95_ms": 5, "ours_1_total_s": 0.005}
    assert Gaps([10.0, 12.0, 15.0], [18.0, 12.0, 24.0]).figures() == {
        "gap_intervals_quiet": 1.25, "gap_intervals_ours": 2.0, "gap_intervals_ours_p50": 1.5, "interval_ms": 12.0,
    }  # fmt: skip


def test_figures_are_named_for_rank_and_way() -> None:
    assert named({"x": 1}, 1) == {"x": 1}
    assert named({"x": 1}, 16) == {"rank16_x": 1}
    assert named({"x": 1}, 1, "server") == {"server_x": 1}


def test_intervals_lie_between_events() -> None:
    assert intervals_ms([1.0, 1.5, 1.75]) == [500.0, 250.0]
    assert intervals_ms([1.0]) == []


def test_slots_are_as_large_as_engines_make_them() -> None:
    assert [slot_rank(rank) for rank in (1, 8, 9, 32)] == [8, 8, 16, 32]


def test_an_adapter_is_the_same_in_the_arena_and_in_its_folder(tmp_path: Path) -> None:
    base = Base("small", "cpu", NARROW | {"num_hidden_layers": 1, "num_experts": 2})
    with Adapters(tmp_path, base.shape, rank=2, count=2, seed=3) as adapters:
        first, second = adapters.all
        assert [name for name, _ in adapters.named(3)] == ["tenant-0", "tenant-1", "tenant-2"]
        assert adapters.named(3)[2][1] == first
        file = RevisionFile(map_extent(first))
        check_fit(file, base.shape)
        assert file.digest() == first.digest != second.digest
        assert {file.scale(pair) for pair in file.pairs} == {SCALE}
        assert file.data_start == first.data_start
        stored = np.frombuffer(file.tensor("layers.0.experts.down.B"), np.uint16).reshape(2, 64, 2)
        assert _tensor(Path(first.folder), "layers.0.mlp.experts.1.down_proj.lora_B").tolist() == stored[1].tolist()


def test_a_loader_that_takes_no_expression_is_told_names(tmp_path: Path) -> None:
    base = Base("small", "cpu", NARROW | {"num_hidden_layers": 1, "num_experts": 2})
    with Adapters(tmp_path, base.shape, 1, 1, 3, ("q_proj", "down_proj")) as adapters:
        config = json.loads((Path(adapters.all[0].folder) / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "down_proj"]


def _tensor(folder: Path, name: str) -> np.ndarray:
    from packer.peft import open_peft

    peft = open_peft(folder)
    spec = peft.header.tensors[f"base_model.model.model.{name}.weight"]
    start, end = spec.data_offsets
    data = peft.file[peft.header.data_start :]
    return np.frombuffer(data[start:end], np.uint16).reshape(spec.shape)


def test_adapters_that_could_not_be_made_leave_no_memory_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(view: memoryview, folder: Path) -> None:
        folder.mkdir(parents=True)
        raise OSError("no space")

    monkeypatch.setattr(adapters_module, "write_peft", fail)
    base = Base("small", "cpu", NARROW | {"num_hidden_layers": 1, "num_experts": 2})
    adapters = Adapters(tmp_path, base.shape, rank=2, count=2, seed=3)
    with pytest.raises(OSError, match="no space"), adapters:
        raise AssertionError("not made")
    assert not list(Path("/dev/shm").glob(f"*{tmp_path.name}*"))
    assert not list(tmp_path.iterdir())


async def test_a_stream_that_comes_to_a_halt_is_not_waited_for() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(3):
            await response.write(b"data: {}\n\n")
        await asyncio.sleep(60)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with (
        TestServer(app, shutdown_timeout=0.1) as server,
        TokenStream(str(server.make_url("")).rstrip("/"), "", "base", patience_s=0.3) as stream,
    ):
        await stream.more(3)
        with pytest.raises(RuntimeError, match=r"no token for 0\.3 s after the first 3"):
            await stream.more(1)
