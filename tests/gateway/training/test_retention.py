"""Which revisions are kept because somebody samples from them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.training import publishing
from tests.gateway.mesh import Told, until
from wire.events import RecordKind, Retention
from wire.registrar import PruneRevisions, SetRetention

from .rig import Rig

POLICY = "acme/taught"


def kept(rig: Rig) -> dict[str, int]:
    """The revision that each sampling session keeps, by the session's own number."""
    found = (each.record for each in rig.mesh.catalog.view.retained(POLICY))
    return {record.uri.rpartition(":")[2]: record.revision for record in found if record.kind is RecordKind.ROLLOUT}


async def keeps(rig: Rig, revisions: dict[str, int]) -> None:
    await until(lambda: kept(rig) == revisions)


def prune(rig: Rig) -> list[int]:
    """Retire what may be; the revisions that are left."""
    rig.mesh.catalog.run(SetRetention(policy=POLICY, retention=Retention(keep_last=1)))
    rig.mesh.catalog.run(PruneRevisions(policy=POLICY))
    return [each.revision for each in rig.mesh.catalog.view.revisions(POLICY) if not each.retired_ms]


async def save(rig: Rig, run: str, seq: int, **fields: Any) -> Any:
    await rig.result(await rig.step(run, seq - 1))
    given = {"model_id": run, "seq_id": seq, **fields}
    return await rig.result(await rig.ask("save_weights_for_sampler", given))


async def sampler(rig: Rig, session: str, path: str) -> Told:
    """A sampling session on what was saved; its number is 5."""
    new = {"session_id": session, "sampling_session_seq_id": 5, "model_path": path}
    made = await rig.ask("create_sampling_session", new)
    assert made.status == 200, made.body
    return made


async def finish(rig: Rig, session: str) -> None:
    told = await rig.ask(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    assert told.status == 200, told.body


async def taught(rig: Rig) -> tuple[str, str]:
    """A session, and its run."""
    told = await rig.ask("create_session", {"user_metadata": {"policy": POLICY}})
    session = str(told.json["session_id"])
    return session, await rig.run(session)


async def test_what_is_sampled_from_stays_until_its_client_is_done(tmp_path: Path) -> None:
    async with Rig(tmp_path, tenant="acme") as rig:
        session, run = await taught(rig)
        for number in range(3):
            await rig.result(await rig.train(run, 3 * number + 1))
            await save(rig, run, 3 * number + 3, sampling_session_seq_id=number)
        await keeps(rig, {"0": 1, "1": 2, "2": 3})
        assert prune(rig) == [1, 2, 3]
        await finish(rig, session)
        await keeps(rig, {})
        assert prune(rig) == [3]


async def test_a_session_that_follows_its_run_keeps_the_newest_alone(tmp_path: Path) -> None:
    async with Rig(tmp_path, tenant="acme") as rig:
        _, run = await taught(rig)
        for number in range(2):
            await rig.result(await rig.train(run, 3 * number + 1))
            await save(rig, run, 3 * number + 3, sampling_session_seq_id=0, kind="inflight")
            await keeps(rig, {"0": number + 1})


async def test_what_nobody_samples_from_is_let_go_of_and_kept_again_when_somebody_does(tmp_path: Path) -> None:
    async with Rig(tmp_path, tenant="acme", sampler_idle_s=0.0) as rig:
        session, run = await taught(rig)
        await rig.result(await rig.train(run, 1))
        await save(rig, run, 3, path="first")
        made = await sampler(rig, session, f"tinker://{run}/sampler_weights/first")
        await keeps(rig, {"5": 1})
        await rig.service._retention.sweep()
        assert kept(rig) == {}
        ask = {
            "sampling_session_id": made.json["sampling_session_id"],
            "seq_id": 0,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 3},
        }
        assert (await rig.result(await rig.ask("asample", ask)))["sequences"]
        await keeps(rig, {"5": 1})


async def test_it_is_kept_over_a_crash_and_let_go_afterwards(tmp_path: Path) -> None:
    async with Rig(tmp_path, tenant="acme") as rig:
        session, run = await taught(rig)
        await rig.result(await rig.train(run, 1))
        await save(rig, run, 3, sampling_session_seq_id=0)
        await keeps(rig, {"0": 1})
        await until(lambda: len(rig.service.journal.held()) == 1)
        await rig.crash()
        await rig.restart()
        await rig.service._retention.sweep()
        assert kept(rig) == {"0": 1}
        await finish(rig, session)
        await keeps(rig, {})


async def saved(rig: Rig) -> tuple[str, str]:
    """A session, and the path of a revision that its run has saved."""
    session, run = await taught(rig)
    await rig.result(await rig.train(run, 1))
    return session, (await save(rig, run, 3, path="first"))["path"]


async def test_nothing_outlives_a_session_that_ends_while_the_catalog_is_told_of_it(tmp_path: Path) -> None:
    async with Rig(tmp_path, tenant="acme") as rig:
        session, path = await saved(rig)
        rig.mesh.stop_registrar()
        await sampler(rig, session, path)
        await until(lambda: len(rig.service.journal.held()) == 1)
        await finish(rig, session)
        rig.mesh.start_registrar()
        await until(lambda: not rig.service.journal.held())
        await asyncio.sleep(1.0)
        assert kept(rig) == {}


@pytest.mark.parametrize("crashes", [False, True])
async def test_what_ended_while_the_catalog_was_away_is_let_go_of_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, crashes: bool
) -> None:
    monkeypatch.setattr(publishing, "_PATIENCE_S", 0.0)
    async with Rig(tmp_path, tenant="acme") as rig:
        session, path = await saved(rig)
        await sampler(rig, session, path)
        await keeps(rig, {"5": 1})
        rig.mesh.stop_registrar()
        await finish(rig, session)
        await until(lambda: "is kept, or let go, later" in caplog.text)
        if crashes:
            await rig.crash()
        rig.mesh.start_registrar()
        if crashes:
            await rig.restart()
        await until_swept(rig, {})
        assert rig.service.journal.held() == []


async def test_what_could_not_be_kept_while_the_catalog_was_away_is_kept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publishing, "_PATIENCE_S", 0.0)
    async with Rig(tmp_path, tenant="acme") as rig:
        session, path = await saved(rig)
        rig.mesh.stop_registrar()
        await sampler(rig, session, path)
        await until(lambda: "is kept, or let go, later" in caplog.text)
        rig.mesh.start_registrar()
        await until_swept(rig, {"5": 1})


async def until_swept(rig: Rig, revisions: dict[str, int]) -> None:
    async with asyncio.timeout(20):
        while kept(rig) != revisions:
            await rig.service._retention.sweep()


async def test_a_session_that_ends_at_once_keeps_nothing(tmp_path: Path) -> None:
    async with Rig(tmp_path, tenant="acme") as rig:
        session, run = await taught(rig)
        await rig.result(await rig.train(run, 1))
        await save(rig, run, 3, sampling_session_seq_id=0)
        await finish(rig, session)
        await asyncio.sleep(1.0)
        assert kept(rig) == {}
