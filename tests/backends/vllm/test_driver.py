from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from aiohttp import web

from backends import engine_server, extent_path, folders
from backends.extent_path import is_extent
from backends.interface import Health, Installable, InstallFailed, InstallRefused, InstallUncertain, Removal
from backends.registry import make_backend
from backends.vllm.driver import VllmBackend
from backends.vllm.terms import OUT_OF_REACH
from tests.backends.fake import Fake, Handler, answer, serving, silence, vllm_error
from tests.backends.support import from_bytes, installable, tiny_settings
from tests.models import make_adapter, make_tiny_base
from wire.outcomes import EngineFailed, InvalidRequest


class Routes(Fake):
    """A server of tiny-base whose routes can be replaced one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: dict[str, Handler] = {
            "GET /health": answer(200),
            "GET /v1/models": answer(200, {"data": [{"id": "tiny-base"}, {"id": "strange", "parent": "tiny-base"}]}),
            "GET /v1/load_lora_adapter": answer(405),
            "GET /roost/engine": answer(
                200,
                {"plugin": 1, "slots": 4, "max_rank": 8, "dtype": "bfloat16", "targets": ["q", "v"], "adapters": {}},
            ),
            "POST /v1/load_lora_adapter": answer(200, {}),
            "POST /v1/unload_lora_adapter": answer(200, {}),
        }

    async def dispatch(self, request: web.Request) -> web.StreamResponse:
        return await self.routes[f"{request.method} {request.path}"](request)


class Setting(NamedTuple):
    routes: Routes
    backend: VllmBackend
    revision: Installable
    folder: Path


@pytest.fixture(scope="module")
def revision(tmp_path_factory: pytest.TempPathFactory) -> Installable:
    root = tmp_path_factory.mktemp("revision")
    base = make_tiny_base(root / "base")
    return installable(make_adapter(root / "adapter", base), base)


@pytest.fixture
async def setting(tmp_path: Path, revision: Installable) -> AsyncIterator[Setting]:
    routes = Routes()
    async with serving(routes) as port:
        settings = tiny_settings(tmp_path, attach=f"127.0.0.1:{port}")
        backend = VllmBackend(settings, run_dir=tmp_path / "run", log_dir=tmp_path / "log")
        await backend.start()
        yield Setting(routes, backend, revision, tmp_path / "run" / "adapters" / "tiny" / revision.adapter)
        await backend.detach()


@pytest.mark.parametrize("address", ["nowhere", ":80", "host:", "host:0", "host:65536", "host:x"])
def test_an_address_that_is_none_is_named(tmp_path: Path, address: str) -> None:
    with pytest.raises(InvalidRequest, match="is not HOST:PORT"):
        VllmBackend(tiny_settings(tmp_path, attach=address), run_dir=tmp_path, log_dir=tmp_path)


def test_backends_are_made_by_name(tmp_path: Path) -> None:
    made = make_backend(tiny_settings(tmp_path), run_dir=tmp_path, log_dir=tmp_path)
    assert isinstance(made, VllmBackend)
    with pytest.raises(InvalidRequest, match="no backend 'sgling'"):
        make_backend(tiny_settings(tmp_path, backend="sgling"), run_dir=tmp_path, log_dir=tmp_path)
    with pytest.raises(InvalidRequest, match=r"engine '\.\./x'"):
        make_backend(tiny_settings(tmp_path, name="../x"), run_dir=tmp_path, log_dir=tmp_path)


async def test_a_server_that_never_comes_is_dead_in_the_end(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, attach="127.0.0.1:9", start_timeout_s=0.3)
    backend = VllmBackend(settings, run_dir=tmp_path, log_dir=tmp_path)
    with pytest.raises(EngineFailed, match="was not started"):
        await backend.installed()
    await backend.start()
    assert await backend.health() is Health.STARTING
    await asyncio.sleep(0.4)
    assert await backend.health() is Health.DEAD
    assert "nobody answers" in backend.detail
    await backend.stop()


async def test_a_dead_core_makes_the_engine_dead_at_once(setting: Setting) -> None:
    assert await setting.backend.health() is Health.READY
    setting.routes.routes["GET /health"] = answer(503)
    assert await setting.backend.health() is Health.DEAD
    assert "core is gone" in setting.backend.detail


async def test_a_silent_engine_is_given_a_while(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_server, "HEALTH_TIMEOUT_S", 0.05)
    setting.routes.routes["GET /health"] = silence
    assert await setting.backend.health() is Health.STARTING
    setting.routes.routes["GET /health"] = answer(200)
    assert await setting.backend.health() is Health.READY
    setting.routes.routes["GET /health"] = silence
    assert await setting.backend.health() is Health.READY
    monkeypatch.setattr(engine_server, "SILENCE_S", 0.0)
    assert await setting.backend.health() is Health.DEAD
    assert "silent" in setting.backend.detail


async def test_a_server_that_takes_no_adapters_says_how_it_would(setting: Setting) -> None:
    setting.routes.routes["GET /v1/load_lora_adapter"] = answer(404)
    with pytest.raises(EngineFailed, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        await setting.backend.limits()
    with pytest.raises(InstallFailed, match="takes no adapters"):
        await setting.backend.install(setting.revision, 5)


async def test_all_adapters_count_as_installed_and_the_base_does_not(setting: Setting) -> None:
    cards = [{"id": "tiny-base"}, {"id": "strange", "parent": "x"}, {"id": setting.revision.adapter, "parent": "x"}]
    setting.routes.routes["GET /v1/models"] = answer(200, {"data": cards})
    assert await setting.backend.installed() == {"strange", setting.revision.adapter}


async def test_a_running_servers_key_comes_out_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str | None] = []

    class Watched(Routes):
        async def dispatch(self, request: web.Request) -> web.StreamResponse:
            given.append(request.headers.get("Authorization"))
            return await super().dispatch(request)

    async with serving(Watched()) as port:
        settings = tiny_settings(tmp_path, attach=f"127.0.0.1:{port}", attach_key_env="ENGINE_KEY")
        monkeypatch.delenv("ENGINE_KEY", raising=False)
        with pytest.raises(InvalidRequest, match="ENGINE_KEY holds no key"):
            VllmBackend(settings, run_dir=tmp_path, log_dir=tmp_path)
        monkeypatch.setenv("ENGINE_KEY", "its key")
        backend = VllmBackend(settings, run_dir=tmp_path, log_dir=tmp_path)
        await backend.start()
        await backend.limits()
        assert backend.token() == "its key"
        assert set(given) == {"Bearer its key"}
        await backend.detach()


async def test_folders_go_away_off_the_loop(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk must not stop leases from being granted; and the call ends after what it does to the folder."""
    threads: list[threading.Thread] = []
    genuine = shutil.rmtree

    def slow(folder: Path, ignore_errors: bool = False) -> None:
        threads.append(threading.current_thread())
        time.sleep(0.2)
        genuine(folder, ignore_errors=ignore_errors)

    await setting.backend.install(setting.revision, 5)
    monkeypatch.setattr(folders.shutil, "rmtree", slow)
    removing = asyncio.create_task(setting.backend.remove(setting.revision.adapter, 5))
    while not threads:
        await asyncio.sleep(0.01)
        assert not removing.done()
    removing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert not setting.folder.exists(), "nothing is deleted under the hands of the next call"
    assert threading.main_thread() not in threads


