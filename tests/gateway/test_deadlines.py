"""A request has so much time, and what a client sees when it is over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from . import stub_engine, stub_sidecar
from .mesh import Mesh, until


async def test_a_deadline_ends_a_wait_for_a_lease(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.sidecar.scripts.append(stub_sidecar.keep_waiting)
        told = await mesh.chat("acme/bot", headers={"x-request-timeout": "0.2"})
        assert (told.status, told.error["type"]) == (504, "deadline")
        await until(lambda: mesh.sidecar.released == [mesh.sidecar.acquired[0].lease])


async def test_a_deadline_ends_an_engine_that_hangs(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.engine.scripts.append(stub_engine.never_answer)
        told = await mesh.chat("acme/bot", headers={"x-request-timeout": "0.2"})
        assert (told.status, told.error["type"]) == (504, "deadline")
        await mesh.all_leases_are_back()
        await until(lambda: mesh.engine.aborted == 1)
        assert mesh.sidecar.failed_engines == []


async def test_a_deadline_ends_a_stream_with_an_error(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.engine.scripts.append(stub_engine.go_on_for_ever)
        told = await mesh.chat("acme/bot", stream=True, headers={"x-request-timeout": "0.3"})
        assert told.broken
        assert told.events[-1]["error"]["type"] == "deadline"
        assert mesh.outcomes() == {"deadline": 1}
        await until(lambda: mesh.engine.aborted == 1)


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "", "inf", "1e3", "1_0", "0x10", "9" * 40, "1,5", "5;6"])
async def test_a_timeout_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.chat("acme/bot", headers={"x-request-timeout": value})
        assert (told.status, told.error["param"]) == (400, "x-request-timeout")


async def test_two_timeouts_are_none(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        twice = CIMultiDict([("x-request-timeout", "5"), ("x-request-timeout", "0.2")])
        told = await mesh.chat("acme/bot", headers=twice)
        assert (told.status, told.error["param"]) == (400, "x-request-timeout")


async def test_a_deadline_ends_an_answer_that_stops_in_the_middle(tmp_path: Path) -> None:
    async def half(
        engine: stub_engine.StubEngine, request: Any, body: dict[str, Any]
    ) -> stub_engine.web.StreamResponse:
        response = stub_engine.web.StreamResponse(headers={"content-length": "100", "content-type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"model":')
        await asyncio.Event().wait()
        raise AssertionError("cancelled before")

    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.engine.scripts.append(half)
        told = await mesh.chat("acme/bot", headers={"x-request-timeout": "0.2"})
        assert (told.status, told.error["type"]) == (504, "deadline")
        await until(lambda: mesh.engine.aborted == 1)
        await mesh.all_leases_are_back()
        assert mesh.outcomes() == {"deadline": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_is_the_sidecars_too_and_covers_both_attempts(tmp_path: Path, stream: bool) -> None:
    async def late(
        engine: stub_engine.StubEngine, request: Any, body: dict[str, Any]
    ) -> stub_engine.web.StreamResponse:
        await asyncio.sleep(0.4)
        return await stub_engine.refuse(500)(engine, request, body)

    async with Mesh(tmp_path, nodes=2, request_timeout_s=60.0) as mesh:
        mesh.publish("acme/bot")
        for engine in mesh.engines:
            engine.scripts.append(late)
        told = await mesh.chat("acme/bot", headers={"x-request-timeout": "0.6"}, stream=stream)
        assert (told.status, told.error["type"]) == (504, "deadline")
        asked = [ask for sidecar in mesh.sidecars for ask in sidecar.acquired]
        first, second = sorted(asked, key=lambda ask: -ask.ttl_s)
        assert first.ttl_s <= 30.6
        assert second.ttl_s <= first.ttl_s - 0.3
        assert (await mesh.chat("acme/bot", headers={"x-request-timeout": "86400"}, stream=stream)).status == 200
        longest = max(ask.ttl_s for sidecar in mesh.sidecars for ask in sidecar.acquired)
        assert longest <= 90.0, "no longer than the gateway allows"
