"""Revisions of a real trainer on their way to an engine, through a whole mesh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.backends.fake import serving
from tests.gateway.training.rig import datum
from tests.models import make_tiny_base
from tests.sidecar.fake_engine import FakeVllm
from wire.node import Health
from wire.outcomes import RoostError

from .training_mesh import Client, engine_of, trained

pytestmark = pytest.mark.timeout(280)
TEXT = tuple(range(60, 72))


async def save(client: Client, run: str, turn: int) -> str:
    """Train a step and publish; the sampling session on it."""
    seq = 3 * turn + 1
    await client.train(run, seq, datum(TEXT[:-1], TEXT[1:]))
    await client.result("optim_step", {"model_id": run, "seq_id": seq + 1, "adam_params": {"learning_rate": 0.02}})
    body = {"model_id": run, "seq_id": seq + 2, "sampling_session_seq_id": turn}
    return str((await client.result("save_weights_for_sampler", body))["sampling_session_id"])


async def serves(client: Client, revision: int) -> None:
    """Wait until the node has it in a slot."""
    async with asyncio.timeout(60.0):
        while True:
            shown = await client.show("default/taught/where")
            (found,) = [one for one in shown["revisions"] if one["revision"] == revision]
            if [node["residency"] for node in found["nodes"]] == ["serving"]:
                return
            await asyncio.sleep(0.02)


async def engine_is_up(client: Client) -> None:
    async with asyncio.timeout(120.0):
        while True:
            # nobody answers while the sidecar is started again
            with contextlib.suppress(RoostError):
                if [engine.health for engine in await client.running.mesh.engines()] == [Health.READY]:
                    return
            await asyncio.sleep(0.2)


def log(client: Client, name: str) -> str:
    return (client.running.layout.logs / f"{name}.log").read_text()


async def test_each_revision_of_a_loop_serves_before_it_is_asked_for(tmp_path: Path) -> None:
    base, engine = make_tiny_base(tmp_path / "base"), FakeVllm("tiny")
    async with serving(engine) as port:
        attached = {"base": "tiny", "model_path": str(base), "attach": f"127.0.0.1:{port}"}
        async with trained(tmp_path, base, node={"engines": [attached]}) as client:
            await engine_is_up(client)
            _, run = await client.begin("taught")
            for turn in range(3):
                await save(client, run, turn)
                await serves(client, turn + 1)
            told = log(client, "sidecar")
            assert told.count("INFO sidecar.transitions: pulled ") == 3
            assert "from the store" not in told
            assert len(engine.loads) == 3


@pytest.mark.parametrize("name", ["sidecar", "training"])
async def test_whoever_is_killed_in_the_middle_the_loop_goes_on(tmp_path: Path, name: str) -> None:
    base, engine = make_tiny_base(tmp_path / "base"), FakeVllm("tiny")
    async with serving(engine) as port:
        attached = {"base": "tiny", "model_path": str(base), "attach": f"127.0.0.1:{port}"}
        async with trained(tmp_path, base, node={"engines": [attached]}) as client:
            await engine_is_up(client)
            _, run = await client.begin("taught")
            await save(client, run, 0)
            await serves(client, 1)
            killed: Any = next(child for child in client.running.state.processes if child.name == name).identity
            saving = asyncio.create_task(save(client, run, 1))
            while log(client, "sidecar").count("transitions: pull ") < 2 and not saving.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            os.kill(killed.pid, signal.SIGKILL)
            await saving
            await engine_is_up(client)
            await save(client, run, 2)
            await serves(client, 3)
            shown = await client.show("default/taught")
            assert [one["revision"] for one in shown["revisions"]] == [1, 2, 3]
            store = client.running.layout.store
            assert len([path for path in (store / "blobs").rglob("*") if path.is_file()]) == 3


@pytest.mark.engine
async def test_the_engine_computes_what_was_streamed(tmp_path: Path) -> None:
    base = make_tiny_base(tmp_path / "base")
    async with trained(tmp_path, base, node={"engines": [engine_of(base)]}) as client:
        await engine_is_up(client)
        _, run = await client.begin("taught")
        for turn in range(3):
            sampler = await save(client, run, turn)
            await serves(client, turn + 1)
        asked = {
            "sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt_logprobs": True,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT}]}, "sampling_params": {"max_tokens": 1},
        }  # fmt: skip
        told = (await client.result("asample", asked))["prompt_logprobs"][1:]
        known = await client.train(run, 10, datum(TEXT[:-1], TEXT[1:]), forward_only=True)
        assert told == pytest.approx(known["loss_fn_outputs"][0]["logprobs"]["data"], abs=1e-3)
