"""What was acknowledged survives the service, once and in order, however it ended."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.training.settings import TrainingSettings
from tests.gateway.fleet_states import BASE
from tests.gateway.mesh import until
from tests.gateway.stub_engine import never_answer

from .rig import Rig, datum


@pytest.fixture(params=["lmdb", "postgres"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    """Over a journal in the one place or the other."""
    async with Rig(tmp_path, journal=journal_of(request, request.param)) as rig:
        yield rig


def journal_of(request: pytest.FixtureRequest, kind: str) -> str:
    """The address of a new journal, where it has one."""
    return "" if kind == "lmdb" else request.getfixturevalue("postgres").database()


async def test_operations_under_way_are_gone_on_with(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    trained = [await rig.train(run, seq) for seq in (1, 2)]
    for accepted in trained:
        await rig.result(accepted)
    rig.trainer.seconds[run] = 0.2
    late = [await rig.train(run, 3), await rig.step(run, 4)]
    await rig.crash()
    await rig.restart()
    for accepted in (*trained, *late):
        assert "metrics" in await rig.result(accepted)
    assert [number for _, _, number in rig.trainer.log] == [1, 2, 3, 4]


async def test_a_change_that_the_trainer_has_made_is_not_made_again(rig: Rig) -> None:
    """Its snapshot has change 3, whose result the journal does not have."""
    run = await rig.run(await rig.session())
    for seq in (1, 2):
        await rig.result(await rig.train(run, seq))
    commit = rig.service._store.commit
    written = asyncio.Event()

    async def never(change: Any) -> Any:
        if "resolve" in change.__qualname__:
            written.set()
            await asyncio.Event().wait()
        return await commit(change)

    rig.service._store.commit = never  # type: ignore[method-assign]
    third = await rig.train(run, 3)
    await asyncio.wait_for(written.wait(), 10)
    assert rig.trainer.log[-1] == (run, "forward_backward", 3)
    await rig.crash()
    await rig.restart()
    assert (await rig.result(third))["metrics"]["loss:sum"] == pytest.approx(3.9)
    assert rig.trainer.log == []
    stepped = await rig.result(await rig.step(run, 4))
    assert stepped["metrics"]["grad_norm:mean"] == pytest.approx(3 * 3**0.5)


async def test_samples_under_way_are_asked_for_again(rig: Rig) -> None:
    session = await rig.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    name = (await rig.ask("create_sampling_session", body)).json["sampling_session_id"]
    rig.mesh.engine.scripts.append(never_answer)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    asked = {"sampling_session_id": name, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    accepted = await rig.ask("asample", asked)
    await until(lambda: bool(rig.mesh.engine.asked))
    await rig.crash()
    await rig.restart()
    assert len((await rig.result(accepted))["sequences"][0]["tokens"]) == 2
    # and the client that sends it once more gets the same
    assert (await rig.ask("asample", asked)).json == accepted.json


async def test_an_orderly_end_leaves_nothing_to_replay(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    await rig.result(await rig.train(run, 1))
    await rig.end()
    await rig.restart()
    await rig.result(await rig.step(run, 2))
    assert rig.trainer.log == [(run, "optim_step", 2)]


async def test_what_the_trainer_has_on_disk_is_kept_no_longer(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    for seq in range(1, 5):
        await rig.result(await rig.train(run, seq))
    await rig.crash()
    await rig.restart()
    await rig.result(await rig.train(run, 5))
    assert [number for number, _ in rig.service.journal.changes(run, 0)] == [4, 5]


async def test_what_the_trainer_has_on_disk_is_kept_no_longer_while_it_runs(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    for seq in range(1, 9):
        await rig.result(await rig.train(run, seq))
    # its snapshots are of changes 3 and 6
    assert [number for number, _ in rig.service.journal.changes(run, 0)] == [7, 8]
    await rig.crash()
    await rig.restart()
    stepped = await rig.result(await rig.step(run, 9))
    assert stepped["metrics"]["grad_norm:mean"] == pytest.approx(8 * 3**0.5)


async def test_a_run_whose_snapshot_is_lost_fails_and_says_why(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    for seq in range(1, 9):
        await rig.result(await rig.train(run, seq))
    await rig.crash()
    (rig.folder / "trainer" / "snapshots" / run).unlink()
    await rig.restart()
    told = await rig.result(await rig.step(run, 9))
    assert told["category"] == "server"
    assert f"{run} was at change 8, and the trainer's newest snapshot of it is from change 0" in told["error"]
    assert rig.trainer.log == []


async def test_runs_that_were_to_end_end_in_the_next_life(rig: Rig) -> None:
    session = await rig.session()
    run = await rig.run(session)
    rig.trainer.seconds[run] = 0.5
    late = await rig.train(run, 1)
    await rig.ask(f"sessions/{session}/finish", {"reason": {"type": "errored"}})
    await rig.crash()
    await rig.restart()
    assert "metrics" in await rig.result(late)
    await until(lambda: rig.trainer.removed == [run])


async def test_a_dead_trainer_fails_nothing_that_was_acknowledged(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    await rig.result(await rig.train(run, 1))
    rig.trainer.detail = "no ranks"
    late = await rig.step(run, 2)
    assert await asyncio.wait_for(rig.service.died(), 10) == "the trainer is dead: no ranks"
    await rig.crash()
    await rig.restart()
    assert (await rig.result(late))["metrics"]["step:max"] == 1


class Process:
    """The service as a process of its own, that can be killed."""

    def __init__(self, rig: Rig) -> None:
        self._file = rig.folder / "training.json"
        settings: TrainingSettings = rig.settings()
        self._file.write_bytes(msgspec.json.encode(settings))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.gateway.training.process", "--settings", self._file,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert await asyncio.wait_for(self._process.stdout.readline(), 60) == b"ready\n"

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()


async def ask(rig: Rig, path: str, body: Any, *, done: int = 200) -> Any:
    """As an SDK does: again until it is answered."""
    async with asyncio.timeout(60):
        while True:
            told = await rig.ask(path, body)
            if told.status == done:
                return told.json
            assert told.status in (408, 502, 503), told.body
            await asyncio.sleep(0.02)


async def train_and_publish(rig: Rig, turns: int) -> list[Any]:
    """The results of a run that trains, saves and publishes, all of them asked for as an SDK does."""
    session = (await ask(rig, "create_session", {}))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4, "seed": 1}}
    made = await ask(rig, "create_model", body)
    run = made["model_id"]
    results = []
    for turn in range(turns):
        seq = turn * 4
        data = {"data": [datum((turn, 2), (turn + 1, 3))], "loss_fn": "cross_entropy"}
        adam = {"learning_rate": 0.1, "beta1": 0.5}
        accepted = [
            await ask(rig, path, {"model_id": run, "seq_id": seq + place} | more)
            for place, path, more in (
                (2, "forward_backward", {"forward_backward_input": data}),
                (1, "forward_backward", {"forward_backward_input": data}),
                (3, "optim_step", {"adam_params": adam}),
                (4, "save_weights_for_sampler", {"path": f"turn-{turn}"}),
            )
        ]
        for each in accepted:
            result = await ask(rig, "retrieve_future", {"request_id": each["request_id"]})
            results.append(msgspec.json.encode(result).replace(session.encode(), b"S"))
    return results


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["lmdb", "postgres"])
async def test_kills_at_random_points_lose_nothing_and_do_nothing_twice(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, count: int
) -> None:
    """Results and revisions are those of a life without them."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with Rig(tmp_path / "a") as calm:
        expected = await train_and_publish(calm, 4 * count)
        digests = published(calm)
    async with Rig(tmp_path / "b", journal=journal_of(request, kind)) as rig:
        await rig.end()
        process = Process(rig)
        await process.start()
        training = asyncio.create_task(train_and_publish(rig, 4 * count))
        chance = random.Random(6)
        kills = 0
        while kills < count and not training.done():
            await asyncio.sleep(chance.uniform(0.05, 0.4))
            await process.kill()
            kills += 1
            await process.start()
        try:
            assert await training == expected
        finally:
            await process.kill()
        assert kills == count
        assert published(rig) == digests


def published(rig: Rig) -> list[str]:
    """The digests of the one policy's revisions."""
    (policy,) = rig.mesh.catalog.view.policies()
    return [revision.artifact.digest for revision in rig.mesh.catalog.view.revisions(policy.policy)]
