"""The connections to nodes: state is kept current through restarts and gaps, leases go out and come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway import fleet
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


async def test_releases_travel_together(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        told = await asyncio.gather(*(mesh.chat(BASE) for _ in range(50)))
        assert {answer.status for answer in told} == {200}
        await mesh.all_leases_are_back()
        released = mesh.sidecar.released
        assert sorted(released) == sorted(ask.lease for ask in mesh.sidecar.acquired)
        assert len(set(released)) == 50
