"""Waiting for the view of a gateway's host."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from .admin import ADMIN, publish
from .mesh import Mesh
from .revisions import revision_bytes

POSITION = f"{ADMIN}/catalog/position"


async def test_a_publisher_waits_until_the_view_has_his_event(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        seq = (await publish(mesh, "acme/support", revision_bytes(1))).json["seq"]
        told = await mesh.ask("GET", f"{POSITION}?reached={seq}")
        assert (told.status, told.json) == (200, {"position": seq})
        assert (await mesh.ask("GET", POSITION)).json == {"position": seq}


async def test_what_does_not_come_in_time_is_a_deadline_passed(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        told = await mesh.ask("GET", f"{POSITION}?reached=1000000&timeout_s=0")
        assert (told.status, told.json["error"]["type"]) == (504, "deadline")
        for query in ("reached=-1", "reached=x", "timeout_s=3600"):
            assert (await mesh.ask("GET", f"{POSITION}?{query}")).status == 400


async def test_those_who_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.control.services._WAITS", 2)
    async with Mesh(tmp_path) as mesh:
        seq = (await publish(mesh, "acme/support", revision_bytes(1))).json["seq"]
        there = f"{POSITION}?reached={seq + 1}&timeout_s=30"
        waiting = [asyncio.create_task(mesh.ask("GET", there)) for _ in range(3)]
        (refused,), waiting_on = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        told = refused.result()
        assert (told.status, told.json["error"]["type"]) == (429, "quota")
        await publish(mesh, "acme/other", revision_bytes(2))
        assert {(await task).status for task in waiting_on} == {200}


async def test_an_idempotency_key_must_be_a_word(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        body = {"policy": "acme/a", "base": "tiny"}
        told = await mesh.ask("POST", f"{ADMIN}/policies", json=body, headers={"Idempotency-Key": "not a word"})
        assert (told.status, told.json["error"]["param"]) == (400, "command_id")
        told = await mesh.ask("POST", f"{ADMIN}/policies", json=body, headers={"Idempotency-Key": "a-word"})
        assert told.status == 200


async def test_an_idempotency_key_that_is_no_text_is_refused_and_not_a_failure(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        body = b'{"policy": "acme/a", "base": "tiny"}'
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.gateways[0].port)
        head = f"POST {ADMIN}/policies HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Idempotency-Key: \xff\xfe\r\nConnection: close\r\n\r\n" + body)
        told = await reader.read()
        assert told.startswith(b"HTTP/1.1 400 ")
        assert b'"param":"command_id"' in told
        writer.close()