async def test_the_folder_stays_while_the_engine_may_read_it(setting: Setting) -> None:
    routes, backend, revision, folder = setting
    await backend.install(revision, 5)
    assert (folder / "adapter_model.safetensors").exists()
    routes.routes["POST /v1/unload_lora_adapter"] = answer(409, {})
    assert await backend.remove(revision.adapter, 5) is Removal.BUSY
    assert folder.exists()
    routes.routes["POST /v1/unload_lora_adapter"] = answer(200, {})
    assert await backend.remove(revision.adapter, 5) is Removal.REMOVED
    assert not folder.exists()


async def test_an_uncertain_load_keeps_its_folder_and_a_failed_one_does_not(setting: Setting) -> None:
    routes, backend, revision, folder = setting
    routes.routes["POST /v1/load_lora_adapter"] = silence
    with pytest.raises(InstallUncertain):
        await backend.install(revision, 0.3)
    assert folder.exists()
    for handler, error in ((vllm_error(503, "later"), InstallFailed), (vllm_error(400, "never"), InstallRefused)):
        routes.routes["POST /v1/load_lora_adapter"] = handler
        with pytest.raises(error):
            await backend.install(revision, 5)
        assert not folder.exists()


class Slow:
    """A route that takes ``seconds``, and knows the most calls that it had at once."""

    def __init__(self, seconds: float) -> None:
        self.most = 0
        self._seconds = seconds
        self._running = 0

    async def __call__(self, _: web.Request) -> web.StreamResponse:
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(self._seconds)
        self._running -= 1
        return web.json_response({})


async def test_loads_go_one_at_a_time_and_waiting_is_bounded(setting: Setting) -> None:
    loads = setting.routes.routes["POST /v1/load_lora_adapter"] = Slow(0.3)
    first = asyncio.create_task(setting.backend.install(setting.revision, 5))
    second = asyncio.create_task(setting.backend.install(setting.revision, 5))
    await asyncio.sleep(0.05)
    with pytest.raises(InstallFailed, match="other loads"):
        await setting.backend.install(setting.revision, 0.05)
    await asyncio.gather(first, second)
    assert loads.most == 1


async def test_bytes_that_are_no_revision_are_refused(setting: Setting) -> None:
    with pytest.raises(InstallRefused):
        await setting.backend.install(from_bytes(b"garbage", "0" * 64, 4), 5)


async def test_a_disk_that_can_not_be_written_is_no_fault_of_the_adapter(setting: Setting) -> None:
    setting.folder.parent.parent.mkdir(parents=True)
    setting.folder.parent.write_text("a file where the folder should be")
    with pytest.raises(InstallFailed):
        await setting.backend.install(setting.revision, 5)


