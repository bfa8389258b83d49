"""Engines that are not asked as vLLM is: what reaches them, and that clients see no difference."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from wire.node import Health

from . import stub_engine
from .fleet_states import BASE
from .mesh import Mesh, until
from .stub_engine import StubEngine

# what an SGLang server says for itself of a request, without an object around it
BAD = {"object": "error", "message": "n of {model} is bad", "type": "BadRequestError", "param": None, "code": 400}


def sglang_refuses(message: str, status: int = 400) -> stub_engine.Script:
    async def script(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = BAD | {"message": message.replace("{model}", body.get("model", "")), "code": status}
        return web.json_response(error, status=status)

    return script


async def generates(engine: StubEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """``/generate``'s answer, of a kilobyte and more, in parts."""
    info = {"id": "x", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 2, "completion_tokens": 1}
    info |= {"output_token_logprobs": [[-0.5, 7, None]], "input_token_logprobs": [[None, 1, None], [-1.5, 2, None]]}
    answer = json.dumps([{"text": "x" * 2000, "output_ids": [7], "meta_info": info} for _ in body["input_ids"]])
    response = web.StreamResponse(headers={"content-type": "application/json"})
    await response.prepare(request)
    for start in range(0, len(answer), 500):
        await response.write(answer[start : start + 500].encode())
    return response


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with Mesh(tmp_path, nodes=2) as mesh:
        for sidecar in mesh.sidecars:
            sidecar.backend = "sglang"
        mesh.publish("acme/bot")
        yield mesh
        await mesh.all_leases_are_back()


def asked(mesh: Mesh) -> list[dict[str, Any]]:
    return [body for engine in mesh.engines for body in engine.asked]


async def test_it_is_asked_for_an_adapter_beside_its_base(mesh: Mesh) -> None:
    told = await mesh.chat("acme/bot")
    assert (told.status, told.json["model"]) == (200, "acme/bot@1")
    (body,) = asked(mesh)
    assert body["model"].startswith(f"{BASE}:acme@")
    assert body["model"].encode() not in told.body


async def test_a_stream_tells_the_revision_in_every_chunk(mesh: Mesh) -> None:
    told = await mesh.chat("acme/bot", stream=True)
    assert {event["model"] for event in told.events} == {"acme/bot@1"}


async def test_the_base_is_asked_by_its_own_name(mesh: Mesh) -> None:
    told = await mesh.chat(BASE)
    assert (told.status, told.json["model"], asked(mesh)[0]["model"]) == (200, BASE, BASE)


async def test_tokens_by_their_ids_come_as_from_vllm(mesh: Mesh) -> None:
    for engine in mesh.engines:
        engine.scripts.append(generates)
    ask = {"model": "acme/bot", "prompt": [1, 2], "max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0, "n": 2}
    ask |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    told = await mesh.ask("POST", "/v1/completions", json=ask)
    assert told.status == 200
    assert told.json["model"] == "acme/bot@1"
    assert [choice["token_ids"] for choice in told.json["choices"]] == [[7], [7]]
    assert told.json["choices"][0]["prompt_logprobs"] == [None, {"2": {"logprob": -1.5, "decoded_token": None}}]
    (body,) = asked(mesh)
    assert [name.partition("@")[0] for name in body["lora_path"]] == ["acme", "acme"]


async def test_what_it_would_ignore_is_the_clients_to_know(mesh: Mesh) -> None:
    told = await mesh.chat("acme/bot", structured_outputs={"choice": ["a"]})
    assert (told.status, told.error["param"]) == (400, "structured_outputs")
    assert asked(mesh) == []


async def test_what_it_would_ignore_is_asked_of_an_engine_that_heeds_it(mesh: Mesh) -> None:
    mesh.sidecars[1].backend = "vllm"
    for sidecar in mesh.sidecars:
        sidecar.announce()
    for number in range(4):
        mesh.publish(f"acme/p{number}")
        told = await mesh.chat(f"acme/p{number}", structured_outputs={"choice": ["a"]})
        assert (told.status, told.headers["x-roost-node"]) == (200, mesh.sidecars[1].address.name)
    assert mesh.engines[0].asked == []


async def test_a_node_with_engines_of_both_answers_from_the_one_that_heeds_it(tmp_path: Path) -> None:
    async with Mesh(tmp_path, engines=2) as mesh:
        first, second = mesh.engines
        mesh.sidecar.other_backends = {first.name: "sglang"}
        mesh.sidecar.announce()
        mesh.publish("acme/bot")
        for model in ("acme/bot", BASE):
            for _ in range(3):
                assert (await mesh.chat(model, structured_outputs={"choice": ["a"]})).status == 200
        assert (len(first.asked), len(second.asked)) == (0, 6)
        assert mesh.sidecar.failed_engines == []
        await mesh.all_leases_are_back()


async def test_an_engine_that_would_heed_it_and_is_not_there_now_is_worth_another_try(mesh: Mesh) -> None:
    mesh.sidecars[1].backend = "vllm"
    mesh.sidecars[1].health = Health.DEAD
    for sidecar in mesh.sidecars:
        sidecar.announce()
    await until(lambda: mesh.gateways[0].nodes["n1"].engines["n1e0"].health == Health.DEAD)
    told = await mesh.chat("acme/bot", structured_outputs={"choice": ["a"]})
    assert (told.status, "retry-after" in told.headers) == (503, True)


async def test_its_refusal_comes_in_our_form_and_names_what_was_asked(mesh: Mesh) -> None:
    for engine in mesh.engines:
        engine.scripts.append(sglang_refuses("n of {model} is bad"))
    told = await mesh.chat("acme/bot")
    assert (told.status, told.error["message"]) == (400, "n of acme/bot@1 is bad")


async def test_an_adapter_that_it_lost_is_asked_for_elsewhere(mesh: Mesh) -> None:
    gone = sglang_refuses("Got LoRA adapter that has never been loaded: x")
    mesh.engine.scripts.append(gone)
    mesh.engines[1].scripts.append(gone)
    told = await mesh.chat("acme/bot")
    assert told.status == 502
    assert len(asked(mesh)) == 2


async def test_an_engine_that_nobody_can_ask_is_passed_over(mesh: Mesh) -> None:
    for sidecar in mesh.sidecars:
        sidecar.backend = "of-tomorrow"
    told = await mesh.chat("acme/bot")
    assert (told.status, "newer" in told.error["message"]) == (502, True)
