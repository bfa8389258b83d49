"""``python -m gateway`` as a process, with a registrar process beside it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from catalog.settings import RegistrarSettings
from gateway.settings import GatewaySettings

from .mesh import CONFIG
from .stub_engine import StubEngine, go_on_for_ever
from .stub_sidecar import StubSidecar


@asynccontextmanager
async def process(module: str, settings: Path, ready: bytes) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has logged ``ready``; killed in the end, if it still runs."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, "--settings", settings, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert started.stderr is not None
    try:
        async with asyncio.timeout(60):
            while ready not in (line := await started.stderr.readline()):
                assert line, f"{module} ended before it was ready"
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def written(path: Path, settings: Any) -> Path:
    path.write_bytes(msgspec.json.encode(settings))
    return path


def gateway_settings(folder: Path, port: int, *sidecars: StubSidecar) -> GatewaySettings:
    return GatewaySettings(
        name="g",
        port=port,
        catalog_dir=str(folder / "catalog"),
        store_dir=str(folder / "store"),
        registrar_endpoint=f"ipc://{folder}/registrar",
        nodes=tuple(sidecar.address for sidecar in sidecars),
        anonymous=True,
    )


async def test_it_serves_drains_and_ends(tmp_path: Path) -> None:
    engine = StubEngine("e")
    await engine.start()
    sidecar = StubSidecar("n0", tmp_path, [engine])
    sidecar.start()
    registrar = RegistrarSettings(
        catalog_dir=str(tmp_path / "catalog"), store_dir=str(tmp_path / "store"),
        endpoint=f"ipc://{tmp_path}/registrar", feed_endpoint=f"ipc://{tmp_path}/feed",
    )  # fmt: skip
    port = free_port()
    settings = written(tmp_path / "g.json", gateway_settings(tmp_path, port, sidecar))
    async with (
        process("gateway", settings, b"gateway ready") as gateway,
        process("catalog", written(tmp_path / "r.json", registrar), b"registrar ready"),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        await add_base(http)
        async with http.post("/v1/chat/completions", json={"model": "tiny", "messages": []}) as response:
            assert (response.status, (await response.json())["model"]) == (200, "tiny")
        engine.scripts.append(go_on_for_ever)
        body = {"model": "tiny", "messages": [], "stream": True}
        async with http.post("/v1/chat/completions", json=body) as response:
            await response.content.readany()
            gateway.send_signal(signal.SIGTERM)
            # what runs goes on; nothing new is taken
            for _ in range(5):
                assert await response.content.readany()
            assert gateway.returncode is None
            with pytest.raises(aiohttp.ClientConnectionError):
                async with aiohttp.ClientSession() as other:
                    await other.get(f"http://127.0.0.1:{port}/healthz")
        out, _ = await gateway.communicate()
        assert gateway.returncode == 0
        lines = [json.loads(line) for line in out.splitlines()]
        assert [line["outcome"] for line in lines] == ["ok", "client_gone"]
        assert lines[0]["model"] == "tiny"
        assert lines[0]["node"] == "n0"
    sidecar.stop()
    await engine.stop()


async def add_base(http: aiohttp.ClientSession) -> None:
    """As soon as the catalog is there and the node known."""
    body = {"name": "tiny", "path": "/m", "fingerprint": "f" * 64, "config": _base64(json.dumps(CONFIG))}
    async with asyncio.timeout(20):
        while True:
            async with http.post("/roost/v1/bases", json=body) as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.1)
        while True:
            async with http.get("/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)


def _base64(text: str) -> str:
    return msgspec.json.decode(msgspec.json.encode(text.encode()), type=str)


EXPOSED = msgspec.json.encode(
    GatewaySettings(
        name="g", host="0.0.0.0", anonymous=True, catalog_dir="c", store_dir="s", registrar_endpoint="ipc://r", nodes=()
    )
)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (b"{", b"truncated"),
        (b'{"name": "g"}', b"catalog_dir"),
        (b'{"nme": "g"}', b"nme"),
        (EXPOSED, b"anonymous"),
    ],
)
async def test_settings_that_cannot_stand_end_it_with_a_reason(tmp_path: Path, settings: bytes, reason: bytes) -> None:
    path = tmp_path / "g.json"
    path.write_bytes(settings)
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--settings", path, stderr=asyncio.subprocess.PIPE
    )
    _, err = await started.communicate()
    assert started.returncode == 2
    assert reason in err
    assert b"Traceback" not in err


async def test_clients_past_the_bound_on_open_files_are_told_so(tmp_path: Path) -> None:
    """With 140 files there is room for six clients; without a bound of ours the seventh would hang."""
    port = free_port()
    settings = written(tmp_path / "g.json", gateway_settings(tmp_path, port))
    limited = ("sh", "-c", 'ulimit -n 140 && exec "$@"', "sh", sys.executable, "-m", "gateway", "--settings", settings)
    started = await asyncio.create_subprocess_exec(*limited, stderr=asyncio.subprocess.PIPE)
    assert started.stderr is not None
    clients: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        told = b""
        while b"gateway ready" not in told:
            line = await asyncio.wait_for(started.stderr.readline(), 60)
            assert line, told
            told += line
        assert b"6 connections at most, not 16384: this process may open 140 files only" in told
        clients += [await asyncio.open_connection("127.0.0.1", port) for _ in range(7)]
        reader, _ = clients[-1]
        assert b" 429 " in await asyncio.wait_for(reader.readline(), 10)
    finally:
        for _, writer in clients:
            writer.close()
        started.kill()
        await started.wait()


async def test_a_port_in_use_ends_it_with_a_reason(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = written(tmp_path / "g.json", gateway_settings(tmp_path, taken.getsockname()[1]))
        started = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "--settings", settings, stderr=asyncio.subprocess.PIPE
        )
        _, err = await started.communicate()
    assert started.returncode == 1
    assert b"in use" in err
    assert b"Traceback" not in err
