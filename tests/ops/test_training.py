"""The training service under the real supervisor, with the real trainer on a tiny base."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backends.process import free_port
from ops.config import check
from ops.layout import Layout
from packer.revision import RevisionFile
from tests.backends.megatron.bases import make_base
from tests.gateway.training.rig import datum

from .test_mesh import PATIENCE_S, Running, finish

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]
TRAINER_S = 120.0


class Client:
    """Speaks the training API with the admin's key, and asks again as SDKs do."""

    def __init__(self, running: Running) -> None:
        self._url = f"{running.mesh.url}/api/v1"
        headers = {"x-api-key": running.layout.admin_key.read_text().strip()}
        self._http = aiohttp.ClientSession(headers=headers)

    async def ask(self, path: str, body: Any) -> Any:
        async with asyncio.timeout(TRAINER_S):
            while True:
                async with self._http.post(f"{self._url}/{path}", json=body) as answer:
                    if answer.status == 200:
                        return await answer.json()
                    assert answer.status in (408, 503), await answer.text()
                await asyncio.sleep(0.1)

    async def result(self, path: str, body: Any) -> Any:
        accepted = await self.ask(path, body)
        told = await self.ask("retrieve_future", {"request_id": accepted["request_id"]})
        assert "error" not in told, told
        return told

    async def close(self) -> None:
        await self._http.close()


async def test_a_run_is_trained_saved_published_and_outlives_its_service(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    base = make_base(tmp_path / "base", "llama")
    config = check(
        {
            "state_dir": str(tmp_path / "state"),
            "gateway": {"port": free_port("127.0.0.1")},
            "training": {"base": "tiny", "trainer": {"model_path": str(base), "device": "cpu", "threads": 1}},
        }
    )
    layout = Layout.of(config.state_dir)
    layout.make()
    running = Running(config, layout)
    await running.until(running.all_ready, PATIENCE_S)
    client = Client(running)
    try:
        session = (await client.ask("create_session", {"user_metadata": {"policy": "taught"}}))["session_id"]
        new = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        lora = {"rank": 4, "seed": 1, "train_mlp": False}
        made = await client.result("create_model", new | {"lora_config": lora})
        run = made["model_id"]
        data = {"data": [datum((1, 2, 3), (2, 3, 4))], "loss_fn": "cross_entropy"}

        def train(seq: int, kind: str = "forward_backward") -> Any:
            field = "forward_input" if kind == "forward" else "forward_backward_input"
            return client.result(kind, {"model_id": run, "seq_id": seq, field: data})

        before = (await train(1))["metrics"]["loss:sum"]
        await client.result("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {"learning_rate": 0.01}})
        saved = await client.result("save_weights", {"model_id": run, "seq_id": 3, "path": "a"})
        after = (await train(4, "forward"))["metrics"]["loss:sum"]
        assert after < before
        await train(5)

        service = next(child for child in running.state.processes if child.name == "training")
        assert service.identity is not None
        os.kill(service.identity.pid, signal.SIGKILL)
        assert (await train(6, "forward"))["metrics"]["loss:sum"] == after
        loaded = {"model_id": run, "seq_id": 7, "path": saved["path"], "optimizer": True}
        await client.result("load_weights", loaded)
        assert (await train(8, "forward"))["metrics"]["loss:sum"] == after
        await client.result("save_weights_for_sampler", {"model_id": run, "seq_id": 9, "path": "first"})
        headers = {"authorization": f"Bearer {layout.admin_key.read_text().strip()}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.get(f"{running.mesh.url}/roost/v1/policies/default/taught") as answer,
        ):
            shown = await answer.json()
        assert [each["uri"] for each in shown["checkpoints"]] == [saved["path"]]
        (revision,) = shown["revisions"]
        assert revision["provenance"]["source"] == f"tinker://{run}/sampler_weights/first"
        assert (revision["rank"], set(revision["targets"])) == (4, {"q", "k", "v", "o"})
        (file,) = [path for path in layout.store.rglob("*") if path.name.startswith(revision["digest"])]
        assert RevisionFile.open(file).facts().digest == revision["digest"]
    finally:
        await client.close()
        await finish(running)
