"""A mesh that trains, under the real supervisor with the real trainer, and a client of its training API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backends.process import free_port, stop_recorded
from ops.config import check
from ops.layout import Layout
from tests.gateway.training.rig import datum

from .test_mesh import Running, finish

TRAINER_S = 120.0


class Client:
    """Speaks the training API with the admin's key, and asks again as SDKs do."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self._url = running.mesh.url
        headers = {"x-api-key": running.layout.admin_key.read_text().strip()}
        self._http = aiohttp.ClientSession(headers=headers)

    async def ask(self, path: str, body: Any) -> Any:
        async with asyncio.timeout(TRAINER_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with self._http.post(f"{self._url}/api/v1/{path}", json=body) as answer:
                        if answer.status == 200:
                            return await answer.json()
                        assert answer.status in (408, 503), await answer.text()
                await asyncio.sleep(0.1)

    async def result(self, path: str, body: Any) -> Any:
        accepted = await self.ask(path, body)
        told = await self.ask("retrieve_future", {"request_id": accepted["request_id"]})
        assert "error" not in told, told
        return told

    async def begin(self, policy: str, **lora: Any) -> tuple[str, str]:
        """A session, and a run in it."""
        session = (await self.ask("create_session", {"user_metadata": {"policy": policy}}))["session_id"]
        new = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, **lora}}
        return session, (await self.result("create_model", new))["model_id"]

    async def train(self, run: str, seq: int, *data: dict[str, Any], forward_only: bool = False) -> Any:
        given = {"data": list(data) or [datum()], "loss_fn": "cross_entropy"}
        if forward_only:
            return await self.result("forward", {"model_id": run, "seq_id": seq, "forward_input": given})
        return await self.result("forward_backward", {"model_id": run, "seq_id": seq, "forward_backward_input": given})

    async def show(self, policy: str) -> Any:
        async with self._http.get(f"{self._url}/roost/v1/policies/{policy}") as answer:
            return await answer.json()

    async def close(self) -> None:
        await self._http.close()


@contextlib.asynccontextmanager
async def trained(folder: Path, base: Path, **more: Any) -> AsyncIterator[Client]:
    """A client of a mesh that trains ``base``."""
    pytest.importorskip("megatron.core")
    trainer = {"model_path": str(base), "device": "cpu", "threads": 1}
    config = check(
        {
            "state_dir": str(folder / "state"),
            "gateway": {"port": free_port("127.0.0.1")},
            "training": {"base": "tiny", "trainer": trainer, "revision_dtype": "F32"},
            **more,
        }
    )
    layout = Layout.of(config.state_dir)
    layout.make()
    running = Running(config, layout)
    try:
        await running.until(running.all_ready, TRAINER_S)
        client = Client(running)
        try:
            yield client
        finally:
            await client.close()
    finally:
        await finish(running)
        stop_recorded(layout.run, grace_s=5.0)


def engine_of(base: Path) -> dict[str, Any]:
    return {
        "name": "tiny-0", "base": "tiny", "model_path": str(base), "dtype": "float32", "max_model_len": 256,
        "slots": 2, "max_rank": 8, "kv_cache_bytes": 1 << 26,
    }  # fmt: skip
