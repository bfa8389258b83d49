"""A tenant's cold loads beside others that are served: as many a second as are set, whatever else is free."""

from __future__ import annotations

import math

import pytest

from sidecar.effects import StartInstall

from .bench import Bench
from .world import World

QUICK = {"slots": 32, "fetch_s": 0.01, "install_s": 0.02, "use_s": 0.1}


def loads_between(world: World, tenant: str, begin: float, end: float) -> int:
    waited = (one for one in world.requests if one.tenant == tenant and not math.isnan(one.granted))
    return sum(begin <= one.granted < end for one in waited)


def flood(world: World, until: float, *, clients: int = 100) -> None:
    fresh = iter(range(1_000, 1_000_000))
    for _ in range(clients):
        world.client("flood", lambda: next(fresh), until=until)


def ask_steadily(world: World, tenant: str, number: int, until: float) -> None:
    world.client(tenant, lambda: number, until=until)


def test_flood_beside_another_tenants_requests_loads_at_its_pace() -> None:
    world = World(**QUICK, tenant_loads_per_s=2.0)  # type: ignore[arg-type]
    ask_steadily(world, "light", 1, 60.0)
    world.run(5.0)
    flood(world, 60.0)
    world.run(55.0)
    assert loads_between(world, "flood", 10.0, 50.0) == pytest.approx(2.0 * 40.0, abs=4)
    world.check()


def test_flood_of_a_slow_engine_takes_a_tenth_of_its_time_at_most() -> None:
    world = World(slots=32, fetch_s=0.01, install_s=0.2, use_s=1.0, tenant_loads_per_s=4.0)
    ask_steadily(world, "light", 1, 60.0)
    world.run(5.0)
    flood(world, 60.0)
    world.run(55.0)
    assert loads_between(world, "flood", 10.0, 50.0) == pytest.approx(0.1 / 0.2 * 40.0, abs=3)
    world.check()


def test_tenant_that_is_alone_loads_as_fast_as_the_node_can() -> None:
    def loaded(tenant_loads_per_s: float) -> int:
        world = World(**QUICK, tenant_loads_per_s=tenant_loads_per_s)  # type: ignore[arg-type]
        flood(world, 20.0)
        world.run(20.0)
        return loads_between(world, "flood", 0.0, 20.0)

    assert loaded(1.0) == loaded(1_000_000.0) > 400


def test_flood_goes_on_when_others_have_left() -> None:
    world = World(**QUICK, tenant_loads_per_s=2.0)  # type: ignore[arg-type]
    ask_steadily(world, "light", 1, 20.0)
    flood(world, 40.0)
    world.run(40.0)
    assert loads_between(world, "flood", 30.0, 40.0) > 200


def test_tenants_that_all_wait_for_loads_hold_nobody_back() -> None:
    world = World(**QUICK, tenant_loads_per_s=1.0)  # type: ignore[arg-type]
    for tenant in ("a", "b", "c"):
        for _ in range(20):
            world.client(tenant, lambda: world.random.randrange(100_000), until=20.0)
    world.run(20.0)
    assert sum(loads_between(world, tenant, 5.0, 20.0) for tenant in ("a", "b", "c")) > 300


def test_few_loads_of_a_tenant_wait_for_nobody() -> None:
    bench = Bench(slots=8, loads_in_flight=4, tenant_loads_per_s=4.0)
    bench.serve(100)
    held = bench.ask(100, tenant="other")
    bench.installed(100, tenant="other")
    bench.wait(1.0)
    asks = [bench.ask(number) for number in range(4)]
    for number in range(4):
        bench.fetched(number)
        bench.installed(number)
    assert all(bench.granted(ask) for ask in (held, *asks))


def test_load_past_the_pace_starts_when_its_time_has_come() -> None:
    bench = Bench(slots=16, loads_in_flight=8, tenant_loads_per_s=2.0)
    bench.ask(100, tenant="other")
    bench.fetched(100)
    bench.installed(100, tenant="other")
    asks = [bench.ask(number) for number in range(4)]
    for number in (0, 1):
        bench.fetched(number)
        bench.installed(number)
    assert [ask in bench.answers for ask in asks] == [True, True, False, False]
    bench.wait(0.6, step=0.05)
    bench.fetched(2)
    bench.installed(2)
    assert [ask in bench.answers for ask in asks] == [True, True, True, False]
    assert len(bench.started(StartInstall)) == 4


def test_retry_after_of_a_flood_that_is_held_back_comes_true_within_a_factor_of_two() -> None:
    world = World(**QUICK, tenant_loads_per_s=4.0, loads_queued=16, loads_queued_per_tenant=12)  # type: ignore[arg-type]
    for number in range(3):
        ask_steadily(world, f"light{number}", number, 300.0)
    world.run(5.0)
    flood(world, 200.0)
    world.run(300.0)
    counts = world.machine.state.counts
    assert counts["retry_after_true"] >= 200
    assert counts["retry_after_true"] >= 0.95 * (counts["retry_after_true"] + counts["retry_after_off"])
    world.check()
