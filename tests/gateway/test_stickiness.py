"""What requests are dealt to the arms of a split by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.http import Headers
from gateway.stickiness import selector
from wire.events import Split
from wire.registrar import MoveChannel

from .mesh import Mesh


def fields(**values: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in values.items()}


def headers(session: bytes | None = None) -> Headers:
    return Headers([] if session is None else [(b"x-roost-session", session)])


@pytest.mark.parametrize(
    ("session", "body", "expected"),
    [
        (b"s1", {"user": "ann"}, b"s1"),
        (None, {"user": "ann"}, b"ann"),
        (None, {"user": "ann", "safety_identifier": "ann@x"}, b"ann@x"),
        (None, {"user": "ann", "prompt_cache_key": "k"}, b"ann"),
        (None, {"prompt_cache_key": "k"}, b"k"),
        (None, {}, b"request"),
        (b"", {"user": ""}, b"request"),
        (None, {"user": None}, b"request"),
        (None, {"user": 7}, b"request"),
        (None, {"user": {"id": "x"}}, b"request"),
        (None, {"user": 7, "prompt_cache_key": "k"}, b"k"),
    ],
)
def test_the_session_comes_first_then_the_user_then_the_request(
    session: bytes | None, body: dict[str, Any], expected: bytes
) -> None:
    assert selector(headers(session), fields(**body), b"request") == expected


async def test_a_conversation_stays_on_its_arm(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for content in (b"one", b"two"):
            mesh.publish("acme/bot", content)
        mesh.catalog.run(MoveChannel(policy="acme/bot", channel="stable", target=(Split(1), Split(2))))

        async def arms(count: int, **arguments: Any) -> set[str]:
            return {(await mesh.chat("acme/bot", **arguments)).json["model"] for _ in range(count)}

        for user in ("ann", "bob", "cid", "dan", "eve", "fay"):
            arm = await arms(4, user=user)
            assert len(arm) == 1
            assert await arms(2, headers={"X-Roost-Session": user}, user="another") == arm
        assert await arms(40) == {"acme/bot@1", "acme/bot@2"}
        users = [await arms(1, user=f"user-{number}") for number in range(30)]
        assert set().union(*users) == {"acme/bot@1", "acme/bot@2"}
