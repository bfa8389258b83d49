"""What has had its time goes, and nothing else does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.training import service
from tests.gateway.mesh import Told, until
from wire.outcomes import JournalUnavailable, Retired

from .rig import Rig


def in_an_hour() -> int:
    return time.time_ns() // 1_000_000 + 3_601_000


async def save(rig: Rig, run: str, seq: int, **more: Any) -> Told:
    """A checkpoint for an hour."""
    return await rig.ask("save_weights", {"model_id": run, "path": "a", "ttl_seconds": 3600, "seq_id": seq} | more)


def folder_of(rig: Rig, run: str) -> Path:
    return rig.folder / "training" / "checkpoints" / run / "a"


def gone(rig: Rig, request_id: str) -> bool:
    """Whether a result was kept long enough."""
    try:
        rig.service.journal.result(request_id)
    except Retired:
        return True
    return False


def retained(rig: Rig, run: str) -> list[str]:
    policy = f"default/run-{run.replace(':train:', '-')}"
    return [each.record.uri for each in rig.mesh.catalog.view.retained(policy)]


async def test_checkpoints_have_names_of_their_own_and_may_expire(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    saved = await rig.result(await save(rig, run, 1))
    assert "is there already" in (await rig.result(await save(rig, run, 2)))["error"]
    assert await rig.result(await save(rig, run, 3, overwrite=True)) == saved
    bad = await rig.result(await save(rig, run, 4, path="../up"))
    assert bad["category"] == "user"
    assert retained(rig, run) == [saved["path"]]
    folder = folder_of(rig, run)
    assert folder.is_dir()
    await rig.service._removal.expire(in_an_hour())
    assert not folder.exists()
    assert retained(rig, run) == []
    assert (await rig.ask("weights_info", {"tinker_path": saved["path"]})).status == 404


async def test_a_checkpoint_stays_whole_while_the_catalog_can_t_be_told_of_its_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.run(await rig.session())
    saved = await rig.result(await save(rig, run, 1))
    folder = folder_of(rig, run)

    async def away(*_: Any) -> None:
        raise JournalUnavailable("the registrar does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(rig.service._removal._publisher, "release", away)
        with pytest.raises(JournalUnavailable):
            await rig.service._removal.expire(in_an_hour())
    assert folder.is_dir()
    assert (await rig.ask("weights_info", {"tinker_path": saved["path"]})).status == 200
    await rig.service._removal.expire(in_an_hour())
    assert not folder.exists()


async def test_a_checkpoint_that_is_written_anew_as_its_time_ends_is_there(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before it is looked for in the middle of writing, and after the bytes are there."""
    run = await rig.run(await rig.session())
    await rig.result(await save(rig, run, 1))
    write, resolve = rig.trainer.save_state, rig.service.journal.resolve

    async def written(*arguments: Any, **more: Any) -> None:
        await rig.service._removal.expire(in_an_hour())
        await write(*arguments, **more)
        await rig.service._removal.expire(in_an_hour())

    async def resolved(*arguments: Any) -> None:
        await rig.service._removal.expire(in_an_hour())
        await resolve(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(rig.trainer, "save_state", written)
        patched.setattr(rig.service.journal, "resolve", resolved)
        anew = await rig.result(await save(rig, run, 2, overwrite=True, ttl_seconds=7200))
    assert retained(rig, run) == [anew["path"]]
    loaded = await rig.ask("load_weights", {"model_id": run, "seq_id": 3, "path": anew["path"], "optimizer": True})
    assert (await rig.result(loaded))["path"] == anew["path"]
    # until the trainer has a snapshot, the run would have to load it again
    await rig.service._removal.expire(in_an_hour() + 3_600_000)
    assert folder_of(rig, run).is_dir()
    for accepted in (await rig.train(run, 4), await rig.step(run, 5)):
        await rig.result(accepted)
    await rig.service._removal.expire(in_an_hour() + 3_600_000)
    assert not folder_of(rig, run).exists()


async def test_a_checkpoint_that_is_asked_for_while_the_one_before_goes_is_there(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.run(await rig.session())
    await rig.result(await save(rig, run, 1))
    release, going, go = rig.service._removal._publisher.release, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any) -> None:
        going.set()
        await go.wait()
        await release(*arguments)

    monkeypatch.setattr(rig.service._removal._publisher, "release", slow)
    expiring = asyncio.create_task(rig.service._removal.expire(in_an_hour()))
    await going.wait()
    accepted = await save(rig, run, 2, overwrite=True)
    await asyncio.sleep(0.1)
    go.set()
    await expiring
    anew = await rig.result(accepted)
    assert retained(rig, run) == [anew["path"]]
    assert folder_of(rig, run).is_dir()


async def test_what_can_t_be_dropped_keeps_nothing_else_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "_SWEEP_S", 0.01)
    async with Rig(tmp_path, keep_results_s=0.0) as rig:
        run = await rig.run(await rig.session())
        failures = iter([ValueError("a folder that is none"), JournalUnavailable("away")])
        expired = asyncio.Event()

        async def expire(now_ms: int) -> None:
            if (failure := next(failures, None)) is not None:
                raise failure
            expired.set()

        monkeypatch.setattr(rig.service._removal, "expire", expire)
        trained = await rig.train(run, 1)
        await asyncio.wait_for(expired.wait(), 20)
        await until(lambda: gone(rig, trained.json["request_id"]))
    assert "a folder that is none" in caplog.text
    assert "old checkpoints can't be dropped: away" in caplog.text
