"""The real registrar, sidecar and gateway under the real supervisor, without an engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from backends.process import free_port
from catalog.blobs import BlobStore
from catalog.client import RegistrarClient
from ops.cli import main
from ops.config import EngineConfig, RoostConfig, check
from ops.deployment import curve_keys
from ops.layout import Layout
from ops.supervise.mesh import Mesh
from ops.supervise.state import Identity, MeshState, Phase, write_state
from ops.supervise.supervisor import Supervisor
from tests.backends.fake import served
from wire.curve import CurveKeys
from wire.node import Acquire, AnswerOfNode, AskOfNode, AskState, NodeReport
from wire.peers import Peer
from wire.registrar import AddBase, CreatePolicy
from wire.sockets import Requester

RECOVERY_S = 10.0
PATIENCE_S = 30.0


class Running:
    """A mesh in this process's event loop, its children around it."""

    def __init__(self, config: RoostConfig, layout: Layout) -> None:
        identity = Identity.of(os.getpid())
        assert identity is not None
        self.layout = layout
        self.mesh = Mesh(config, layout, note=lambda _: None)
        self.supervisor = Supervisor(
            self.mesh.steps, url=self.mesh.url, identity=identity, publish=self._publish, engines=self.mesh.engines
        )
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self.supervisor.run(self.stop))

    def _publish(self, state: MeshState) -> None:
        write_state(self.layout.state_file, state)

    @property
    def state(self) -> MeshState:
        return self.supervisor.state

    async def until(self, condition: Callable[[], bool], seconds: float) -> float:
        begun = time.monotonic()
        async with asyncio.timeout(seconds):
            while not condition():
                assert not self.task.done(), "the supervisor ended"
                await asyncio.sleep(0.05)
        return time.monotonic() - begun

    def all_ready(self) -> bool:
        return self.state.phase is Phase.READY and all(one.phase is Phase.READY for one in self.state.processes)


async def start(
    folder: Path, *, node: dict[str, Any] | None = None, engines: tuple[EngineConfig, ...] = (), **gateway: Any
) -> Running:
    """``engines`` may be on loopback even where other hosts ask for them: here all hosts are one."""
    gateway = {"port": free_port("127.0.0.1"), **gateway}
    config = check({"state_dir": str(folder), "gateway": gateway, "node": node or {}})
    config = msgspec.structs.replace(config, node=msgspec.structs.replace(config.node, engines=engines))
    layout = Layout.of(config.state_dir)
    layout.make()
    running = Running(config, layout)
    await running.until(running.all_ready, PATIENCE_S)
    return running


async def finish(running: Running) -> None:
    running.stop.set()
    await asyncio.wait_for(running.task, PATIENCE_S)
    running.mesh.close()


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    mesh = await start(tmp_path / "state")
    yield mesh
    await finish(mesh)


async def get(url: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status


@pytest.mark.parametrize("name", ["registrar", "sidecar", "gateway"])
async def test_each_process_that_is_killed_is_ready_again_within_ten_seconds(running: Running, name: str) -> None:
    before = next(one.identity for one in running.state.processes if one.name == name)
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)

    def is_back() -> bool:
        now = next(one.identity for one in running.state.processes if one.name == name)
        return now != before and running.all_ready()

    await running.until(is_back, RECOVERY_S)
    assert await get(f"{running.mesh.url}/healthz") == 200


async def test_the_first_start_makes_an_admin_key_that_only_its_owner_can_read(running: Running) -> None:
    file = running.layout.admin_key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    status = f"{running.mesh.url}/roost/v1/status"
    assert await get(status) == 401
    assert await get(status, "tml-guessed") == 401
    assert await get(status, file.read_text().strip()) == 200


async def test_a_later_start_keeps_the_key(tmp_path: Path) -> None:
    first = await start(tmp_path / "state")
    secret = first.layout.admin_key.read_text()
    await finish(first)
    again = await start(tmp_path / "state")
    assert again.layout.admin_key.read_text() == secret
    assert await get(f"{again.mesh.url}/roost/v1/status", secret.strip()) == 200
    await finish(again)


async def test_a_deleted_key_file_is_not_made_again(tmp_path: Path) -> None:
    """Whoever took the file away may hold the key; a new one for anybody who restarts would be a surprise."""
    first = await start(tmp_path / "state")
    first.layout.admin_key.unlink()
    await finish(first)
    again = await start(tmp_path / "state")
    assert not again.layout.admin_key.exists()
    await finish(again)


async def test_keys_are_dispensed_with_only_where_that_is_said(tmp_path: Path) -> None:
    mesh = await start(tmp_path / "state", anonymous=True)
    assert not mesh.layout.admin_key.exists()
    assert await get(f"{mesh.mesh.url}/roost/v1/status") == 200
    await finish(mesh)


