"""What a real engine can't be made to do on request: silence, nonsense, answers that break off."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from backends.engine_client import MAX_ANSWER_BYTES, Unreachable
from backends.interface import InstallFailed, InstallRefused, InstallUncertain, Removal
from backends.process import free_port
from backends.vllm.client import VllmClient
from tests.backends.fake import Fake, Handler, answer, break_off, serving, silence, vllm_error
from wire.outcomes import EngineFailed


@pytest.fixture
async def fake() -> AsyncIterator[tuple[Fake, VllmClient]]:
    server = Fake()
    async with serving(server) as port:
        client = VllmClient("127.0.0.1", port)
        yield server, client
        await client.close()


@pytest.mark.parametrize(
    ("handler", "expected", "message"),
    [
        (vllm_error(500, "Call to add_lora method failed: adapter refused: no such layer"), InstallRefused, "no such"),
        (vllm_error(500, "Call to add_lora method failed: adapter not loaded: no free slot"), InstallFailed, "no free"),
        (vllm_error(500, "LoRA rank 64 is greater than max_lora_rank 16."), InstallRefused, "rank 64"),
        (vllm_error(500, "EngineCore encountered an issue."), InstallFailed, "answered 500: EngineCore"),
        (vllm_error(400, "conflicts with a served base model"), InstallRefused, "conflicts"),
        (vllm_error(400, "CUDA out of memory. Tried to allocate 2 MiB"), InstallFailed, "out of memory"),
        (vllm_error(404, "No adapter found"), InstallFailed, "No adapter found"),
        (answer(503, {"message": "an older form"}), InstallFailed, "an older form"),
        (answer(502, text="<html>" + "x" * 9999), InstallFailed, "<html>"),
        (answer(500, ["not", "an", "object"]), InstallFailed, "not"),
        (silence, InstallUncertain, "did not answer within 0.2 s"),
        (break_off, InstallUncertain, "broke off"),
    ],
)
async def test_failed_loads_are_told_apart(
    fake: tuple[Fake, VllmClient], handler: Handler, expected: type[EngineFailed], message: str
) -> None:
    server, client = fake
    server.handler = handler
    with pytest.raises((InstallRefused, InstallFailed, InstallUncertain), match=message) as caught:
        await client.load("acme@x", "folder", 0.2)
    assert type(caught.value) is expected
    assert len(caught.value.message) < 1000


async def test_a_load_that_nobody_took_did_not_happen() -> None:
    client = VllmClient("127.0.0.1", free_port("127.0.0.1"))
    with pytest.raises(InstallFailed, match="nobody answers"):
        await client.load("acme@x", "folder", 5)
    with pytest.raises(Unreachable):
        await client.health(5)
    await client.close()


async def test_where_an_adapter_lies_is_not_told(fake: tuple[Fake, VllmClient]) -> None:
    server, client = fake
    path = "/srv/run/" + "x" * 480
    server.handler = vllm_error(500, f"While loading {path}, expected target modules in {{'q_proj'}}")
    with pytest.raises(InstallRefused, match="While loading the adapter, expected target modules"):
        await client.load("acme@x", path, 5)


async def test_an_adapter_that_is_loaded_already_is_loaded(fake: tuple[Fake, VllmClient]) -> None:
    server, client = fake
    server.handler = vllm_error(400, "The lora adapter 'acme@x' has already been loaded.")
    await client.load("acme@x", "folder", 5)


async def test_removals_are_told_apart(fake: tuple[Fake, VllmClient]) -> None:
    server, client = fake
    for status, removal in ((200, Removal.REMOVED), (404, Removal.ABSENT), (409, Removal.BUSY)):
        server.handler = vllm_error(status, "said")
        assert await client.unload("acme@x", 5) is removal
    server.handler = vllm_error(500, "no idea")
    with pytest.raises(EngineFailed, match="answered 500 to the removal of acme@x: no idea"):
        await client.unload("acme@x", 5)


@pytest.mark.parametrize("body", [{"data": [{"name": "no id"}]}, {"data": 1}, [], None])
async def test_a_list_of_models_that_is_none_is_an_engine_failure(fake: tuple[Fake, VllmClient], body: object) -> None:
    server, client = fake
    server.handler = answer(200, body)
    with pytest.raises(EngineFailed, match="not what was expected"):
        await client.models(5)


async def test_an_answer_without_end_is_cut_off(fake: tuple[Fake, VllmClient]) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2 * MAX_ANSWER_BYTES >> 20):
            await response.write(bytes(1 << 20))
        return response

    server, client = fake
    server.handler = flood
    with pytest.raises(EngineFailed, match="more than"):
        await client.models(30)


async def test_a_server_without_our_plug_in_has_no_facts(fake: tuple[Fake, VllmClient]) -> None:
    server, client = fake
    server.handler = answer(404, {"detail": "Not Found"})
    assert await client.facts(5) is None
    assert not await client.takes_adapters(5)
    server.handler = answer(500, text="?")
    with pytest.raises(EngineFailed, match="/roost/engine answered 500"):
        await client.facts(5)
