"""Installs through the arena on a real engine: what stock vLLM makes of the same adapter is the bar, bit for bit."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from backends.engine_client import ArenaOutOfReach
from backends.extent_path import ExtentPath
from backends.interface import Health, Installable, InstallFailed, InstallRefused, InstallUncertain, Removal
from backends.procfs import session_members
from backends.vllm.driver import VllmBackend
from tests.backends.support import Caller, EngineStage, SharedArena, tiny_settings
from tests.models import make_adapter, make_tiny_base

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SLOTS = 2
# bf16 can't hold 7/4 times most numbers, nor 3/sqrt(8)
CASES: dict[str, dict[str, Any]] = {
    "rank 1": {"rank": 1, "alpha": 7},
    "rank 4, some targets": {"rank": 4, "alpha": 7, "targets": ("q_proj", "v_proj", "down_proj")},
    "rank 8, rsLoRA": {"rank": 8, "alpha": 3, "rslora": True},
    "one target": {"rank": 8, "alpha": 5, "targets": ("up_proj",)},
    "float32, other ranks and alphas": {
        "rank": 4, "alpha": 8, "rank_pattern": {"q_proj": 2, "down_proj": 7}, "alpha_pattern": {"k_proj": 3},
    },
}  # fmt: skip


class Stage(EngineStage):
    """A running bf16 engine, its driver, an arena, and adapters by seed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = make_tiny_base(root / "base")
        settings = tiny_settings(self.base, dtype="bfloat16", slots=SLOTS)
        self.backend = VllmBackend(settings, run_dir=root / "run", log_dir=root / "log")
        self.arena = SharedArena("backends")

    def folder(self, seed: int, **about: Any) -> Path:
        folder = self.root / f"adapter-{seed}"
        return folder if folder.exists() else make_adapter(folder, self.base, seed=seed, **about)

    def put(self, seed: int, **about: Any) -> Installable:
        return self.arena.put(self.folder(seed, **about), self.base)

    async def install(self, adapter: Installable) -> str:
        await self.backend.install(adapter, 30)
        return adapter.adapter

    @property
    def core(self) -> int:
        assert self.backend.pid is not None
        (core,) = [
            member.pid
            for member in session_members(self.backend.pid)
            if "EngineCore" in Path(f"/proc/{member.pid}/cmdline").read_text(errors="replace")
        ]
        return core

    def mappings(self) -> int:
        """How often the engine has mapped segments of this name, present or past."""
        return Path(f"/proc/{self.core}/maps").read_text().count(self.arena.segment)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("engine"))
    try:
        async with stage.running():
            yield stage
    finally:
        stage.arena.close()


@pytest_asyncio.fixture(loop_scope="module")
async def caller(stage: Stage) -> AsyncIterator[Caller]:
    async with stage.called() as caller:
        yield caller
    assert await stage.backend.health() is Health.READY


def path_of(adapter: Installable, **changes: Any) -> ExtentPath:
    """The extent's path, with some of its fields wrong."""
    path = ExtentPath(adapter.segment, adapter.offset, adapter.length, adapter.generation, adapter.digest)
    return msgspec.structs.replace(path, **changes)


async def test_the_same_bits_as_a_load_from_disk(stage: Stage, caller: Caller) -> None:
    for seed, (case, about) in enumerate(CASES.items(), start=100):
        there = await stage.install(stage.put(seed, **about))
        expected = await caller.probabilities(await stage.load_from_disk(seed))
        assert await caller.probabilities(there) == expected, case
        assert await caller.probabilities("tiny-base") != expected, case
        await stage.empty()
    assert not (stage.root / "run" / "adapters").exists(), "a folder was written"


async def test_nothing_of_a_slots_former_adapter_is_left(stage: Stage, caller: Caller) -> None:
    for seed in (200, 201):
        await stage.install(stage.put(seed, rank=8))
    await stage.empty()
    there = await stage.install(stage.put(202, rank=1, targets=("q_proj", "gate_proj")))
    found = await caller.probabilities(there)
    await stage.empty()
    # the other way round, a load from disk into the same slot
    assert found == await caller.probabilities(await stage.load_from_disk(202))


async def test_an_adapter_outlives_its_extent(stage: Stage, caller: Caller) -> None:
    adapter = stage.put(1)
    there = await stage.install(adapter)
    expected = await caller.probabilities(there)
    stage.arena.give_away(adapter)
    for seed in (2, 3, 4):
        other = await stage.install(stage.put(seed))
        assert await caller.probabilities(there) == expected
        assert await caller.probabilities(other) != expected
        assert await stage.backend.remove(other, 10) is Removal.REMOVED
    assert await stage.backend.remove(there, 10) is Removal.REMOVED
    with pytest.raises(InstallFailed, match="was given away"):
        await stage.install(adapter)
    assert await stage.backend.installed() == frozenset()
    assert await stage.install(stage.put(1)) == there
    assert await caller.probabilities(there) == expected


