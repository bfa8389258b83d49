"""A training service over a fake trainer, behind a real gateway with a real registrar, all in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from backends.trainer import TrainerSettings
from catalog.view import CatalogView
from gateway.catalog_source import CatalogSource
from gateway.training.service import TrainingService
from gateway.training.settings import TrainingSettings
from tests.gateway.fleet_states import BASE
from tests.gateway.mesh import Mesh, Told
from tests.gateway.stub_engine import Script, StubEngine

from .fake_trainer import FakeTrainer

END_TOKEN = 7


class Always(deque[Script]):
    """A script for every request, and others before it."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def __bool__(self) -> bool:
        return True

    def popleft(self) -> Script:
        return super().popleft() if len(self) else self._script


async def completion(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Token ids as vLLM gives them; which ones follows from the prompt, the seed and the choice."""
    prompt = body["prompt"]
    choices = []
    for index in range(body["n"]):
        start = sum(prompt) + (body.get("seed") or 0) + index
        tokens = [(start + k) % 97 + 10 for k in range(body["max_tokens"] or 4)]
        stopped = bool(body.get("stop_token_ids") or body.get("stop"))
        if stopped:
            tokens = [*tokens[:2], END_TOKEN]
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": tokens,
            "finish_reason": "stop" if stopped else "length",
            "logprobs": {"token_logprobs": [-0.5] * len(tokens)},
        }
        if body["logprobs"]:
            rows = [{f"token_id:{token}": -0.5, "token_id:1": -1.5} for token in tokens]
            choice["logprobs"]["top_logprobs"] = rows
        if (k := body.get("prompt_logprobs")) is not None:
            rows = [
                {str(token): {"logprob": -token / 8}, **({"3": {"logprob": -0.25}} if k else {})} for token in prompt
            ]
            choice["prompt_logprobs"] = [None, *rows[1:]]
        choices.append(choice)
    return web.json_response({"model": body["model"], "choices": choices})


class Rig:
    """Use as an async context manager. ``crash`` and ``restart`` end one life of the service and begin the next.

    ``given`` are settings of the next one.
    """

    def __init__(self, folder: Path, *, mesh: Mesh | None = None, **settings: Any) -> None:
        self.folder = folder
        self.socket = str(folder / "training.sock")
        self.mesh = mesh or Mesh(folder, training=self.socket)
        self.mesh.engine.scripts = Always(completion)
        self.trainer: FakeTrainer
        self.service: TrainingService
        self.given = settings
        self._stack = contextlib.AsyncExitStack()
        self._served = False

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.mesh)
        await self.restart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._served:
            await self.end()
        await self._stack.aclose()

    @property
    def url(self) -> str:
        return self.mesh.url

    def settings(self, **more: Any) -> TrainingSettings:
        given: dict[str, Any] = {
            "anonymous": True,
            "poll_s": 5.0,
            "name": "here",
            "map_bytes": 1 << 28,
            "state_dir": str(self.folder / "training"),
        }
        return TrainingSettings(
            base=BASE,
            trainer=TrainerSettings(name="fake", model_path="", backend="fake"),
            socket=self.socket,
            gateway_url=self.url,
            catalog_dir=str(self.folder / "catalog"),
            store_dir=str(self.folder / "store"),
            registrar_endpoint=f"ipc://{self.folder}/registrar.sock",
            log_dir=str(self.folder),
            **(given | self.given | more),
        )

    async def restart(self) -> None:
        """Begin a life of the service, with a trainer that knows only what is on its disk."""

        def make(settings: TrainingSettings) -> FakeTrainer:
            self.trainer = FakeTrainer(settings.trainer, self.folder / "trainer")
            return self.trainer

        self.service = await TrainingService.start(self.settings(), make=make, catalog=self.catalog_source())
        self._served = True

    def catalog_source(self) -> CatalogSource:
        """This process's one view of the catalog."""
        view = CatalogView(self.mesh.catalog.environment)
        source = CatalogSource(self.folder, open_view=lambda _: view)
        source.close = lambda: None  # type: ignore[method-assign]
        return source

    async def end(self) -> None:
        """End it in good order."""
        self._served = False
        await self.service.stop()

    async def crash(self) -> None:
        """End it; the trainer has no time to snapshot what it did."""
        self.trainer.dead = True
        await self.end()

    async def ask(self, path: str, body: Any = None, **arguments: Any) -> Told:
        """POST a JSON body through the gateway."""
        return await self.mesh.ask("POST", f"/api/v1/{path}", json=body or {}, **arguments)

    async def session(self, **arguments: Any) -> str:
        told = await self.ask("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "t"}, **arguments)
        assert told.status == 200, told.body
        return str(told.json["session_id"])

    async def result(self, accepted: Told, **arguments: Any) -> Any:
        """The result of what was accepted."""
        assert accepted.status == 200, accepted.body
        async with asyncio.timeout(20):
            while True:
                told = await self.ask("retrieve_future", {"request_id": accepted.json["request_id"]}, **arguments)
                if told.status != 408:
                    assert told.status == 200, told.body
                    return told.json

    async def run(self, session: str, number: int = 0, **fields: Any) -> str:
        """A new run; its id."""
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": BASE,
            "lora_config": {"rank": 4, "seed": 1},
        }
        return str((await self.result(await self.ask("create_model", body | fields)))["model_id"])

    async def train(self, model_id: str, seq: int, *data: dict[str, Any], loss: str = "cross_entropy") -> Told:
        given = {"data": list(data) or [datum()], "loss_fn": loss}
        return await self.ask(
            "forward_backward", {"model_id": model_id, "seq_id": seq, "forward_backward_input": given}
        )

    async def step(self, model_id: str, seq: int, rate: float = 0.1) -> Told:
        adam = {"learning_rate": rate, "beta1": 0.5}
        return await self.ask("optim_step", {"model_id": model_id, "seq_id": seq, "adam_params": adam})


def datum(
    tokens: tuple[int, ...] = (1, 2, 3), targets: tuple[int, ...] = (2, 3, 4), **more: list[float]
) -> dict[str, Any]:
    """In JSON."""
    inputs: dict[str, Any] = {"target_tokens": {"data": list(targets), "dtype": "int64", "shape": [len(targets)]}}
    for name, values in more.items():
        inputs[name] = {"data": values, "dtype": "float32", "shape": [len(values)]}
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
        "loss_fn_inputs": inputs,
    }


def secret_of(headers: dict[str, str]) -> str:
    """The secret of a key that ``Mesh.key`` made."""
    return headers["authorization"].removeprefix("Bearer ")
