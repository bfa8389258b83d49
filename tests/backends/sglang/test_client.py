"""What of SGLang's answers to loads and removals means what, in its own forms and in those of our additions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from backends.engine_client import ArenaOutOfReach
from backends.interface import InstallFailed, InstallRefused, InstallUncertain, Removal
from backends.sglang.client import SglangClient
from tests.backends.fake import Fake, Handler, answer, break_off, serving, silence
from wire.outcomes import EngineFailed


@pytest.fixture
async def fake() -> AsyncIterator[tuple[Fake, SglangClient]]:
    server = Fake()
    async with serving(server) as port:
        client = SglangClient("127.0.0.1", port)
        yield server, client
        await client.close()


def told(status: int, message: str) -> Handler:
    return answer(status, {"success": status == 200, "error_message": message, "loaded_adapters": {}})


@pytest.mark.parametrize(
    ("handler", "expected", "message"),
    [
        (told(400, "adapter refused: no such layer"), InstallRefused, "^no such layer"),
        (told(400, "adapter not loaded: no free slot"), InstallFailed, "^no free slot"),
        (told(400, "arena out of reach: segment x"), ArenaOutOfReach, "^segment x"),
        (told(400, "LoRA adapter x with rank 64 is incompatible with the current pool"), InstallRefused, "rank 64"),
        (told(400, "folder: No such file or directory"), InstallFailed, "the adapter: No such file"),
        (answer(500, text="Internal Server Error"), InstallFailed, "answered 500: Internal"),
        (answer(401, {"error": {"message": "this engine wants its token"}}), InstallFailed, "its token"),
        (silence, InstallUncertain, "did not answer within 0.2 s"),
        (break_off, InstallUncertain, "broke off"),
    ],
)
async def test_failed_loads_are_told_apart(
    fake: tuple[Fake, SglangClient], handler: Handler, expected: type[EngineFailed], message: str
) -> None:
    server, client = fake
    server.handler = handler
    with pytest.raises((InstallRefused, InstallFailed, InstallUncertain), match=message) as caught:
        await client.load("acme@x", "folder", 0.2)
    assert type(caught.value) is expected


@pytest.mark.parametrize(
    "handler", [told(200, ""), told(400, "Failed to load LoRA adapter acme@x because it is already loaded")]
)
async def test_what_is_loaded_already_is_loaded(fake: tuple[Fake, SglangClient], handler: Handler) -> None:
    server, client = fake
    server.handler = handler
    await client.load("acme@x", "folder", 5)


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (told(200, ""), Removal.REMOVED),
        (told(400, "LoRA with name acme@x does not exist. Loaded LoRAs: odict_keys([])"), Removal.ABSENT),
        (answer(409, {"message": "acme@x: adapter is in use by unfinished requests"}), Removal.BUSY),
    ],
)
async def test_removals(fake: tuple[Fake, SglangClient], handler: Handler, expected: Removal) -> None:
    server, client = fake
    server.handler = handler
    assert await client.unload("acme@x", 5) is expected


async def test_a_removal_that_failed_is_an_engine_failure(fake: tuple[Fake, SglangClient]) -> None:
    server, client = fake
    server.handler = told(400, "an incomplete unload")
    with pytest.raises(EngineFailed, match="answered 400 to the removal of acme@x: an incomplete unload"):
        await client.unload("acme@x", 5)