async def test_adapters_asked_for_at_once_beside_a_stream_are_each_whole(stage: Stage, caller: Caller) -> None:
    adapters = [stage.put(seed) for seed in (10, 11, 12)]
    alone = {}
    for adapter in adapters:
        alone[adapter.adapter] = await caller.probabilities(await stage.install(adapter))
        await stage.empty()
    expected = await caller.stream("tiny-base", 150, asyncio.Event())
    started = asyncio.Event()
    stream = asyncio.create_task(caller.stream("tiny-base", 150, started))
    await started.wait()
    there = await _at_once(stage, adapters)
    assert not stream.done()
    assert len(there) == SLOTS
    for name in there:
        assert await caller.probabilities(name) == alone[name]
    assert await stream == expected


async def _at_once(stage: Stage, adapters: list[Installable]) -> set[str]:
    """Those that found a slot; the others were refused."""
    results = await asyncio.gather(*(stage.install(one) for one in adapters), return_exceptions=True)
    assert all(isinstance(result, str | InstallFailed) for result in results), results
    return {result for result in results if isinstance(result, str)}


async def test_what_is_wrong_with_a_path_is_told_and_costs_no_slot(stage: Stage, caller: Caller) -> None:
    good = await stage.install(stage.put(1))
    expected = await caller.probabilities(good)
    adapter = stage.put(2)
    other = stage.put(3)
    wrong: list[tuple[str, type[Exception], str]] = [
        (str(path_of(adapter, generation=adapter.generation + 1)), InstallFailed, "was given away"),
        (str(path_of(adapter, digest=other.digest)), InstallFailed, "was given away"),
        (str(path_of(adapter, offset=other.offset)), InstallFailed, "was given away"),
        (str(path_of(adapter, length=adapter.length - 4)), InstallFailed, "was given away"),
        (str(path_of(adapter, length=1 << 40)), InstallFailed, "beyond the segment's"),
        (str(path_of(adapter, offset=1 << 62)), InstallFailed, "beyond the segment's"),
        (str(path_of(adapter, offset=0)), InstallRefused, "no room for the extent's record"),
        (str(path_of(adapter, offset=adapter.offset + 4)), InstallRefused, "is not a multiple of 64"),
        (str(path_of(adapter, digest="0")), InstallRefused, "digest '0' is not"),
        (str(path_of(adapter, segment="../etc/passwd")), InstallRefused, "not the name of an arena's segment"),
        (str(path_of(adapter, segment="roost-../../etc/passwd")), InstallRefused, "not the name of an arena's"),
        (str(path_of(adapter, segment="roost-nobodys-0")), ArenaOutOfReach, "No such file"),
        ("roost-arena:///", InstallRefused, "not the name of an arena's segment"),
        (f"{path_of(adapter)}&length=1", InstallRefused, "does not have the fields"),
    ]  # fmt: skip
    for path, error, reason in wrong * 2:
        with pytest.raises(error, match=reason):
            await stage.load("acme@wrong", path)
    assert await stage.backend.installed() == {good}
    assert await caller.probabilities(good) == expected
    assert await stage.install(adapter) in await stage.backend.installed()


