"""Whatever comes in, the answer names what is wrong with it, and the mesh goes on serving."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from tests.e2e.mesh import Mesh, ask, upload
from tests.models import make_adapter, make_tiny_base, reference_answer

pytestmark = pytest.mark.engine

PROMPT, TOKENS = "still here", 6
MAX_RANK = 8
# malformed, or well-formed and unfit
WRONG_INPUT = (2, 6)
NAMELESS = (
    "acme/../good", "../good", "acme/good/x", "acme//good", "/good", "acme/", "x" * 10_000 + "/y", "acme/\u00e9",
    "ACME/good",
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("good") / "adapter", tiny_base, seed=3)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, good: Path) -> Iterator[Mesh]:
    root = tmp_path_factory.mktemp("mesh")
    mesh = Mesh(root, tiny_base, engine={"slots": 2, "max_rank": MAX_RANK}, sidecar={})
    mesh.up()
    try:
        mesh.publish("acme/good", good)
        yield mesh
    finally:
        mesh.down()


@pytest.fixture(autouse=True)
def still_serving(mesh: Mesh, tiny_base: Path, good: Path) -> Iterator[None]:
    """After each test, the policy that served before it still does."""
    yield

    async def asked() -> None:
        async with aiohttp.ClientSession() as session:
            reply = await ask(session, mesh.url, "acme/good", PROMPT, max_tokens=TOKENS)
        assert reply.text == reference_answer(tiny_base, good, PROMPT, TOKENS), reply

    asyncio.run(asked())


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return edit


def _truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _lie_about_the_header(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])


def _overlap(folder: Path) -> None:
    header = {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "b")}
    encoded = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(16))


def _poison(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


SPOILT = {
    "truncated": (_truncate, "adapter_model.safetensors"),
    "a header longer than the file": (_lie_about_the_header, "header"),
    "overlapping offsets": (_overlap, "a"),
    "modules_to_save": (_edit_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "empty": (_edit_tensors(dict.clear), "tensor"),
    "a rank unlike the config's": (_edit_config(r=7), "rank"),
    "not a number": (_edit_tensors(_poison), "finite"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_adapter_is_refused_and_nothing_is_named(kind: str, mesh: Mesh, good: Path, tmp_path: Path) -> None:
    spoil, named = SPOILT[kind]
    folder = tmp_path / "adapter"
    folder.mkdir()
    for file in good.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    spoil(folder)
    done = mesh.roost("publish", "acme/spoilt", str(folder), "--create-over", "tiny", check=False)
    assert done.returncode in WRONG_INPUT, done
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert mesh.roost("policy", "show", "acme/spoilt", check=False).returncode == 5


def test_an_adapter_for_another_base_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    other = make_tiny_base(tmp_path / "other", arch="llama", layers=3)
    adapter = make_adapter(tmp_path / "adapter", other)
    done = mesh.roost("publish", "acme/other", str(adapter), "--create-over", "tiny", check=False)
    assert done.returncode in WRONG_INPUT, done
    assert "layers.2" in done.stderr


async def test_a_rank_above_the_engines_is_said_to_be_that(mesh: Mesh, tiny_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_base, rank=MAX_RANK * 2)
    await asyncio.to_thread(mesh.publish, "acme/wide", adapter)
    async with aiohttp.ClientSession() as session:
        reply = await ask(session, mesh.url, "acme/wide", PROMPT)
    assert reply.status == 409
    assert f"rank {MAX_RANK * 2}" in reply.error


async def _name(mesh: Mesh, policy: str, digest: str) -> tuple[int, dict[str, Any]]:
    url = f"{mesh.url}/roost/v1/policies/{policy}/revisions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"digest": digest, "create_over": "tiny"}) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no safetensors file at all",
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 8) + b"[[[[[[[[",
    ],
)
async def test_bytes_that_are_no_revision_file_can_be_stored_but_never_named(mesh: Mesh, data: bytes) -> None:
    digest = blake3(data).hexdigest()
    await upload(mesh, data)
    status, answer = await _name(mesh, "acme/bytes", digest)
    assert status == 400, answer
    async with aiohttp.ClientSession() as session:
        assert (await ask(session, mesh.url, "acme/bytes", PROMPT)).status == 404


async def test_bytes_of_another_digest_are_refused(mesh: Mesh) -> None:
    status, answer = await upload(mesh, b"these bytes", "0" * 64)
    assert status == 400
    assert answer["error"]["param"] == "digest"


@pytest.mark.parametrize("name", NAMELESS)
async def test_names_that_name_nothing_are_refused_never_repaired(mesh: Mesh, name: str) -> None:
    async with aiohttp.ClientSession() as session:
        reply = await ask(session, mesh.url, name, PROMPT)
    assert reply.status in (400, 404)
    assert len(reply.error) < 500
    done = await asyncio.to_thread(mesh.roost, "policy", "create", name, "--base", "tiny", check=False)
    assert done.returncode == 2, done


async def test_an_unknown_policy_and_an_unknown_revision(mesh: Mesh) -> None:
    async with aiohttp.ClientSession() as session:
        for name in ("acme/nobody", "acme/good@99", "acme/good:nightly", "nobase"):
            reply = await ask(session, mesh.url, name, PROMPT)
            assert (reply.status, reply.headers["x-roost-outcome"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"prompt": "x"}', 400),
        (b'{"model": 7, "prompt": "x"}', 400),
        (b'{"model": "acme/good", "prompt": "\xff"}', 400),
        (b" " * (50 << 20), 413),
    ],
    ids=["cut off", "no object", "no model", "model is a number", "not UTF-8", "50 MB"],
)
async def test_bodies_that_are_no_request(mesh: Mesh, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession() as session:
        try:
            async with session.post(f"{mesh.url}/v1/completions", data=body, headers=headers) as answer:
                assert answer.status == status
                assert (await answer.json())["error"]["message"]
        except aiohttp.ClientOSError:
            # refused before all of it was sent
            assert status == 413


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked",
        b"Content-Length: 3\r\nContent-Length: 4",
        b"Content-Length: +3",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding : chunked",
        b"Content-Length: 3\r\n folded: 1",
    ],
)
def test_requests_that_two_servers_could_read_differently_are_refused(mesh: Mesh, head: bytes) -> None:
    smuggled = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", mesh.port), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n\r\n0\r\n\r\n" + smuggled)
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1


async def test_the_registrar_dies_between_bytes_and_event(mesh: Mesh, tiny_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_base, seed=88)
    config = tiny_base / "config.json"
    packed = tmp_path / "revision.safetensors"
    await asyncio.to_thread(mesh.roost, "pack", str(adapter), "--base-config", str(config), "-o", str(packed))
    data = packed.read_bytes()
    status, _ = await upload(mesh, data)
    assert status in (200, 201)
    await asyncio.to_thread(mesh.kill, "registrar")
    digest = blake3(data).hexdigest()
    status, answer = await _name(mesh, "acme/orphan", digest)
    assert status in (200, 503), answer
    for _ in range(100):
        if status == 200:
            break
        await asyncio.sleep(0.1)
        status, answer = await _name(mesh, "acme/orphan", digest)
    # a retry of what may or may not have happened names it exactly once
    assert (status, answer["revision"]) == (200, 1)
    async with aiohttp.ClientSession() as session:
        reply = await ask(session, mesh.url, "acme/orphan", PROMPT, max_tokens=TOKENS)
    assert reply.text == reference_answer(tiny_base, adapter, PROMPT, TOKENS)
