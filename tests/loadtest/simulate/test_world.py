"""The real gateways' and sidecars' code in the simulator: right answers, exact books, the same course for a seed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from gateway.leases import LeaseDesk
from loadtest.simulate.catalog import MemoryCatalog, digest_of
from loadtest.simulate.client import Ask, Client, Patience, Result
from loadtest.simulate.clock import simulate
from loadtest.simulate.sockets import sockets
from loadtest.simulate.world import Shape, World
from loadtest.traffic import policy_names
from tests.loadtest.simulate.support import constants, forget_releases, quick
from wire.node import Cordon

SHAPE = Shape(nodes=2, slots=4, gateways=2, arena=6)
SETTLE_S = 40.0


def world(policies: int = 12, *, shape: Shape = SHAPE, seed: int = 1, **changes: Any) -> tuple[World, list[str]]:
    made = World(shape, quick(**changes), seed=seed)
    names = policy_names(policies)
    for name in names:
        cast(MemoryCatalog, made.catalog).publish(name)
    return made, names


def run(scene: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return simulate(scene)


def test_more_policies_than_slots_are_all_answered_by_themselves() -> None:
    async def scene() -> tuple[list[Result], list[str], World]:
        fleet, names = world()
        await fleet.start()
        results = await Client(fleet).run_closed([Ask(0.0, name) for name in names * 4], 10)
        await asyncio.sleep(SETTLE_S)
        return results, fleet.leaks(), fleet

    results, leaks, fleet = run(scene)
    assert Counter(one.status for one in results) == {200: 48}
    assert not any(one.wrong for one in results)
    assert leaks == []
    assert fleet.store.fetched.keys() == {digest_of(name, 1) for name in policy_names(12)}


def test_the_first_request_waits_for_its_load_and_the_second_does_not() -> None:
    async def scene() -> list[Result]:
        fleet = World(Shape(nodes=1, slots=2), constants(step_s=1.0, install_s=2.0, fetch_s=0.5), seed=1)
        cast(MemoryCatalog, fleet.catalog).publish("a/one")
        await fleet.start()
        client = Client(fleet)
        loop = asyncio.get_running_loop()
        return [await client.one(Ask(0.0, "a/one", tokens=3), loop.time()) for _ in range(2)]

    cold, warm = run(scene)
    # three steps of a second; before them half a second of storage and two in the engine
    assert warm.total_s == pytest.approx(3.0, abs=0.01)
    assert cold.total_s == pytest.approx(5.5, abs=0.01)
    assert (warm.first_s, cold.first_s) == (pytest.approx(1.0, abs=0.01), pytest.approx(3.5, abs=0.01))


def test_past_the_bound_a_client_is_told_when_to_come_back_and_then_gets_in() -> None:
    async def scene() -> tuple[list[Result], list[str]]:
        shape = msgspec.structs.replace(
            SHAPE, settings={"loads_in_flight": 1, "loads_queued": 1, "loads_queued_s": 0.0}
        )
        fleet, names = world(shape=shape)
        await fleet.start()
        results = await Client(fleet).run_open([Ask(0.0, name) for name in names])
        await asyncio.sleep(SETTLE_S)
        return results, fleet.leaks()

    results, leaks = run(scene)
    assert Counter(one.status for one in results) == {200: 12}
    assert sum(len(one.refusals) for one in results) > 0
    assert all(told.said_s >= 1.0 and told.true_s > told.said_s for one in results for told in one.refusals)
    assert leaks == []


def test_a_client_without_patience_takes_the_refusal() -> None:
    async def scene() -> list[Result]:
        shape = msgspec.structs.replace(
            SHAPE, settings={"loads_in_flight": 1, "loads_queued": 1, "loads_queued_s": 0.0}
        )
        fleet, names = world(shape=shape)
        await fleet.start()
        return await Client(fleet, Patience(retries=0)).run_open([Ask(0.0, name) for name in names])

    statuses = Counter(one.status for one in run(scene))
    assert statuses.keys() == {200, 429}


def test_clients_that_leave_give_everything_back() -> None:
    async def scene() -> tuple[list[int], list[str]]:
        fleet, names = world()
        await fleet.start()
        client = Client(fleet)
        loop = asyncio.get_running_loop()
        asks = [client.one(Ask(0.0, name, 50), loop.time(), give_up_s=0.05 * place) for place, name in enumerate(names)]
        results = await asyncio.gather(*asks)
        await asyncio.sleep(SETTLE_S)
        return [one.status for one in results], fleet.leaks()

    statuses, leaks = run(scene)
    assert 499 in statuses
    assert leaks == []


def test_a_new_revision_answers_from_the_next_request_on() -> None:
    async def scene() -> tuple[list[Result], int]:
        fleet, names = world(1)
        await fleet.start()
        client = Client(fleet)
        loop = asyncio.get_running_loop()
        before = await client.one(Ask(0.0, names[0]), loop.time())
        cast(MemoryCatalog, fleet.catalog).publish(names[0])
        after = await client.one(Ask(0.0, names[0]), loop.time())
        old = await client.one(Ask(0.0, f"{names[0]}@1"), loop.time())
        return [before, after, old], len(fleet.store.fetched)

    results, fetched = run(scene)
    assert [(one.status, one.wrong) for one in results] == [(200, False)] * 3
    assert fetched == 2


@pytest.mark.parametrize("fault", ["kill_sidecar", "kill_engine"])
def test_a_node_that_lost_a_process_serves_again(fault: str) -> None:
    async def scene() -> tuple[list[Result], list[str]]:
        fleet, names = world()
        await fleet.start()
        loop = asyncio.get_running_loop()
        node = fleet.nodes[0]
        loop.call_later(1.0, getattr(node, fault))
        if fault == "kill_sidecar":
            loop.call_later(3.0, node.start)
        asks = [Ask(place * 0.05, name) for place, name in enumerate(names * 20)]
        results = await Client(fleet, Patience(resends=20)).run_open(asks)
        await asyncio.sleep(SETTLE_S)
        assert any(one.node == node.name for one in results[-60:])
        return results, fleet.leaks()

    results, leaks = run(scene)
    assert Counter(one.status for one in results) == {200: 240}
    assert not any(one.wrong for one in results)
    assert leaks == []


def test_a_gateway_that_dies_leaves_no_lease() -> None:
    async def scene() -> list[str]:
        fleet, names = world()
        await fleet.start()
        client = Client(fleet)
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(client.one(Ask(0.0, name, 200), loop.time(), give_up_s=60.0)) for name in names]
        await asyncio.sleep(1.0)
        assert sum(len(node.sidecar.machine.state.leases) for node in fleet.nodes if node.sidecar) > 0
        fleet.gateways[0].crash()
        fleet.gateways[0].start()
        await asyncio.gather(*asked)
        await asyncio.sleep(SETTLE_S)
        return fleet.leaks()

    assert run(scene) == []


def test_a_cordoned_node_stays_so_over_its_sidecars_death_and_in_its_own_world_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shape = msgspec.structs.replace(SHAPE, settings={"run_dir": str(folder)})

    async def scene() -> tuple[bool, bool]:
        fleet, _ = world(shape=shape)
        await fleet.start()
        node = fleet.nodes[0]
        operator = sockets(fleet.network, "operator").requester(node.settings.endpoint, Any, Any, peer=node.name)
        await operator.request(Cordon(on=True), timeout_s=5.0)
        node.kill_sidecar()
        await asyncio.sleep(1.0)
        node.start()
        other, _ = world(shape=shape)
        await other.start()
        assert node.sidecar is not None
        assert other.nodes[0].sidecar is not None
        return node.sidecar.machine.state.cordoned, other.nodes[0].sidecar.machine.state.cordoned

    assert run(scene) == (True, False)
    assert not folder.exists(), "nothing is written to this machine"


def test_what_is_not_given_back_is_told() -> None:
    """The books would show it: a lease held, bytes pinned, a slot that holds something else."""

    async def scene() -> list[str]:
        fleet, names = world(2)
        await fleet.start()
        await Client(fleet).run_closed([Ask(0.0, name) for name in names], 1)
        await asyncio.sleep(5.0)
        assert fleet.leaks() == []
        holder = next(node for node in fleet.nodes if node.sidecar and len(list(node.sidecar.machine.state.cache)))
        assert holder.sidecar is not None
        state = holder.sidecar.machine.state
        digest = next(iter(state.cache))
        state.cache.pin(digest, "nobody")
        engine = next(iter(holder.engines.values())).model
        assert engine is not None
        engine.contents[next(iter(engine.contents))] = "other bytes"
        fleet.gateways[0].nodes[holder.name].leased += 1
        return fleet.leaks()

    leaks = run(scene)
    for what in ("pinned for nobody", "other bytes in the slot", "counts 1 leases"):
        assert any(what in leak for leak in leaks), leaks


@pytest.mark.parametrize("late_s", [None, 20.0])
def test_a_release_that_is_lost_shows(monkeypatch: pytest.MonkeyPatch, late_s: float | None) -> None:
    """Also where the gateway makes up for it before anybody looks, by telling all that it holds."""

    async def scene() -> list[str]:
        fleet, names = world()
        await fleet.start()
        with monkeypatch.context() as broken:
            broken.setattr(LeaseDesk, "flush", forget_releases)
            await Client(fleet).run_closed([Ask(0.0, name) for name in names[:4]], 2)
            await asyncio.sleep(1.0)
        if late_s is not None:
            for gateway in fleet.gateways:
                for node in fleet.nodes:
                    requester = sockets(fleet.network, gateway.name).requester(
                        node.settings.endpoint, Any, Any, peer=node.name
                    )
                    await asyncio.sleep(1.0)
                    assert requester.send(gateway.leases.holding(node.name))
        await asyncio.sleep(SETTLE_S)
        return fleet.leaks()

    assert run(scene)


def test_a_slot_written_over_shows_as_a_wrong_answer() -> None:
    async def scene() -> Result:
        fleet, names = world(1)
        await fleet.start()
        client = Client(fleet)
        loop = asyncio.get_running_loop()
        await client.one(Ask(0.0, names[0]), loop.time())

        def spoil() -> None:
            for node in fleet.nodes:
                for engine in node.engines.values():
                    assert engine.model is not None
                    for slot in engine.model.contents:
                        engine.model.contents[slot] = "other bytes"

        loop.call_later(0.1, spoil)
        return await client.one(Ask(0.0, names[0], tokens=20), loop.time())

    result = run(scene)
    assert (result.status, result.wrong) == (200, True)


_COURSE = """
import asyncio, json, random
from loadtest.chaos import chaos, FLEET
from loadtest.simulate.clock import simulate
from tests.loadtest.simulate.support import quick
import sys, tempfile, pathlib
with tempfile.TemporaryDirectory() as folder:
    course = simulate(lambda: chaos(quick(), FLEET, pathlib.Path(folder), int(sys.argv[1]), seconds=120.0, rate=2.0,
                                    every_s=8.0))
print(json.dumps([sorted((r.asked.model, round(r.intended, 6), round(r.total_s, 6), r.status, r.node)
                         for r in course.results), course.faults]))
"""


def _course(seed: int, hash_seed: int) -> Any:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, "-c", _COURSE, str(seed)], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_course_follows_from_its_seed_alone() -> None:
    """Also where sets of strings are gone through in another order."""
    first = _course(1, 1)
    assert _course(1, 2) == first
    assert _course(2, 1) != first
