"""The driver against a server that answers what it is told to: starts, arenas out of reach, adapters that don't fit."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from aiohttp import web

from backends.interface import Health, Installable, InstallFailed, InstallRefused, Removal
from backends.sglang.driver import SglangBackend
from packer.peft import pack_peft
from tests.backends.fake import Fake, Handler, answer, serving
from tests.backends.support import from_bytes, tiny_settings
from tests.packer.moe import CONFIGS, base, config, folder_of, per_expert
from wire.outcomes import ArtifactUnavailable, EngineFailed

FACTS = {"plugin": 1, "slots": 4, "max_rank": 8, "dtype": "bfloat16", "targets": ["q"], "adapters": {}, "arena": True}


class Routes(Fake):
    """A server of tiny-base whose routes can be replaced one by one; ``paths`` are what loads named."""

    def __init__(self, model_path: Path) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.load: Handler = answer(200, {"success": True})
        self.routes: dict[str, Handler] = {
            "GET /health": answer(200),
            "GET /v1/models": answer(200, {"data": [{"id": "tiny-base"}, {"id": "strange", "parent": "tiny-base"}]}),
            "GET /model_info": answer(200, {"model_path": str(model_path)}),
            "GET /roost/engine": answer(200, FACTS),
            "POST /load_lora_adapter": self._load,
            "POST /unload_lora_adapter": answer(400, {"success": False, "error_message": "x does not exist"}),
        }

    async def dispatch(self, request: web.Request) -> web.StreamResponse:
        return await self.routes[f"{request.method} {request.path}"](request)

    async def _load(self, request: web.Request) -> web.StreamResponse:
        self.paths.append((await request.json())["lora_path"])
        return await self.load(request)


class Setting(NamedTuple):
    routes: Routes
    backend: SglangBackend
    root: Path


def revision_of(tmp_path: Path, name: str, *modules: str) -> Installable:
    """Of the base called ``name``; its bytes lie in an arena, as far as its driver knows."""
    shape = base(name)
    tensors = {key: one for key, one in per_expert(shape).items() if any(f".{module}." in key for module in modules)}
    packed = io.BytesIO()
    about = config(target_modules=[module.rpartition(".")[2] for module in modules])
    facts = pack_peft(folder_of(tmp_path / name, tensors, about), shape, packed)
    there = from_bytes(packed.getvalue(), facts.digest, facts.rank)
    return msgspec.structs.replace(there, segment="roost-x", offset=64)


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3"]))
    routes = Routes(tmp_path)
    async with serving(routes) as port:
        settings = tiny_settings(tmp_path, backend="sglang", attach=f"127.0.0.1:{port}")
        settings = msgspec.structs.replace(settings, model_path="")
        backend = SglangBackend(settings, run_dir=tmp_path / "run", log_dir=tmp_path / "log")
        await backend.start()
        yield Setting(routes, backend, tmp_path)
        await backend.detach()


async def test_a_server_that_warms_up_is_starting_and_one_that_was_well_is_dead(setting: Setting) -> None:
    setting.routes.routes["GET /health"] = answer(503)
    assert await setting.backend.health() is Health.STARTING
    setting.routes.routes["GET /health"] = answer(200)
    assert await setting.backend.health() is Health.READY
    setting.routes.routes["GET /health"] = answer(503)
    assert await setting.backend.health() is Health.DEAD


async def test_a_server_without_adapters_says_how_it_would_take_them(setting: Setting) -> None:
    said = {"success": False, "error_message": "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."}
    setting.routes.routes["POST /unload_lora_adapter"] = answer(400, said)
    with pytest.raises(EngineFailed, match="start it with --enable-lora"):
        await setting.backend.limits()


async def test_an_engine_that_reads_the_arena_is_told_the_extent(setting: Setting, tmp_path: Path) -> None:
    revision = revision_of(tmp_path / "a", "Qwen3", "q_proj")
    await setting.backend.install(revision, 10)
    assert [path.partition("?")[0] for path in setting.routes.paths] == ["roost-arena:///roost-x"]
    assert not (setting.root / "run" / "adapters").exists()


async def test_loads_that_are_asked_for_at_once_reach_it_one_by_one(setting: Setting, tmp_path: Path) -> None:
    under_way = 0

    async def load(_request: web.Request) -> web.StreamResponse:
        nonlocal under_way
        under_way += 1
        await asyncio.sleep(0.02)
        alone = under_way == 1
        under_way -= 1
        return web.json_response({"success": alone}, status=200 if alone else 400)

    setting.routes.load = load
    revision = revision_of(tmp_path / "a", "Qwen3", "q_proj")
    assert (await setting.backend.limits()).calls_at_once == 1
    await asyncio.gather(*(setting.backend.install(revision, 10) for _ in range(3)))
    assert len(setting.routes.paths) == 3


async def test_an_arena_out_of_reach_is_tried_once_and_folders_take_its_place(setting: Setting, tmp_path: Path) -> None:
    revision = revision_of(tmp_path / "a", "Qwen3", "v_proj")

    async def load(request: web.Request) -> web.StreamResponse:
        if (await request.json())["lora_path"].startswith("roost-arena:"):
            return web.json_response({"error_message": "arena out of reach: several workers"}, status=400)
        return web.json_response({"success": True})

    setting.routes.load = load
    await setting.backend.install(revision, 10)
    await setting.backend.install(revision, 10)
    folder = setting.root / "run" / "adapters" / "tiny" / revision.adapter
    assert [path.startswith("roost-arena:") for path in setting.routes.paths] == [True, False, False]
    assert setting.routes.paths[-1] == str(folder)
    # the sizes of q and k come from the base whose place the server told
    assert (folder / "adapter_model.safetensors").stat().st_size > 0
    setting.routes.routes["POST /unload_lora_adapter"] = answer(200, {"success": True})
    assert await setting.backend.remove(revision.adapter, 10) is Removal.REMOVED
    assert not folder.exists()


async def test_what_it_can_not_do_is_refused_with_the_reason_and_never_asked(setting: Setting, tmp_path: Path) -> None:
    with pytest.raises(InstallRefused, match=r"can't change layers\.0\.kv_a") as caught:
        await setting.backend.install(revision_of(tmp_path / "a", "DeepSeek-V3", "kv_a_proj_with_mqa"), 10)
    assert caught.value.field == "layers.0.kv_a"
    damaged = from_bytes(b"no revision at all", "0" * 64, 4)
    with pytest.raises(InstallRefused, match="safetensors"):
        await setting.backend.install(damaged, 10)
    assert setting.routes.paths == []


@pytest.mark.parametrize(
    ("name", "taken", "not_taken", "max_rank"),
    [
        ("Qwen3", {"q", "k", "v", "o", "gate", "up", "down"}, {"experts.gate"}, 8),
        ("Qwen3-MoE", {"q", "experts.gate", "experts.gate_up", "experts.down"}, {"gate", "down", "router"}, 8),
        ("DeepSeek-V3", {"o", "experts.up"}, {"kv_a", "q_b", "shared.gate", "eh", "down"}, 8),
        ("gpt-oss", set(), {"q", "experts.gate"}, 0),
    ],
)
async def test_what_it_can_not_do_is_in_its_limits_so_that_nobody_asks(
    setting: Setting, name: str, taken: set[str], not_taken: set[str], max_rank: int
) -> None:
    (setting.root / "config.json").write_text(json.dumps(CONFIGS[name]))
    limits = await setting.backend.limits()
    assert taken <= set(limits.targets)
    assert not not_taken & set(limits.targets)
    assert limits.max_rank == max_rank
    assert await setting.backend.health() is Health.READY
    assert ("takes no adapters of this base" in setting.backend.detail) is (max_rank == 0)


async def test_bytes_that_were_given_away_meanwhile_are_a_failure_and_no_uncertainty(setting: Setting) -> None:
    def view() -> memoryview:
        raise ArtifactUnavailable("extent 7 of the arena was given away")

    with pytest.raises(InstallFailed, match="given away"):
        await setting.backend.install(msgspec.structs.replace(from_bytes(b"", "0" * 64, 4), view=view), 10)
    assert setting.routes.paths == []


@pytest.mark.parametrize("facts", [{"nothing": 1}, "text"])
async def test_facts_that_are_none_are_an_engine_failure(setting: Setting, facts: Any) -> None:
    setting.routes.routes["GET /roost/engine"] = answer(200, facts)
    with pytest.raises(InstallFailed, match="not what was expected"):
        await setting.backend.install(from_bytes(b"", "0" * 64, 4), 10)