async def test_a_cancelled_install_reads_nothing_afterwards(setting: Setting) -> None:
    """The extent may be given away as soon as the call has ended."""
    reading = asyncio.Event()
    loop = asyncio.get_running_loop()
    released = False

    def view() -> memoryview:
        loop.call_soon_threadsafe(reading.set)
        data = setting.revision.view()
        assert not released
        return data

    revision = Installable(
        adapter=setting.revision.adapter, digest=setting.revision.digest, rank=4, segment="", offset=0,
        length=setting.revision.length, generation=1, view=view,
    )  # fmt: skip
    install = asyncio.create_task(setting.backend.install(revision, 5))
    await reading.wait()
    install.cancel()
    with pytest.raises(asyncio.CancelledError):
        await install
    released = True
    assert (setting.folder / "adapter_config.json").exists()


class Loads:
    """Notes the path of each load and answers by it, where extents are out of reach once ``at_once`` were asked for."""

    def __init__(self, out_of_reach: bool = False, at_once: int = 1) -> None:
        self.paths: list[str] = []
        self._out_of_reach = out_of_reach
        self._extents = asyncio.Barrier(at_once)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.paths.append((await request.json())["lora_path"])
        if self._out_of_reach and is_extent(self.paths[-1]):
            await self._extents.wait()
            return await vllm_error(500, f"Call failed: {OUT_OF_REACH}segment roost-x: No such file")(request)
        return web.json_response({})


ARENA_FACTS = {
    "plugin": 2, "slots": 4, "max_rank": 8, "dtype": "bfloat16", "targets": ["q"], "adapters": {}, "arena": True,
}  # fmt: skip


async def test_an_engine_that_reads_the_arena_is_told_the_extent_and_no_folder_is_written(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    loads = Loads()
    setting.routes.routes |= {"GET /roost/engine": answer(200, ARENA_FACTS), "POST /v1/load_lora_adapter": loads}
    revision = msgspec.structs.replace(setting.revision, segment="roost-x", offset=4160, generation=3)
    await setting.backend.install(revision, 5)
    (path,) = loads.paths
    extent = extent_path.parse(path)
    assert (extent.segment, extent.offset, extent.generation) == ("roost-x", 4160, 3)
    assert (extent.length, extent.digest) == (revision.length, revision.digest)
    assert not setting.folder.parent.exists()
    assert "adapters are written to folders" not in caplog.text
    assert await setting.backend.remove(revision.adapter, 5) is Removal.REMOVED


async def test_an_engine_that_does_not_read_the_arena_gets_folders_and_one_warning(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    loads = Loads()
    setting.routes.routes["POST /v1/load_lora_adapter"] = loads
    revision = msgspec.structs.replace(setting.revision, segment="roost-x", offset=4160)
    for _ in range(2):
        await setting.backend.install(revision, 5)
    assert loads.paths == [str(setting.folder)] * 2
    assert setting.folder.is_dir()
    assert caplog.text.count("adapters are written to folders") == 1
    assert await setting.backend.health() is Health.READY
    assert "adapters are written to folders" in setting.backend.detail, "operators see it in the status"


async def test_an_arena_out_of_the_engines_reach_is_tried_once(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    loads = Loads(out_of_reach=True)
    setting.routes.routes |= {"GET /roost/engine": answer(200, ARENA_FACTS), "POST /v1/load_lora_adapter": loads}
    revision = msgspec.structs.replace(setting.revision, segment="roost-x", offset=4160)
    for _ in range(2):
        await setting.backend.install(revision, 5)
    assert [is_extent(path) for path in loads.paths] == [True, False, False]
    assert caplog.text.count("adapters are written to folders") == 1
    assert "No such file" in caplog.text


@pytest.mark.parametrize(("plugin", "at_once"), [(2, 1), (3, 16)])
async def test_many_loads_are_under_way_only_where_the_engine_lets_steps_run_between(
    setting: Setting, plugin: int, at_once: int
) -> None:
    loads = Slow(0.05)
    setting.routes.routes |= {
        "GET /roost/engine": answer(200, ARENA_FACTS | {"plugin": plugin}), "POST /v1/load_lora_adapter": loads,
    }  # fmt: skip
    assert (await setting.backend.limits()).calls_at_once == at_once
    revision = msgspec.structs.replace(setting.revision, segment="roost-x", offset=4160)
    await asyncio.gather(*(setting.backend.install(revision, 5) for _ in range(4)))
    assert loads.most == min(4, at_once)


async def test_folders_are_written_for_one_load_at_a_time_even_where_many_were_under_way(setting: Setting) -> None:
    loads = Loads(out_of_reach=True, at_once=3)
    facts = answer(200, ARENA_FACTS | {"plugin": 3})
    setting.routes.routes |= {"GET /roost/engine": facts, "POST /v1/load_lora_adapter": loads}
    revision = msgspec.structs.replace(setting.revision, segment="roost-x", offset=4160)
    await asyncio.gather(*(setting.backend.install(revision, 60) for _ in range(3)))
    assert loads.paths[3:] == [str(setting.folder)] * 3
