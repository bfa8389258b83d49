"""A stock server that we attach to: what reaches it is only what it answers rightly, and it stays up.

Some of these ask the server what the driver never would, to show what the driver is there for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from backends.interface import EngineSettings, Health, InstallRefused, Removal
from backends.process import Command, EngineProcess
from backends.registry import make_backend
from backends.sglang.command import command_for
from backends.terms import ACTIVATION
from tests.backends.support import PROMPT, EngineStage, installable, tiny_settings
from tests.models import chat_prompt, make_adapter, make_tiny_base, reference_answer
from wire.outcomes import EngineFailed

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

CASES = {
    "rsLoRA": {"rslora": True},
    "ranks that differ": {"rank_pattern": {"o_proj": 2, "q_proj": 8}},
    "alphas that differ": {"alpha_pattern": {"v_proj": 3.0}, "rslora": True},
    "k without q and v": {"targets": ("k_proj",)},
    "v without k": {"targets": ("q_proj", "v_proj")},
    "up without gate": {"targets": ("up_proj", "down_proj")},
}


class Attached(EngineStage):
    """``server`` is somebody else's: it runs without our additions, on CPU by the same stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = make_tiny_base(root / "base", arch="llama")
        ours = command_for(tiny_settings(self.base, backend="sglang"))
        self.server = EngineProcess("stock", run_dir=root / "elsewhere", log_dir=root / "log")
        record = self.server.spawn(Command(ours.argv, {**ours.env, ACTIVATION: None}), host="127.0.0.1", port=0)
        self.backend = make_backend(self.settings(record.port), run_dir=root / "run", log_dir=root / "log")

    def settings(self, port: int, **changes: str) -> EngineSettings:
        return tiny_settings(self.base, backend="sglang", attach=f"127.0.0.1:{port}", **changes)

    def folder(self, seed: int) -> Path:
        return make_adapter(self.root / f"adapter-{seed}", self.base, seed=seed)

    def reference(self, folder: Path) -> str:
        return reference_answer(self.base, folder, chat_prompt(self.base, PROMPT), 24)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attached(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Attached]:
    attached = Attached(tmp_path_factory.mktemp("stock"))
    try:
        async with attached.running(480):
            yield attached
    finally:
        attached.server.stop(grace_s=5)


async def test_limits_are_the_settings_and_what_it_can_not_do_is_said(attached: Attached) -> None:
    limits = await attached.backend.limits()
    assert (limits.slots, limits.max_rank, limits.removes_for_real) == (2, 8, False)
    assert await attached.backend.health() is Health.READY
    assert "it evicts by itself" in attached.backend.detail


@pytest.mark.parametrize("case", CASES)
async def test_what_it_would_ignore_or_break_on_is_rewritten(attached: Attached, case: str) -> None:
    folder = make_adapter(attached.root / case.replace(" ", "-"), attached.base, **CASES[case])  # type: ignore[arg-type]
    adapter = installable(folder, attached.base)
    async with attached.called() as caller:
        await attached.backend.install(adapter, 60)
        assert await caller.complete(adapter.adapter) == (200, attached.reference(folder))
        assert await attached.backend.remove(adapter.adapter, 10) is Removal.REMOVED
    assert await attached.backend.health() is Health.READY


async def test_without_rewriting_it_answers_wrongly(attached: Attached) -> None:
    folder = make_adapter(attached.root / "as-it-came", attached.base, rslora=True)
    async with attached.called() as caller:
        await caller.post("/load_lora_adapter", {"lora_name": "as-it-came", "lora_path": str(folder)})
        status, answer = await caller.complete("as-it-came")
        assert status == 200
        assert answer != attached.reference(folder)
        await caller.post("/unload_lora_adapter", {"lora_name": "as-it-came"})


async def test_a_removal_revokes_though_it_remembers_the_path(attached: Attached) -> None:
    adapter = installable(attached.folder(1), attached.base)
    async with attached.called() as caller:
        await attached.backend.install(adapter, 60)
        expected = (200, attached.reference(attached.folder(1)))
        assert await caller.complete(adapter.adapter) == expected
        assert await attached.backend.remove(adapter.adapter, 10) is Removal.REMOVED
        assert (await caller.complete(adapter.adapter))[0] == 400
        assert await attached.backend.remove(adapter.adapter, 10) is Removal.ABSENT
        await attached.backend.install(adapter, 60)
        assert await caller.complete(adapter.adapter) == expected
    assert await attached.backend.health() is Health.READY


async def test_our_name_of_an_adapter_never_reaches_the_base(attached: Attached) -> None:
    async with attached.called() as caller:
        # what a client could ask it for by itself
        status, _ = await caller.post("/v1/completions", {"model": "anything", "prompt": PROMPT, "max_tokens": 4})
        assert status == 200
        status, told = await caller.complete("acme@" + "0" * 64)
        assert status == 400
        assert "never been loaded" in told


async def test_a_rank_above_its_own_is_refused_before_it_is_asked(attached: Attached) -> None:
    folder = make_adapter(attached.root / "large", attached.base, rank=16)
    with pytest.raises(InstallRefused, match="rank 16 is above"):
        await attached.backend.install(installable(folder, attached.base), 30)


async def test_another_base_is_not_taken_for_ours(attached: Attached) -> None:
    port = attached.backend.address()[1]
    backend = make_backend(
        attached.settings(port, base="other-base"), run_dir=attached.root / "run", log_dir=attached.root / "log"
    )
    await backend.start()
    with pytest.raises(EngineFailed, match="serves tiny-base, not other-base"):
        await backend.limits()
    await backend.detach()
