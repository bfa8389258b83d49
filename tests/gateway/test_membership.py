"""Nodes that join, leave, are cordoned and drained while requests run: real sockets, stand-in engines."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import zmq

from backends.process import free_port
from gateway import leases, membership
from gateway.fleet import Fleet
from gateway.membership import Membership, check_nodes, read_nodes
from gateway.nodes import NodeTable
from gateway.settings import GatewaySettings, NodeAddress
from wire import endpoints
from wire.curve import CurveKeys, make_keys
from wire.events import Scope
from wire.node import NodeDelta
from wire.outcomes import InvalidRequest

from . import stub_engine
from .fleet_states import BASE
from .mesh import Mesh, until
from .stub_sidecar import StubSidecar


def listed(file: Path, sidecars: Iterable[StubSidecar]) -> None:
    """Replace the nodes file, as an operator should."""
    tables = [msgspec.to_builtins(each.address) for each in sidecars]
    part = file.with_suffix(".part")
    part.write_text(tomli_w.dumps({"nodes": tables}))
    part.replace(file)


def look(mesh: Mesh) -> None:
    """Look at the file twice, as the gateway does within two seconds."""
    for _ in range(2):
        mesh.gateways[0]._members.look()


def names(mesh: Mesh) -> set[str]:
    return {node.name for node in mesh.gateways[0].nodes}


async def test_a_node_joins_by_the_file_and_takes_new_policies_only(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    mesh = Mesh(tmp_path, nodes=3, nodes_file=str(file))
    mesh.outside = [mesh.sidecars[2]]
    async with mesh:
        for number in range(12):
            mesh.publish(f"acme/old{number}")
            served = (await mesh.chat(f"acme/old{number}")).headers["x-roost-node"]
            sidecar = mesh.sidecars[int(served[1:])]
            sidecar.serving.add("acme@" + sidecar.acquired[-1].digest)
        for sidecar in mesh.sidecars[:2]:
            sidecar.announce()
        await until(lambda: sum(len(node.engines[f"{node.name}e0"].serving) for node in mesh.gateways[0].nodes) == 12)
        listed(file, mesh.outside)
        look(mesh)
        await until(lambda: all(node.heard for node in mesh.gateways[0].nodes) and names(mesh) == {"n0", "n1", "n2"})
        for number in range(12):
            await mesh.chat(f"acme/old{number}")
        assert mesh.sidecars[2].acquired == [], "what serves stays where it is"
        for number in range(12):
            mesh.publish(f"acme/new{number}")
            await mesh.chat(f"acme/new{number}")
        assert mesh.sidecars[2].acquired != []
        await mesh.all_leases_are_back()


async def test_a_node_leaves_without_hurting_the_requests_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nodes.toml"
    mesh = Mesh(tmp_path, nodes=2, nodes_file=str(file))
    mesh.outside = [mesh.sidecars[1]]
    listed(file, mesh.outside)
    async with mesh:
        leaving = mesh.sidecars[1]
        gateway = mesh.gateways[0]
        # the base goes where least is done: the other one is given something to do
        gateway.nodes["n0"].leased += 5
        release = asyncio.Event()

        async def slowly(
            engine: stub_engine.StubEngine, request: Any, body: dict[str, Any]
        ) -> stub_engine.web.StreamResponse:
            await release.wait()
            return await stub_engine.answer(engine, request, body)

        leaving.engines[0].scripts.append(slowly)
        monkeypatch.setattr(leases, "_GATHER_S", 0.1)
        asking = asyncio.ensure_future(mesh.chat(BASE))
        await until(lambda: len(leaving.held) == 1 and len(leaving.engines[0].asked) == 1)
        listed(file, [])
        look(mesh)
        assert names(mesh) == {"n0"}
        alive = len(leaving.alive)
        await until(lambda: len(leaving.alive) > alive)
        assert (await mesh.chat(BASE)).headers["x-roost-node"] == "n0"
        release.set()
        told = await asking
        assert (told.status, told.headers["x-roost-node"]) == (200, "n1")
        # its last release is still being gathered
        gateway._fleet._look_at_leaving()
        await mesh.all_leases_are_back()
        await until(lambda: "n1" not in gateway._fleet.requesters)
        listed(file, mesh.outside)
        look(mesh)
        await until(lambda: names(mesh) == {"n0", "n1"} and gateway.nodes["n1"].heard)


async def test_a_node_that_moves_is_found_at_its_new_address(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    mesh = Mesh(tmp_path, nodes_file=str(file))
    mesh.outside = [mesh.sidecar]
    listed(file, mesh.outside)
    async with mesh:
        assert (await mesh.chat(BASE)).status == 200
        mesh.sidecar.stop()
        mesh.sidecar.address = NodeAddress("n0", f"ipc://{tmp_path}/other.sock", f"ipc://{tmp_path}/other.feed")
        mesh.sidecar.start()
        listed(file, mesh.outside)
        look(mesh)
        await until(lambda: mesh.gateways[0].nodes["n0"].heard)
        assert (await mesh.chat(BASE)).status == 200
        await mesh.all_leases_are_back()


async def test_a_node_of_another_host_joins_over_tcp_with_its_key_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    ours, theirs, strangers = make_keys(), make_keys(), make_keys()
    curve = CurveKeys(public=ours[0], secret=ours[1], server_public=ours[0])
    mesh = Mesh(tmp_path, nodes=3, nodes_file=str(file), curve=curve)
    mesh.outside = list(mesh.sidecars)
    for sidecar, peers in zip(mesh.sidecars[:2], ((ours[0],), ()), strict=True):
        ports = [free_port("127.0.0.1") for _ in range(2)]
        sidecar.address = NodeAddress(
            sidecar.address.name, f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", theirs[0]
        )
        sidecar.curve = CurveKeys(public=theirs[0], secret=theirs[1], peers=peers)
    # the third has the right address and another's key
    mesh.sidecars[2].curve = CurveKeys(public=strangers[0], secret=strangers[1], peers=(ours[0],))
    mesh.sidecars[2].address = msgspec.structs.replace(mesh.sidecars[2].address, public=theirs[0])
    async with mesh:
        listed(file, mesh.outside)
        look(mesh)
        nodes = mesh.gateways[0].nodes
        await until(lambda: nodes["n0"].heard)
        for _ in range(5):
            assert (await mesh.chat(BASE)).headers["x-roost-node"] == "n0"
        assert not nodes["n1"].heard, "it does not know our key"
        assert not nodes["n2"].heard, "it has not the key that we know"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "nodes = 3",
        "[[nodes]]\nname = 'n9'",
        "[[nodes]]\nname = 'UPPER'\nendpoint = 'ipc:///a'\nfeed_endpoint = 'ipc:///b'",
        "[[nodes]]\nname = 'n9'\nendpoint = 'udp://a'\nfeed_endpoint = 'ipc:///b'",
        "[[nodes]]\nname = 'n9'\nendpoint = 'tcp://a:1'\nfeed_endpoint = 'tcp://a:2'\npublic = 'k'",
        "[[nodes]]\nname = 'n0'\nendpoint = 'ipc:///a'\nfeed_endpoint = 'ipc:///b'",
        "\xff",
    ],
    ids=["empty", "no list", "half", "name", "endpoint", "no keys of ours", "a name of the settings", "no text"],
)
async def test_a_file_that_can_not_stand_changes_nothing_and_is_told(tmp_path: Path, content: str) -> None:
    file = tmp_path / "nodes.toml"
    mesh = Mesh(tmp_path, nodes=2, nodes_file=str(file))
    mesh.outside = [mesh.sidecars[1]]
    listed(file, mesh.outside)
    async with mesh:
        file.write_bytes(content.encode("latin-1"))
        look(mesh)
        assert names(mesh) == {"n0", "n1"}
        assert (await mesh.ask("GET", "/roost/v1/nodes", headers=mesh.key("*"))).json["trouble"]
        file.unlink()
        look(mesh)
        assert names(mesh) == {"n0", "n1"}, "a file that goes away takes nobody with it"
        listed(file, [])
        look(mesh)
        assert names(mesh) == {"n0"}
        assert (await mesh.ask("GET", "/roost/v1/nodes", headers=mesh.key("*"))).json["trouble"] == ""


@pytest.mark.parametrize("change", [{"public": "no key"}, {"endpoint": "tcp://127.0.0.1:99999"}])
async def test_a_node_that_is_there_stays_where_its_new_address_can_not_stand(
    tmp_path: Path, change: dict[str, str]
) -> None:
    file = tmp_path / "nodes.toml"
    ours, theirs = make_keys(), make_keys()
    mesh = Mesh(tmp_path, nodes=2, nodes_file=str(file), curve=CurveKeys(*ours, server_public=ours[0]))
    far = mesh.sidecars[1]
    mesh.outside = list(mesh.sidecars)
    ports = [free_port("127.0.0.1") for _ in range(2)]
    far.address = NodeAddress("n1", f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}", theirs[0])
    far.curve = CurveKeys(*theirs, peers=(ours[0],))
    mesh.sidecar.curve = far.curve
    mesh.sidecar.address = msgspec.structs.replace(mesh.sidecar.address, public=theirs[0])
    listed(file, mesh.outside)
    async with mesh:
        node = mesh.gateways[0].nodes["n1"]
        good, far.address = far.address, msgspec.structs.replace(far.address, **change)
        listed(file, mesh.outside)
        look(mesh)
        assert mesh.gateways[0]._members.trouble.startswith(f"nodes[1].{next(iter(change))}")
        assert mesh.gateways[0].nodes["n1"] is node
        assert node.heard
        far.address = good
        listed(file, mesh.outside)
        look(mesh)
        assert mesh.gateways[0]._members.trouble == ""
        assert mesh.gateways[0].nodes["n1"] is node


@contextmanager
def following(file: Path) -> Iterator[tuple[Membership, NodeTable, Fleet]]:
    settings = GatewaySettings(
        name="g", catalog_dir="c", store_dir="s", registrar_endpoint="ipc:///r", nodes=(), nodes_file=str(file)
    )
    table = NodeTable()
    fleet = Fleet((), table, gateway="g", instance="i", curve=None)
    try:
        yield Membership(settings, fleet), table, fleet
    finally:
        fleet.close()


def list_many(file: Path, count: int) -> None:
    part = file.with_suffix(".part")
    folder = file.parent
    part.write_text(
        tomli_w.dumps(
            {
                "nodes": [
                    {"name": f"n{i}", "endpoint": f"ipc://{folder}/a{i}", "feed_endpoint": f"ipc://{folder}/b{i}"}
                    for i in range(count)
                ]
            }
        )
    )
    part.replace(file)


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip(f"needs 4000 open files, and this process may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_fleet_of_hundreds_of_nodes_joins_and_leaves(tmp_path: Path, many_files: None) -> None:
    file = tmp_path / "nodes.toml"
    with following(file) as (members, table, _):
        for count in (400, 1, 400):
            list_many(file, count)
            for _ in range(2):
                members.look()
            assert (members.trouble, len(table)) == ("", count)


async def test_what_no_socket_is_left_for_changes_nothing_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    small.set(zmq.MAX_SOCKETS, 40)
    monkeypatch.setattr(endpoints, "shared_context", lambda: small)
    file = tmp_path / "nodes.toml"
    with following(file) as (members, table, fleet):
        list_many(file, 3)
        for _ in range(2):
            members.look()
        before = tuple(table)
        for count in (40, 30):
            list_many(file, count)
            for _ in range(3):
                members.look()
            assert "cannot make another socket" in members.trouble
            assert tuple(table) == before
            assert len(fleet.addresses) == 3
        list_many(file, 4)

        def stands() -> bool:
            members.look()
            return (members.trouble, len(table)) == ("", 4)

        # a socket that was closed is there again a moment later
        await until(stands)
        list_many(file, 40)
        for _ in range(2):
            members.look()
        assert members.trouble
        # no look is needed at another file: the same one stands once there are sockets
        monkeypatch.setattr(endpoints, "shared_context", zmq.Context.instance)
        members.look()
        assert (members.trouble, len(table)) == ("", 40)
    small.destroy()


async def test_membership_outlives_whatever_goes_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_EVERY_S", 0.01)
    file = tmp_path / "nodes.toml"
    with following(file) as (members, table, fleet):
        task = asyncio.ensure_future(members.run())
        with monkeypatch.context() as broken:
            broken.setattr(fleet, "update", lambda _: {}["no such thing"])
            list_many(file, 2)
            await until(lambda: "no such thing" in members.trouble)
        await until(lambda: members.trouble == "" and len(table) == 2)
        task.cancel()


async def test_a_file_is_read_once_it_has_settled(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    mesh = Mesh(tmp_path, nodes=2, nodes_file=str(file))
    mesh.outside = [mesh.sidecars[1]]
    async with mesh:
        members = mesh.gateways[0]._members
        listed(file, mesh.outside)
        members.look()
        assert names(mesh) == {"n0"}
        members.look()
        assert names(mesh) == {"n0", "n1"}


async def test_one_sidecar_under_two_names_is_one_node(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    mesh = Mesh(tmp_path, nodes_file=str(file))
    there = mesh.sidecar.address
    other = [endpoint.replace("ipc:///", "ipc:////") for endpoint in (there.endpoint, there.feed_endpoint)]
    async with mesh:
        file.write_text(tomli_w.dumps({"nodes": [{"name": "n9", "endpoint": other[0], "feed_endpoint": other[1]}]}))
        look(mesh)
        gateway = mesh.gateways[0]
        await until(lambda: bool(gateway._fleet.troubles))
        told = (await mesh.ask("GET", "/roost/v1/nodes", headers=mesh.key("*"))).json
        assert "n9" in told["trouble"]
        assert "is node n0" in told["trouble"]
        assert {node["node"]: node["engines_ready"] for node in told["nodes"]} == {"n0": 1, "n9": 0}
        assert {(await mesh.chat(BASE)).headers["x-roost-node"] for _ in range(4)} == {"n0"}
        await mesh.all_leases_are_back()
        assert len(mesh.sidecar.told) == 1, "nothing is told of what is held of n9"


def test_two_nodes_have_no_endpoint_in_common() -> None:
    nodes = [NodeAddress("n0", "ipc:///a", "ipc:///b"), NodeAddress("n1", "ipc:///c", "ipc:///b")]
    with pytest.raises(InvalidRequest, match=r"nodes\[1\].feed_endpoint: it is node n0's already"):
        check_nodes(nodes, curve=True, field="nodes")


def test_over_tcp_a_node_needs_its_key() -> None:
    node = NodeAddress("n0", "tcp://10.0.0.1:1", "tcp://10.0.0.1:2", make_keys()[0])
    check_nodes([node], curve=True, field="nodes")
    for nodes, curve in (([node], False), ([NodeAddress("n0", node.endpoint, node.feed_endpoint)], True)):
        with pytest.raises(InvalidRequest, match=r"nodes\[0\].endpoint: over TCP this needs"):
            check_nodes(nodes, curve=curve, field="nodes")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nodes\.toml: No such file"):
        read_nodes(tmp_path / "nodes.toml")


def test_without_a_file_there_is_nothing_to_follow() -> None:
    settings = GatewaySettings(name="g", catalog_dir="c", store_dir="s", registrar_endpoint="ipc:///r", nodes=())
    members = Membership(settings, None)  # type: ignore[arg-type]
    members.look()
    assert members.trouble == ""


async def test_a_cordoned_node_gets_nothing_new_from_any_gateway_until_it_is_back(tmp_path: Path) -> None:
    async with Mesh(tmp_path, nodes=2, gateways=2) as mesh:
        admin = mesh.key("*")
        mesh.publish("acme/bot")
        first = (await mesh.chat("acme/bot")).headers["x-roost-node"]
        await mesh.all_leases_are_back()
        told = await mesh.ask("POST", f"/roost/v1/nodes/{first}/cordon", json={}, headers=admin)
        assert (told.status, told.json["state"]) == (200, "drained")
        assert (await mesh.chat("acme/bot")).headers["x-roost-node"] != first
        await until(lambda: mesh.gateways[1].nodes[first].draining)
        assert (await mesh.chat("acme/bot", gateway=1)).headers["x-roost-node"] != first
        told = await mesh.ask("POST", f"/roost/v1/nodes/{first}/uncordon", json={}, headers=admin)
        assert (told.status, told.json["state"]) == (200, "serving")
        assert (await mesh.chat("acme/bot")).headers["x-roost-node"] == first


async def test_a_drain_waits_for_the_last_request(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        admin = mesh.key("*")
        mesh.engine.scripts.append(stub_engine.go_on_for_ever)
        async with mesh.streaming(BASE):
            mesh.sidecar.announce()
            told = await mesh.ask("POST", "/roost/v1/nodes/n0/drain", json={"wait_s": 0.1}, headers=admin)
            assert (told.json["state"], told.json["leases"]) == ("cordoned", 1)
            refused = await mesh.chat(BASE)
            assert (refused.status, refused.error["type"]) == (503, "no_healthy_node")
            draining = asyncio.ensure_future(
                mesh.ask("POST", "/roost/v1/nodes/n0/drain", json={"wait_s": 20}, headers=admin)
            )
            await asyncio.sleep(0.05)
            assert not draining.done()
        mesh.sidecar.publish(NodeDelta(node="n0", loads_queued=1))
        await mesh.all_leases_are_back()
        mesh.sidecar.publish(NodeDelta(node="n0", engines=mesh.sidecar.report().engines))
        await asyncio.sleep(0.2)
        assert not draining.done(), "a load that waits ends in a request"
        mesh.sidecar.publish(NodeDelta(node="n0", loads_queued=0))
        assert (await draining).json["state"] == "drained"


async def test_a_drain_ends_where_the_node_is_put_back_meanwhile(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        admin = mesh.key("*")
        mesh.engine.scripts.append(stub_engine.go_on_for_ever)
        async with mesh.streaming(BASE):
            mesh.sidecar.announce()
            path = "/roost/v1/nodes/n0"
            draining = asyncio.ensure_future(mesh.ask("POST", f"{path}/drain", json={"wait_s": 20}, headers=admin))
            await until(lambda: mesh.sidecar.draining)
            await mesh.ask("POST", f"{path}/uncordon", json={}, headers=admin)
            assert (await draining).json["state"] == "serving"
        await mesh.all_leases_are_back()


async def test_nodes_are_for_who_runs_the_fleet(tmp_path: Path) -> None:
    async with Mesh(tmp_path, anonymous=False) as mesh:
        asks = [("GET", "nodes"), ("GET", "nodes/n0"), *(("POST", f"nodes/n0/{a}") for a in ("cordon", "drain"))]
        for method, path in asks:
            for key, status in (({}, 401), (mesh.key("acme"), 403), (mesh.key("*", Scope.INVOKE), 403)):
                assert (await mesh.ask(method, f"/roost/v1/{path}", headers=key, json={})).status == status
        assert mesh.sidecar.draining is False
        admin = mesh.key("*")
        for method, path in (("GET", "nodes/n9"), ("POST", "nodes/n9/cordon")):
            told = await mesh.ask(method, f"/roost/v1/{path}", headers=admin, json={})
            assert (told.status, told.error["param"]) == (404, "name")
        told = await mesh.ask("POST", "/roost/v1/nodes/n0/drain", headers=admin, json={"wait_s": 1e9})
        assert (told.status, told.error["param"]) == (400, "wait_s")


async def test_a_node_that_is_away_is_not_cordoned_in_silence(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.sidecar.stop()
        await until(lambda: mesh.gateways[0].nodes["n0"].doubtful)
        told = await mesh.ask("POST", "/roost/v1/nodes/n0/cordon", json={}, headers=mesh.key("*"))
        assert (told.status, told.error["type"]) == (503, "no_healthy_node")


async def test_a_node_is_told_what_is_held_of_it_when_it_comes_back(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        await until(lambda: bool(mesh.sidecar.told))
        mesh.engine.scripts.append(stub_engine.go_on_for_ever)
        async with mesh.streaming("acme/bot"):
            asked = mesh.sidecar.acquired[0]
            mesh.sidecar.told.clear()
            mesh.sidecar.stop()
            await until(lambda: mesh.gateways[0].nodes["n0"].doubtful)
            mesh.sidecar.start()
            await until(lambda: bool(mesh.sidecar.told))
            told = mesh.sidecar.told[0]
            held = told.leases[0]
            assert (told.gateway, told.instance) == (asked.gateway, asked.instance)
            assert (held.lease, held.engine, held.adapter) == (asked.lease, "n0e0", f"acme@{asked.digest}")
            assert told.newest == asked.lease
            assert 0 < held.ttl_s <= asked.ttl_s
        await mesh.all_leases_are_back()
        desk = mesh.gateways[0]._leases
        await until(lambda: desk.holding("n0").leases == ())
        assert desk.holding("n0").newest == asked.lease
