from __future__ import annotations

from typing import Any

import pytest

from backends.guard import Guard, Message, Receive, Scope, Send

TOKEN = "the token"
RIGHT = (b"authorization", b"Bearer the token")


async def ask(path: str, *headers: tuple[bytes, bytes], token: str = TOKEN, kind: str = "http") -> list[Any]:
    """What was sent for a request; the application sends a word of its own."""
    sent: list[Any] = []

    async def application(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "served"})

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message.get("status") or message["type"])

    guard = Guard(application, token=token)
    await guard({"type": kind, "path": path, "headers": list(headers)}, receive, send)
    return sent


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/roost/engine", "/metrics", "/", "/v1/../health"])
async def test_every_route_wants_the_token(path: str) -> None:
    assert await ask(path, RIGHT) == ["served"]
    assert (await ask(path))[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer the tokem")],
        [(b"authorization", b"the token")],
        [(b"authorization", b"Bearer \xff")],
        [(b"x-api-key", b"the token")],
        [RIGHT, RIGHT],
    ],
)
async def test_anything_but_the_token_is_nothing(headers: list[tuple[bytes, bytes]]) -> None:
    assert (await ask("/v1/models", *headers))[0] == 401


async def test_an_engine_without_a_token_lets_nobody_in() -> None:
    for value in (b"Bearer ", b"", b"Bearer x"):
        assert (await ask("/v1/models", (b"authorization", value), token=""))[0] == 401


async def test_whether_it_lives_may_be_asked_by_anybody() -> None:
    assert await ask("/health") == ["served"]
    assert await ask("", kind="lifespan") == ["served"]


async def test_websockets_want_it_too() -> None:
    assert await ask("/v1/realtime", kind="websocket") == ["websocket.close"]
    assert await ask("/v1/realtime", RIGHT, kind="websocket") == ["served"]