async def test_processes_talk_over_tcp_with_curve(tmp_path: Path) -> None:
    ports = [free_port("127.0.0.1") for _ in range(2)]
    node = {"endpoint": f"tcp://127.0.0.1:{ports[0]}", "feed_endpoint": f"tcp://127.0.0.1:{ports[1]}"}
    mesh = await start(tmp_path / "state", node=node, anonymous=True)
    assert len(list(mesh.layout.keys.glob("*.curve.json"))) == 3
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE_S):
        while True:
            async with session.get(f"{mesh.mesh.url}/roost/v1/status") as answer:
                nodes = (await answer.json())["nodes"]
            if nodes and nodes[0]["heard"]:
                break
            await asyncio.sleep(0.1)
    await finish(mesh)


async def test_sockets_and_state_are_their_owners_alone(running: Running) -> None:
    sockets = list(running.layout.sockets.glob("*.sock"))
    assert len(sockets) == 5
    assert {stat.S_IMODE(file.stat().st_mode) & 0o077 for file in [*sockets, running.layout.root]} == {0}


async def test_after_a_stop_nothing_is_left(tmp_path: Path) -> None:
    mesh = await start(tmp_path / "state")
    identities = [one.identity for one in mesh.state.processes]
    await finish(mesh)
    assert [identity.alive for identity in identities if identity is not None] == [False, False, False]
    assert mesh.state.phase is Phase.STOPPED


