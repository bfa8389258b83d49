"""The driver attached to a server that runs without our plug-in: it is told what such a server can't do."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio

from backends.interface import Health, InstallRefused, Removal
from backends.process import Command, EngineProcess
from backends.vllm.command import command_for
from backends.vllm.driver import VllmBackend
from backends.vllm.terms import ACTIVATION
from tests.backends.support import PROMPT, Caller, installable, tiny_settings, until_dead, until_ready
from tests.models import chat_prompt, make_adapter, make_tiny_base, reference_answer
from wire.outcomes import EngineFailed

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


KEY_VARIABLE = "STOCK_SERVERS_KEY"


class Attached(NamedTuple):
    root: Path
    base: Path
    server: EngineProcess
    backend: VllmBackend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attached(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Attached]:
    root = tmp_path_factory.mktemp("stock")
    base = make_tiny_base(root / "base", arch="llama")
    ours = command_for(tiny_settings(base))
    server = EngineProcess("stock", run_dir=root / "elsewhere", log_dir=root / "log")
    command = Command(ours.argv, {**ours.env, ACTIVATION: None}, token_in=ours.token_in)
    record = server.spawn(command, host="127.0.0.1", port=0)
    os.environ[KEY_VARIABLE] = record.token
    settings = tiny_settings(base, attach=f"127.0.0.1:{record.port}", attach_key_env=KEY_VARIABLE, max_rank=16)
    backend = VllmBackend(settings, run_dir=root / "run", log_dir=root / "log")
    await backend.start()
    try:
        await until_ready(backend)
        yield Attached(root, base, server, backend)
    finally:
        await backend.stop()
        server.stop(grace_s=5)
        del os.environ[KEY_VARIABLE]


async def test_limits_are_the_settings(attached: Attached, caplog: pytest.LogCaptureFixture) -> None:
    limits = await attached.backend.limits()
    assert (limits.slots, limits.max_rank, limits.removes_for_real) == (2, 16, False)
    assert not limits.serves_base
    assert "requests of the base are not sent there" in caplog.text


async def test_whoever_runs_it_may_have_the_base_asked_for_all_the_same(attached: Attached) -> None:
    settings = msgspec.structs.replace(attached.backend.settings, serve_base_unsafely=True)
    backend = VllmBackend(settings, run_dir=attached.root / "run", log_dir=attached.root / "log")
    await backend.start()
    await until_ready(backend, 10)
    assert (await backend.limits()).serves_base
    await backend.detach()


async def test_its_key_is_what_lets_us_in(attached: Attached) -> None:
    settings = msgspec.structs.replace(attached.backend.settings, attach_key_env="")
    backend = VllmBackend(settings, run_dir=attached.root / "run", log_dir=attached.root / "log")
    await backend.start()
    await until_ready(backend, 10)
    with pytest.raises(EngineFailed, match="401"):
        await backend.limits()
    await backend.detach()


async def test_a_removal_only_forgets(attached: Attached) -> None:
    backend, base = attached.backend, attached.base
    caller = Caller(backend, base)
    folder = make_adapter(attached.root / "adapter", base, rslora=True, rank_pattern={"q_proj": 2})
    adapter = installable(folder, base)
    await backend.install(adapter, 30)
    expected = reference_answer(base, folder, chat_prompt(base, PROMPT), 24)
    assert await caller.complete(adapter.adapter) == (200, expected)
    assert await backend.remove(adapter.adapter, 10) is Removal.FORGOTTEN
    assert await backend.installed() == frozenset()
    assert (await caller.complete(adapter.adapter))[0] == 404
    assert await backend.remove(adapter.adapter, 10) is Removal.ABSENT
    written = attached.root / "run" / "adapters" / "tiny" / adapter.adapter
    assert written.is_dir(), "the server may read it again"
    await backend.install(adapter, 30)
    assert await caller.complete(adapter.adapter) == (200, expected)
    await caller.close()


async def test_what_the_server_will_never_load_is_refused(attached: Attached) -> None:
    folder = make_adapter(attached.root / "large", attached.base, rank=16)
    with pytest.raises(InstallRefused, match="max_lora_rank"):
        await attached.backend.install(installable(folder, attached.base), 30)
    assert await attached.backend.health() is Health.READY


async def test_another_base_is_not_taken_for_ours(attached: Attached) -> None:
    settings = msgspec.structs.replace(attached.backend.settings, base="other-base")
    backend = VllmBackend(settings, run_dir=attached.root / "run", log_dir=attached.root / "log")
    await backend.start()
    with pytest.raises(EngineFailed, match="serves tiny-base, not other-base"):
        await backend.limits()
    await backend.detach()


async def test_stopping_leaves_an_attached_server_alone_until_it_dies_itself(attached: Attached) -> None:
    await attached.backend.stop()
    assert attached.server.alive
    await attached.backend.start()
    await until_ready(attached.backend, 10)
    attached.server.stop(grace_s=10)
    assert await until_dead(attached.backend) < 5
    shutil.rmtree(attached.root / "run")
