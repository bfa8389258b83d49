"""A policy has one writer at a time: the run that was begun last, wherever that was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gateway.mesh import Told
from wire.registrar import RenamePolicy

from .rig import Rig

BOT = {"user_metadata": {"policy": "bot"}}


class Elsewhere(Rig):
    """Another training service of the same fleet, asked at its own socket."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.folder, mesh=rig.mesh, state_dir=str(rig.folder / "elsewhere"), name="there")
        self.socket = str(rig.folder / "elsewhere.sock")

    async def ask(self, path: str, body: Any = None, **arguments: Any) -> Told:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(self.socket)) as http,
            http.post(f"http://127.0.0.1/api/v1/{path}", json=body or {}, **arguments) as response,
        ):
            return Told(response.status, {}, await response.read())


@pytest.fixture
async def elsewhere(rig: Rig) -> AsyncIterator[Rig]:
    other = Elsewhere(rig)
    await other.restart()
    yield other
    await other.end()


async def publish(rig: Rig, run: str, seq: int, rate: float = 0.1) -> Any:
    """Train, and save for a sampler under another name each time."""
    await rig.result(await rig.train(run, seq))
    await rig.result(await rig.step(run, seq + 1, rate))
    given = {"model_id": run, "seq_id": seq + 2, "path": f"at-{seq}"}
    return await rig.result(await rig.ask("save_weights_for_sampler", given))


def latest(rig: Rig) -> int:
    policy = rig.mesh.catalog.view.policy("default/bot")
    assert policy is not None
    return policy.latest


async def test_the_newest_run_of_a_policy_writes_it(rig: Rig) -> None:
    session = await rig.session()
    old = await rig.run(session, 0, **BOT)
    new = await rig.run(session, 1, **BOT)
    failed = await publish(rig, old, 1)
    assert failed == {"error": f"default/bot is written by {new} since: {old} can't", "category": "user"}
    assert "path" in await publish(rig, new, 1)
    assert latest(rig) == 1


async def test_a_run_of_another_service_takes_over_and_the_one_before_is_told(rig: Rig, elsewhere: Rig) -> None:
    here = await rig.run(await rig.session(), **BOT)
    assert "path" in await publish(rig, here, 1)
    there = await elsewhere.run(await elsewhere.session(), **BOT)
    assert f"is written by {there} since" in (await publish(rig, here, 4))["error"]
    assert "path" in await publish(elsewhere, there, 1, rate=0.2)
    assert latest(rig) == 2


async def test_a_run_that_was_overtaken_in_the_middle_publishes_nothing(
    rig: Rig, elsewhere: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the writer when it began to export."""
    here = await rig.run(await rig.session(), **BOT)
    export = rig.trainer.export_revision

    async def slow(policy: str, path: Path, **more: Any) -> Any:
        await elsewhere.run(await elsewhere.session(), **BOT)
        return await export(policy, path, **more)

    monkeypatch.setattr(rig.trainer, "export_revision", slow)
    assert "is written by" in (await publish(rig, here, 1))["error"]
    assert latest(rig) == 0


async def test_a_policy_s_former_name_is_no_second_one_to_write_it_by(rig: Rig) -> None:
    session = await rig.session()
    old = await rig.run(session, 0, **BOT)
    rig.mesh.catalog.run(RenamePolicy(policy="default/bot", to="default/robot"))
    new = await rig.run(session, 1, user_metadata={"policy": "robot"})
    assert f"default/robot is written by {new} since" in (await publish(rig, old, 1))["error"]
