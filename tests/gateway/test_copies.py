"""Copies of busy policies: made beside the requests, which neither wait for them nor fail with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway import copies
from gateway.copies import Copies
from gateway.leases import LeaseDesk
from gateway.nodes import NodeTable
from gateway.resolve import Target
from wire.outcomes import KnownBad, NoHealthyNode, Outcome

from . import stub_sidecar
from .fleet_states import demand
from .mesh import Mesh, until
from .test_leases import Peer, granted, refused

TARGET = Target(demand(), "acme/bot@1", 10)


@pytest.mark.parametrize(
    "answer", [refused(Outcome.UNFIT), refused(Outcome.KNOWN_BAD, elsewhere=True), NoHealthyNode("gone")]
)
async def test_a_node_that_makes_none_is_left_alone_for_a_while_and_the_next_is_asked(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, nodes = {"a": Peer(), "b": Peer()}, NodeTable(["a", "b"])
    peers["a"].answer, peers["b"].answer = answer, granted
    desk = LeaseDesk(peers, gateway="g", instance="i")  # type: ignore[arg-type]
    making = Copies(desk, 1.0)
    making.make(nodes, TARGET)
    # one copy at a time from each of them
    making.make([nodes["a"]], TARGET)
    await until(lambda: not making._tasks)
    assert (len(peers["a"].asked), len(peers["b"].asked)) == (1, 0)
    for number in (1, 2):
        making.make(nodes, TARGET)
        await until(lambda: not making._tasks)
        await until(lambda: len(peers["b"].released) == number)  # noqa: B023 - awaited here
    assert len(peers["a"].asked) == 1
    assert nodes["b"].leased == 0
    monkeypatch.setattr(copies, "_PAUSE_S", 0.0)
    making._not_before = dict.fromkeys(making._not_before, 0.0)
    making.make(nodes, TARGET)
    await until(lambda: len(peers["a"].asked) == 2)


async def test_what_is_remembered_of_failures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_PAUSE_S", -1.0)
    monkeypatch.setattr(copies, "_REMEMBERED", 10)
    peer, nodes = Peer(), NodeTable(["a"])
    peer.answer = KnownBad("no")
    making = Copies(LeaseDesk({"a": peer}, gateway="g", instance="i"), 1.0)  # type: ignore[dict-item]
    for number in range(50):
        making.make(nodes, Target(demand(number=number), f"acme/bot@{number}", 10))
    await until(lambda: not making._tasks)
    assert len(making._not_before) <= 11


@pytest.mark.parametrize("script", [stub_sidecar.refuse(Outcome.UNFIT), stub_sidecar.keep_waiting])
async def test_a_hot_policy_is_answered_whatever_becomes_of_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: stub_sidecar.Script
) -> None:
    async with Mesh(tmp_path, nodes=2) as mesh:
        mesh.publish("acme/bot")
        first = (await mesh.chat("acme/bot")).headers["x-roost-node"]
        sidecar = mesh.sidecars[int(first[1:])]
        other = mesh.sidecars[1 - int(first[1:])]
        ask = sidecar.acquired[0]
        adapter = f"acme@{ask.digest}"
        sidecar.serving.add(adapter)
        sidecar.announce()
        nodes = mesh.gateways[0].nodes
        await until(lambda: any(adapter in engine.serving for engine in nodes[first].engines.values()))
        monkeypatch.setattr(nodes.popularity, "replicas", lambda _: 2)
        other.scripts.extend([script] * 20)
        for _ in range(20):
            told = await mesh.chat("acme/bot")
            assert (told.status, told.headers["x-roost-node"]) == (200, first)
        assert len(other.acquired) == 1, "and it is asked for once"
