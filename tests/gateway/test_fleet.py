"""The connections to nodes: state is kept current through restarts and gaps, leases go out and come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway import fleet, signs
from gateway.nodes import Node
from wire.node import NodeDelta, Residency

from . import stub_sidecar
from .fleet_states import BASE, digest_of
from .mesh import Mesh, until


def node_of(mesh: Mesh, name: str = "n0") -> Node:
    return mesh.gateways[0].nodes[name]


async def test_deltas_and_full_states_arrive(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        node = node_of(mesh)
        mesh.sidecar.publish(NodeDelta(node="n0", residency={digest_of(1): Residency.RESIDENT}))
        await until(lambda: node.holds(digest_of(1)))
        mesh.sidecar.announce()
        await until(lambda: not node.holds(digest_of(1)))


async def test_a_gateway_says_that_it_lives_and_which_life_it_is(tmp_path: Path) -> None:
    async with Mesh(tmp_path, gateways=2) as mesh:
        await until(lambda: {alive.gateway for alive in mesh.sidecar.alive} == {"g0", "g1"})
        assert len({alive.instance for alive in mesh.sidecar.alive}) == 2


async def test_a_node_that_is_away_has_no_other_told_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs, "_RETRY_S", 0.02)
    async with Mesh(tmp_path, nodes=2) as mesh:
        mesh.sidecars[1].stop()
        await until(lambda: node_of(mesh, "n1").doubtful)
        before = len(mesh.sidecar.alive)
        await asyncio.sleep(0.5)
        assert len(mesh.sidecar.alive) <= before + 1
        mesh.sidecars[1].start()
        heard = len(mesh.sidecars[1].alive)
        await until(lambda: len(mesh.sidecars[1].alive) > heard)


async def test_one_sign_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "_EVERY_S", 0.05)
    async with Mesh(tmp_path) as mesh:
        link = mesh.gateways[0]._fleet._links["n0"]
        with monkeypatch.context() as broken:
            failed = asyncio.Event()
            broken.setattr(link.requester, "send", lambda _: failed.set() or {}["no such thing"])
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            await failed.wait()
        before = len(mesh.sidecar.alive)
        await until(lambda: len(mesh.sidecar.alive) > before)


async def test_a_restarted_sidecar_is_asked_for_its_state(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        node = node_of(mesh)
        mesh.sidecar.resident[digest_of(1)] = Residency.RESIDENT
        mesh.sidecar.announce()
        await until(lambda: node.holds(digest_of(1)))
        mesh.sidecar.stop()
        await until(lambda: node.doubtful)
        mesh.sidecar.resident.clear()
        mesh.sidecar.start()
        await until(lambda: not node.doubtful)
        assert node.epoch == mesh.sidecar.epoch
        assert not node.holds(digest_of(1))
        assert (await mesh.chat("acme/bot")).status == 200


async def test_the_only_sidecar_may_restart_while_it_is_asked(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.sidecar.scripts.append(stub_sidecar.keep_waiting)
        asking = asyncio.ensure_future(mesh.chat("acme/bot"))
        await until(lambda: len(mesh.sidecar.acquired) == 1)
        mesh.sidecar.stop()
        await until(lambda: node_of(mesh).doubtful)
        later = asyncio.ensure_future(mesh.chat("acme/bot"))
        await asyncio.sleep(0.1)
        mesh.sidecar.start()
        assert (await asking).status == 200
        assert (await later).status == 200
        await mesh.all_leases_are_back()


async def test_another_node_takes_over_from_a_sidecar_that_goes(tmp_path: Path) -> None:
    async with Mesh(tmp_path, nodes=2) as mesh:
        mesh.publish("acme/bot")
        first = (await mesh.chat("acme/bot")).headers["x-roost-node"]
        sidecar = next(sidecar for sidecar in mesh.sidecars if sidecar.address.name == first)
        sidecar.scripts.append(stub_sidecar.keep_waiting)
        asking = asyncio.ensure_future(mesh.chat("acme/bot"))
        await until(lambda: len(sidecar.acquired) == 2)
        sidecar.stop()
        told = await asking
        assert (told.status, told.headers["x-roost-node"] != first) == (200, True)
        assert (await mesh.chat("acme/bot")).headers["x-roost-node"] != first


async def test_a_sidecar_that_stays_away_is_unhealthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "GRACE_S", 0.2)
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.sidecar.stop()
        await until(lambda: not node_of(mesh).heard)
        told = await mesh.chat("acme/bot")
        assert (told.status, told.error["type"], told.headers["retry-after"]) == (503, "no_healthy_node", "2")
        assert (await mesh.ask("GET", "/readyz")).status == 503
        mesh.sidecar.start()
        await until(lambda: node_of(mesh).heard)
        assert (await mesh.chat("acme/bot")).status == 200


async def test_a_lost_report_is_made_up_for(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        node = node_of(mesh)
        feed = mesh.sidecar._feed
        assert feed is not None
        # a number that nobody got: the next heartbeat shows it
        feed.number += 1
        mesh.sidecar.resident[digest_of(2)] = Residency.RESIDENT
        await until(lambda: node.holds(digest_of(2)))


async def test_a_state_older_than_what_the_feed_told_is_asked_for_again(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        node = node_of(mesh)
        old = mesh.sidecar.report()
        mesh.sidecar.resident[digest_of(1)] = Residency.RESIDENT
        mesh.sidecar.publish(NodeDelta(node="n0", residency=mesh.sidecar.resident))
        await until(lambda: node.holds(digest_of(1)))
        mesh.sidecar.states.append(old)
        asked = mesh.sidecar.asked_for_state
        mesh.gateways[0]._fleet._links["n0"].ask_state()
        await until(lambda: mesh.sidecar.asked_for_state >= asked + 1)
        for _ in range(20):
            assert node.holds(digest_of(1))
            await asyncio.sleep(0.005)
        assert mesh.sidecar.asked_for_state == asked + 2


async def test_a_delta_that_a_state_holds_already_changes_nothing(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        node = node_of(mesh)
        state = msgspec.structs.replace(mesh.sidecar.report(), number=1, resident={digest_of(2): Residency.SERVING})
        mesh.sidecar.states.append(state)
        mesh.gateways[0]._fleet._links["n0"].ask_state()
        await until(lambda: node.holds(digest_of(2)))
        mesh.sidecar.publish(NodeDelta(node="n0", residency={digest_of(2): Residency.ABSENT}))
        mesh.sidecar.publish(NodeDelta(node="n0", residency={digest_of(3): Residency.RESIDENT}))
        await until(lambda: node.holds(digest_of(3)))
        assert node.holds(digest_of(2))


async def test_two_silences_before_a_state_are_forgotten_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "GRACE_S", 0.3)
    async with Mesh(tmp_path) as mesh:
        node, link = node_of(mesh), mesh.gateways[0]._fleet._links["n0"]
        link._on_silence()
        await asyncio.sleep(0.05)
        link._on_silence()
        link.ask_state()
        await until(lambda: not node.doubtful)
        await asyncio.sleep(0.5)
        assert node.heard
        assert not node.doubtful


async def test_no_address_of_ours_is_told_to_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "GRACE_S", 0.2)
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.sidecar.scripts.append(stub_sidecar.keep_waiting)
        late = await mesh.chat("acme/bot", headers={"x-request-timeout": "0.2"})
        await mesh.engine.stop()
        broken = await mesh.chat("acme/bot")
        mesh.sidecar.stop()
        gone = await mesh.chat("acme/bot")
        mesh.stop_registrar()
        body = {"policy": "acme/other", "base": BASE}
        unknown = await mesh.ask("POST", "/roost/v1/policies", json=body)
        told = [answer.error for answer in (late, broken, gone, unknown)]
        types = [error["type"] for error in told]
        assert types == ["deadline", "engine_failed", "no_healthy_node", "journal_unavailable"]
        for error in told:
            assert str(tmp_path) not in error["message"]
            assert "ipc:" not in error["message"]
            assert "127.0.0.1" not in error["message"]


async def test_releases_travel_together(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        told = await asyncio.gather(*(mesh.chat(BASE) for _ in range(50)))
        assert {answer.status for answer in told} == {200}
        await mesh.all_leases_are_back()
        released = mesh.sidecar.released
        assert sorted(released) == sorted(ask.lease for ask in mesh.sidecar.acquired)
        assert len(set(released)) == 50