async def test_bytes_that_do_not_fit_are_refused_and_cost_no_slot(stage: Stage, caller: Caller, tmp_path: Path) -> None:
    good = await stage.install(stage.put(1))
    expected = await caller.probabilities(good)
    adapter = stage.put(2)
    whole = bytes(adapter.view())
    deeper = make_tiny_base(tmp_path / "deeper", layers=3)
    wider = make_adapter(tmp_path / "wide", stage.base, rank=16, seed=9)
    unfit = [
        stage.arena.put_bytes(b"not a revision", "0" * 64, 4),
        stage.arena.put_bytes(whole[: len(whole) // 2], "1" * 64, 4),
        stage.arena.put_bytes(whole + b"more", "2" * 64, 4),
        stage.arena.put(make_adapter(tmp_path / "deep", deeper, seed=9), deeper),
        msgspec.structs.replace(stage.arena.put(wider, stage.base), rank=8),
    ]
    for adapter in unfit * 2:
        with pytest.raises(InstallRefused):
            await stage.install(adapter)
    assert await stage.backend.installed() == {good}
    assert await caller.probabilities(good) == expected
    assert await stage.install(stage.put(3)) in await stage.backend.installed()
    with pytest.raises(InstallFailed, match="no free slot: 2 of 2"):
        await stage.install(stage.put(4))


async def test_an_adapter_in_use_is_not_removed(stage: Stage, caller: Caller) -> None:
    there = await stage.install(stage.put(1))
    alone = await caller.stream(there, 150, asyncio.Event())
    started = asyncio.Event()
    stream = asyncio.create_task(caller.stream(there, 150, started))
    await started.wait()
    assert await stage.backend.remove(there, 10) is Removal.BUSY
    other = await stage.install(stage.put(2))
    assert await stage.backend.remove(other, 10) is Removal.REMOVED
    assert await stream == alone
    assert await stage.backend.remove(there, 10) is Removal.REMOVED
    assert (await caller.complete(there))[0] == 404


@pytest.mark.parametrize("given_away", [False, True])
async def test_an_install_that_timed_out_ends_late_and_right(stage: Stage, caller: Caller, given_away: bool) -> None:
    adapter = stage.put(1)
    expected = await caller.probabilities(await stage.load_from_disk(1))
    await stage.empty()
    os.kill(stage.core, signal.SIGSTOP)
    try:
        with pytest.raises(InstallUncertain):
            await stage.backend.install(adapter, 0.3)
        if given_away:
            stage.arena.give_away(adapter)
    finally:
        os.kill(stage.core, signal.SIGCONT)
    # calls are answered in order: after this one the load has ended, however it did
    assert (await caller.complete("tiny-base", 1))[0] == 200
    if given_away:
        assert await stage.backend.installed() == frozenset()
        adapter = stage.put(1)
    else:
        await _until_installed(stage, adapter.adapter)
    await stage.backend.install(adapter, 30)
    assert await caller.probabilities(adapter.adapter) == expected
    assert await stage.install(stage.put(2)) in await stage.backend.installed()


async def _until_installed(stage: Stage, adapter: str) -> None:
    begun = time.monotonic()
    while adapter not in await stage.backend.installed():
        assert time.monotonic() - begun < 10
        await asyncio.sleep(0.01)


async def test_installs_one_after_another_beside_a_stream(stage: Stage, caller: Caller) -> None:
    """One slot is kept busy by a stream, the other changes hands all the time."""
    there = await stage.install(stage.put(1))
    alone = await caller.stream(there, 200, asyncio.Event())
    adapters = [stage.put(seed) for seed in range(10, 18)]
    expected = {}
    for adapter in adapters:
        expected[adapter.adapter] = await caller.probabilities(await stage.install(adapter))
        await stage.backend.remove(adapter.adapter, 10)
    started = asyncio.Event()
    stream = asyncio.create_task(caller.stream(there, 200, started))
    await started.wait()
    beside = 0
    for adapter in adapters:
        assert await caller.probabilities(await stage.install(adapter)) == expected[adapter.adapter]
        assert await stage.backend.remove(adapter.adapter, 10) is Removal.REMOVED
        beside += not stream.done()
    assert beside > 1
    assert await stream == alone


async def test_one_slot_takes_one_of_many_at_once(stage: Stage, caller: Caller) -> None:
    there = await stage.install(stage.put(1))
    expected = await caller.probabilities(there)
    adapters = [stage.put(seed) for seed in range(10, 14)]
    found = await _at_once(stage, adapters)
    assert len(found) == 1
    assert await stage.backend.installed() == {there, *found}
    assert await caller.probabilities(there) == expected


async def test_a_sidecars_next_arena_is_mapped_anew(stage: Stage, caller: Caller) -> None:
    adapter = stage.put(1)
    expected = await caller.probabilities(await stage.install(adapter))
    await stage.empty()
    stage.arena.renew()
    with pytest.raises(InstallFailed):
        await stage.install(adapter)
    assert await caller.probabilities(await stage.install(stage.put(1))) == expected
    assert stage.mappings() == 1


async def test_an_engine_that_cannot_map_the_arena_gets_a_folder(
    stage: Stage, caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = [msgspec.structs.replace(stage.put(seed), segment="roost-elsewhere-0") for seed in (1, 2)]
    with caplog.at_level(logging.WARNING):
        for adapter in adapters:
            await stage.install(adapter)
    assert caplog.text.count("adapters are written to folders for it") == 1
    expected = await caller.probabilities(adapters[0].adapter)
    await stage.empty()
    assert await caller.probabilities(await stage.load_from_disk(1)) == expected