def roost(folder: Path, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["roost", "--state-dir", str(folder), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code


async def create(mesh: Running, policy: str) -> int:
    """Make a policy through the registrar of the mesh; the event that it became."""
    client = RegistrarClient(mesh.layout.socket("registrar"))
    try:
        base = AddBase(name="tiny", fingerprint="ab" * 32, path="/models/tiny", config=b"{}")
        await client.run(base)
        return (await client.run(CreatePolicy(policy=policy, base="tiny"))).seq
    finally:
        client.close()


async def test_a_mesh_starts_over_a_catalog_that_was_compacted(tmp_path: Path) -> None:
    first = await start(tmp_path / "state")
    before = await create(first, "acme/first")
    await finish(first)
    await asyncio.to_thread(roost, tmp_path / "state", "catalog", "compact")
    again = await start(tmp_path / "state")
    assert await create(again, "acme/second") == before + 1
    await finish(again)


async def test_a_mesh_starts_over_a_catalog_that_was_restored(tmp_path: Path) -> None:
    first = await start(tmp_path / "first")
    before = await create(first, "acme/first")
    snapshot = str(tmp_path / "catalog.snapshot")
    await asyncio.to_thread(roost, tmp_path / "first", "catalog", "snapshot", snapshot)
    await finish(first)
    await asyncio.to_thread(roost, tmp_path / "second", "catalog", "restore", snapshot)
    second = await start(tmp_path / "second")
    assert await create(second, "acme/second") == before + 1
    await finish(second)


@asynccontextmanager
async def stub_server() -> AsyncIterator[int]:
    """What a driver that attaches looks for, and one answer to all requests. Yields the port."""

    async def look(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model", "parent": None}]})
        return web.Response(status={"/health": 200, "/v1/load_lora_adapter": 405}.get(request.path, 404))

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"model": (await request.json())["model"], "choices": []})

    app = web.Application()
    app.router.add_get("/{path:.*}", look)
    app.router.add_post("/v1/chat/completions", answer)
    async with served(app) as port:
        yield port


async def ask(mesh: Running) -> tuple[int, str]:
    """A request for the base: its status, and the node that served it."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    url = f"{mesh.mesh.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        return answer.status, answer.headers.get("x-roost-node", await answer.text())


async def test_a_node_serves_the_gateways_of_two_hosts_at_the_same_time(tmp_path: Path) -> None:
    here, there = Layout.of(str(tmp_path / "here")), Layout.of(str(tmp_path / "there"))
    for layout in (here, there):
        first = await start(layout.root, anonymous=True)
        await create(first, "acme/bot")
        await finish(first)
    key_here, key_there = curve_keys(here)["gateway"].public, curve_keys(there)["sidecar"].public
    ports = [free_port("127.0.0.1") for _ in range(2)]
    node = {"name": "far", "endpoint": f"tcp://127.0.0.1:{ports[0]}", "feed_endpoint": f"tcp://127.0.0.1:{ports[1]}"}
    async with stub_server() as port:
        engines = (EngineConfig(base="tiny", attach=f"127.0.0.1:{port}", serve_base_unsafely=True),)
        far = await start(there.root, node={**node, "peers": [key_here]}, engines=engines, anonymous=True)
        near = await start(here.root, anonymous=True, nodes=[{**node, "public": key_there}])
        async with asyncio.timeout(PATIENCE_S):
            for mesh in (near, far):
                while (await ask(mesh))[0] != 200:  # noqa: ASYNC110 - other processes' state
                    await asyncio.sleep(0.1)
        # each of them again, once the node has heard of both
        for _ in range(3):
            assert [await ask(mesh) for mesh in (near, far)] == [(200, "far"), (200, "far")]
        for mesh in (near, far):
            await finish(mesh)


async def test_a_gateway_hears_the_node_of_another_host_and_no_stranger_does(tmp_path: Path) -> None:
    here, there = Layout.of(str(tmp_path / "here")), Layout.of(str(tmp_path / "there"))
    for layout in (here, there):
        layout.make()
    key_here, key_there = curve_keys(here)["gateway"].public, curve_keys(there)["sidecar"].public
    ports = [free_port("127.0.0.1") for _ in range(2)]
    node = {"name": "far", "endpoint": f"tcp://127.0.0.1:{ports[0]}", "feed_endpoint": f"tcp://127.0.0.1:{ports[1]}"}
    other = await start(there.root, node={**node, "peers": [key_here]}, anonymous=True)
    known = {**node, "public": key_there}
    first = await start(here.root, anonymous=True, nodes=[known])
    stranger = await start(tmp_path / "stranger", anonymous=True, nodes=[known])

    async def states(mesh: Running) -> dict[str, str]:
        url = f"{mesh.mesh.url}/roost/v1/nodes"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return {node["node"]: node["state"] for node in (await answer.json())["nodes"]}

    async with asyncio.timeout(PATIENCE_S):
        while await states(first) != {"local": "serving", "far": "serving"}:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.1)
    assert (await states(stranger))["far"] == "joining"
    for mesh in (stranger, first, other):
        await finish(mesh)


async def test_nodes_of_two_hosts_take_bytes_from_each_other_with_no_key_for_it_in_any_file(tmp_path: Path) -> None:
    here, there = Layout.of(str(tmp_path / "here")), Layout.of(str(tmp_path / "there"))
    for layout in (here, there):
        first = await start(layout.root, anonymous=True)
        await create(first, "acme/bot")
        await finish(first)
    ours, key_there = curve_keys(here), curve_keys(there)["sidecar"].public
    gateway = CurveKeys(ours["gateway"].public, ours["gateway"].secret)
    ports = [free_port("127.0.0.1") for _ in range(4)]
    far, near = (
        {"name": name, "endpoint": f"tcp://127.0.0.1:{ports[at]}", "feed_endpoint": f"tcp://127.0.0.1:{ports[at + 1]}"}
        for name, at in (("far", 0), ("near", 2))
    )
    async with stub_server() as port:
        engines = (EngineConfig(base="tiny", attach=f"127.0.0.1:{port}", serve_base_unsafely=True),)
        meshes = [
            await start(there.root, node={**far, "peers": [gateway.public]}, engines=engines, anonymous=True),
            await start(here.root, node=near, engines=engines, anonymous=True, nodes=[{**far, "public": key_there}]),
        ]
        data = os.urandom(3_000_000)
        with BlobStore(there.store).writer() as writer:
            writer.write(data)
            digest = writer.commit().digest
        nodes = [
            Requester[AskOfNode, AnswerOfNode](
                node["endpoint"], AskOfNode, AnswerOfNode, curve=gateway, server_public=public
            )
            for node, public in ((far, key_there), (near, ours["sidecar"].public))
        ]
        giver = await bring(nodes[0], digest, len(data))
        assert giver.arrived_bytes == {"store": len(data)}
        taker = await bring(nodes[1], digest, len(data), Peer("far", giver.bytes_endpoint, key_there))
        assert taker.arrived_bytes == {"peer": len(data)}
        for node in nodes:
            node.close()
        for mesh in meshes:
            await finish(mesh)


async def bring(node: Requester[AskOfNode, AnswerOfNode], digest: str, size: int, *peers: Peer) -> NodeReport:
    """Have a node get bytes into its arena, whether or not an engine could load them; its state then."""
    async with asyncio.timeout(PATIENCE_S):
        for lease in itertools.count(1):
            ask = Acquire(
                gateway="test", instance="1", lease=lease, base="tiny", tenant="acme", digest=digest, size=size,
                rank=1, peers=peers,
            )  # fmt: skip
            await node.request(ask, timeout_s=PATIENCE_S)
            report = await node.request(AskState(), timeout_s=PATIENCE_S)
            if isinstance(report, NodeReport) and report.arrived_bytes:
                return report
            await asyncio.sleep(0.2)
    raise AssertionError("not reached")


async def test_a_real_sidecar_is_cordoned_by_command_and_put_back(running: Running) -> None:
    headers = {"Authorization": f"Bearer {running.layout.admin_key.read_text().strip()}"}
    nodes = f"{running.mesh.url}/roost/v1/nodes"

    async def told(method: str, path: str) -> dict[str, Any]:
        body = {} if method == "POST" else None
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, nodes + path, json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            return await answer.json()  # type: ignore[no-any-return]

    async def until_it_is(state: str) -> None:
        async with asyncio.timeout(RECOVERY_S):
            while (await told("GET", "/local"))["state"] != state:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.1)

    await until_it_is("serving")
    assert (await told("POST", "/local/drain"))["state"] == "drained"
    before = next(one.identity for one in running.state.processes if one.name == "sidecar")
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    await running.until(lambda: not running.all_ready(), RECOVERY_S)
    await running.until(running.all_ready, RECOVERY_S)
    await until_it_is("drained")
    assert (await told("POST", "/local/uncordon"))["state"] == "serving"
    assert [node["node"] for node in (await told("GET", ""))["nodes"]] == ["local"]
