"""A checkpoint that is removed goes wholly, whatever ends in between, and none goes that somebody needs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fleet_states import BASE
from tests.gateway.mesh import Told
from wire.events import Scope
from wire.outcomes import JournalUnavailable

from .rig import Rig
from .test_expiry import folder_of, in_an_hour, retained, save


async def remove(rig: Rig, run: str, **arguments: Any) -> Told:
    return await rig.mesh.ask("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/a", **arguments)


async def names(rig: Rig, run: str) -> list[str]:
    told = await rig.mesh.ask("GET", f"/api/v1/training_runs/{run}/checkpoints")
    assert told.status == 200, told.body
    return [each["checkpoint_id"] for each in told.json["checkpoints"]]


async def made(rig: Rig, headers: dict[str, str]) -> str:
    """A run of the key's tenant."""
    body = {"session_id": await rig.session(headers=headers), "model_seq_id": 0, "base_model": BASE}
    accepted = await rig.ask("create_model", body | {"lora_config": {"rank": 4}}, headers=headers)
    return str((await rig.result(accepted, headers=headers))["model_id"])


async def load(rig: Rig, run: str, seq: int, of: str) -> Told:
    body = {"model_id": run, "seq_id": seq, "path": f"tinker://{of}/weights/a", "optimizer": True}
    return await rig.ask("load_weights", body)


async def test_one_that_waits_to_be_loaded_stays_until_the_trainer_has_it(rig: Rig) -> None:
    session = await rig.session()
    run, other = await rig.run(session), await rig.run(session, 1)
    await rig.result(await save(rig, run, 1))
    rig.trainer.seconds[other] = 0.2
    loading = await load(rig, other, 1, run)
    for _ in range(2):
        told = await remove(rig, run)
        assert told.status == 400 and f"in use: {other} loads it" in told.json["error"]
        assert "path" in await rig.result(loading)
    assert folder_of(rig, run).is_dir()
    # the third change brings a snapshot
    for accepted in (await rig.train(other, 2), await rig.step(other, 3)):
        await rig.result(accepted)
    assert (await remove(rig, run)).status == 204
    assert not folder_of(rig, run).exists()
    assert "there is no checkpoint" in (await rig.result(await load(rig, other, 4, run)))["error"]


async def test_who_only_says_that_he_loads_another_tenant_s_keeps_it_from_nothing(tmp_path: Path) -> None:
    async with Rig(tmp_path, anonymous=False) as rig:
        mine, theirs = rig.mesh.key("acme"), rig.mesh.key("other")
        runs = [await made(rig, headers) for headers in (mine, theirs)]
        given = {"model_id": runs[0], "path": "a", "seq_id": 1}
        saved = await rig.result(await rig.ask("save_weights", given, headers=mine), headers=mine)
        rig.trainer.seconds[runs[1]] = 0.5
        train = {"model_id": runs[1], "seq_id": 1, "adam_params": {}}
        await rig.ask("optim_step", train, headers=theirs)
        body = {"model_id": runs[1], "seq_id": 2, "path": saved["path"], "optimizer": True}
        assert (await rig.ask("load_weights", body, headers=theirs)).status == 200
        assert (await remove(rig, runs[0], headers=mine)).status == 204


@pytest.mark.parametrize("end", ["release", "bytes_removed"])
async def test_a_life_that_ends_in_the_middle_leaves_nothing_to_see_and_the_next_one_ends_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Before the catalog is told, and after the bytes are gone."""
    run = await rig.run(await rig.session())
    await rig.result(await save(rig, run, 1))
    reached = asyncio.Event()

    async def stuck(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    owner = rig.service._removal._publisher if end == "release" else rig.service.journal
    monkeypatch.setattr(owner, end, stuck)
    removing = asyncio.create_task(remove(rig, run))
    await reached.wait()
    assert await names(rig, run) == []
    assert (await rig.ask("weights_info", {"tinker_path": f"tinker://{run}/weights/a"})).status == 404
    await rig.crash()
    await asyncio.gather(removing, return_exceptions=True)
    await rig.restart()
    assert await names(rig, run) == []
    await rig.service._removal.expire(0)
    assert not folder_of(rig, run).exists() and retained(rig, run) == []
    assert rig.service.journal.due(in_an_hour()) == []
    assert (await remove(rig, run)).status == 204
    # and its name is free
    await rig.result(await save(rig, run, 2))
    assert await names(rig, run) == ["weights/a"]


async def test_it_is_gone_for_its_owner_while_the_catalog_can_t_be_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.run(await rig.session())
    await rig.result(await save(rig, run, 1))

    async def away(*_: Any) -> None:
        raise JournalUnavailable("the registrar does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(rig.service._removal._publisher, "release", away)
        assert (await remove(rig, run)).status == 204
        assert (await remove(rig, run)).status == 204
    assert await names(rig, run) == []
    assert retained(rig, run) != []
    await rig.service._removal.expire(0)
    assert retained(rig, run) == [] and not folder_of(rig, run).exists()


async def test_one_that_is_written_anew_meanwhile_is_the_new_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await rig.run(await rig.session())
    await rig.result(await save(rig, run, 1))
    write = rig.trainer.save_state

    async def written(*arguments: Any, **more: Any) -> None:
        assert (await remove(rig, run)).status == 204
        await write(*arguments, **more)

    monkeypatch.setattr(rig.trainer, "save_state", written)
    anew = await rig.result(await save(rig, run, 2, overwrite=True))
    assert await names(rig, run) == ["weights/a"]
    assert retained(rig, run) == [anew["path"]]
    assert "path" in await rig.result(await load(rig, run, 3, run))


async def test_what_was_removed_is_known_for_a_while(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    await rig.result(await save(rig, run, 1))
    for _ in range(2):
        assert (await remove(rig, run)).status == 204
    await rig.service._removal.expire(in_an_hour() + 60_000)
    assert (await remove(rig, run)).status == 404


async def test_a_key_that_may_only_ask_looks_and_removes_nothing(tmp_path: Path) -> None:
    async with Rig(tmp_path, anonymous=False) as rig:
        owner, reader = rig.mesh.key("acme"), rig.mesh.key("acme", Scope.INVOKE)
        run = await made(rig, owner)
        saving = await rig.ask("save_weights", {"model_id": run, "path": "a", "seq_id": 1}, headers=owner)
        await rig.result(saving, headers=owner)
        told = await rig.mesh.ask("GET", "/api/v1/checkpoints", headers=reader)
        assert [each["checkpoint_id"] for each in told.json["checkpoints"]] == ["weights/a"]
        assert (await remove(rig, run, headers=reader)).status == 403
        assert (await rig.mesh.ask("GET", "/api/v1/training_runs")).status == 401


@pytest.mark.parametrize(
    "query", ["limit=x", "limit=", "limit=1e3", "limit=\u0663", "offset=99999999999", "access_scope=all"]
)
async def test_a_page_that_can_t_be_is_refused(rig: Rig, query: str) -> None:
    for path in ("training_runs", "checkpoints", "sessions"):
        assert (await rig.mesh.ask("GET", f"/api/v1/{path}?{query}")).status == 400
