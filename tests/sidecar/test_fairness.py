"""Many tenants on one node: nobody's flood is another's wait, and who comes back when told to finds room."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.gate import fair_share
from sidecar.report import full_report
from wire.node import Refused
from wire.outcomes import Outcome

from .bench import Bench
from .world import Request, World


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def answered(requests: Iterable[Request], tenant: str) -> list[Request]:
    return [request for request in requests if request.tenant == tenant and not math.isnan(request.granted)]


# Retry-After


@pytest.mark.parametrize(
    ("clients", "tenants", "slots", "use_s"),
    [(115, 1, 32, 1.0), (200, 4, 32, 1.0), (115, 1, 8, 3.0)],
    ids=["loads are the bottleneck", "several tenants", "slots are the bottleneck"],
)
def test_retry_after_comes_true_within_a_factor_of_two(clients: int, tenants: int, slots: int, use_s: float) -> None:
    world = World(slots=slots, use_s=use_s, noise=0.3)
    for client in range(clients):
        world.client(f"t{client % tenants}", lambda: world.random.randrange(2048), until=100.0)
    world.run(200.0)
    counts = world.machine.state.counts
    assert counts["retry_after_true"] >= 200
    assert counts["retry_after_true"] >= 0.95 * (counts["retry_after_true"] + counts["retry_after_off"])
    assert counts["retry_after_unclaimed"] == 0
    assert all(not math.isnan(request.granted) for request in world.requests), "who does as told is served"
    world.check()


@pytest.mark.parametrize(("install_s", "refused"), [(0.02, False), (0.5, True)], ids=["quick", "slow"])
def test_as_many_wait_as_leave_the_queue_soon(install_s: float, refused: bool) -> None:
    bounds = {"loads_queued": 16, "loads_queued_per_tenant": 16, "loads_queued_s": 2.0}
    world = World(slots=32, fetch_s=0.001, install_s=install_s, use_s=0.2, **bounds)  # type: ignore[arg-type]
    for _ in range(10):
        world.client("acme", lambda: world.random.randrange(100_000), until=60.0)
    world.run(20.0)
    assert not any(request.refusals for request in world.requests), "few wait, within the bound"
    for _ in range(50):
        world.client("acme", lambda: world.random.randrange(100_000), until=60.0)
    world.run(60.0)
    assert any(request.refusals for request in world.requests) is refused
    world.check()


def _quick_node() -> Bench:
    """Its queue may be longer than its bound of 16: loads start each 20 ms, and the 31st is in flight."""
    bench = Bench(slots=64, loads_in_flight=1, loads_queued=16, loads_queued_per_tenant=16, loads_queued_s=2.0)
    for number in range(5):
        bench.ask(number, wait_s=600.0)
    for number in range(30):
        bench.wait(0.02)
        bench.loaded(number)
        bench.ask(number + 5, wait_s=600.0)
    return bench


def test_more_wait_no_longer_when_loads_stop_starting() -> None:
    bench = _quick_node()
    asks = [bench.ask(100 + number, wait_s=600.0) for number in range(50)]
    assert not any(ask in bench.answers for ask in asks)
    bench.wait(30.0)
    assert bench.refused(bench.ask(200)).outcome is Outcome.COLD_LOAD_BOUND


def test_askers_that_give_up_make_the_queue_no_longer() -> None:
    bench = _quick_node()
    most = 0
    for number in range(1000):
        bench.ask(100 + number, wait_s=1.0)
        bench.wait(0.02)
        if number >= 500:
            most = max(most, bench.machine.state.queue.queued)
    assert most == 16
    assert full_report(bench.machine.state, epoch=1, number=1).load_rate < 5.0


def test_who_comes_back_in_time_gets_in_before_newcomers() -> None:
    world = World(slots=16, use_s=0.5, loads_in_flight=2, loads_queued=8)
    for number in range(60):
        world.request("acme", number)
    first = [request for request in world.requests if request.refusals]
    # newcomers all the time: each place that becomes free has somebody at its door
    for number in range(1000, 1400):
        world.at(world.random.uniform(0.0, 40.0), lambda number=number: world.request("acme", number))  # type: ignore[misc]
    world.run(200.0)
    assert first
    assert sum(len(request.refusals) == 1 for request in first) >= 0.9 * len(first)


def test_places_are_not_kept_for_clients_that_never_come_back() -> None:
    bench = Bench(slots=64, loads_in_flight=1, loads_queued=8)
    asks = [bench.ask(number, wait_s=600.0) for number in range(100)]
    assert sum(ask in bench.answers for ask in asks) == 100 - 9
    bench.wait(120.0)
    assert bench.machine.state.counts["retry_after_unclaimed"] == 100 - 9
    bench.fetched(0)
    bench.installed(0)
    ask = bench.ask(500)
    assert ask not in bench.answers, "there is room for it"


def test_who_came_back_and_is_put_out_again_counts_as_told_wrongly() -> None:
    bench = Bench(slots=64, loads_in_flight=1, loads_queued=8, loads_queued_per_tenant=8)
    flood = [bench.ask(number, tenant="flood", wait_s=600.0) for number in range(10)]
    refused = bench.refused(flood[-1])
    assert refused.retry_after_s
    bench.fetched(0)
    bench.installed(0, tenant="flood")
    bench.now += refused.retry_after_s
    bench.ask(9, tenant="flood", wait_s=600.0)
    assert bench.machine.state.queue.queued == 8
    counts = bench.machine.state.counts
    assert (counts["retry_after_true"], counts["retry_after_off"]) == (0, 0)
    for number in range(7):
        bench.ask(100 + number, tenant=f"other{number}")
    assert counts["retry_after_off"] == 1


def test_estimate_grows_with_what_waits_before() -> None:
    bench = Bench(slots=64, loads_in_flight=1, loads_queued=8)
    refused = [bench.refused(ask) for ask in [bench.ask(number) for number in range(40)][9:]]
    estimates = [answer.retry_after_s or 0.0 for answer in refused]
    assert estimates == sorted(estimates)
    assert estimates[-1] > 4 * estimates[0], "39 before the last one, 9 before the first"


def test_tenant_with_little_waiting_is_told_a_shorter_time_than_a_flood() -> None:
    bench = Bench(slots=64, loads_in_flight=1, loads_queued=16, loads_queued_per_tenant=8)
    flood = [bench.ask(number, tenant="flood") for number in range(100)]
    light = [bench.ask(1000 + number, tenant="light") for number in range(9)]
    last = bench.refused(flood[-1]).retry_after_s or 0.0
    own = bench.refused(light[-1]).retry_after_s or 0.0
    assert own < last / 4


# the queue


def test_flood_has_no_more_than_its_bound_and_others_find_places() -> None:
    bench = Bench(slots=64, loads_in_flight=1, loads_queued=16, loads_queued_per_tenant=12)
    flood = [bench.ask(number, tenant="flood") for number in range(40)]
    assert sum(ask not in bench.answers for ask in flood) == 1 + 12
    others = [bench.ask(100 + number, tenant=f"other{number}") for number in range(8)]
    assert all(ask not in bench.answers for ask in others), "the flood makes room"
    evicted = [bench.answers[ask] for ask in flood if ask in bench.answers]
    assert all(isinstance(answer, Refused) for answer in evicted)
    assert {answer.outcome for answer in evicted if isinstance(answer, Refused)} == {Outcome.COLD_LOAD_BOUND}
    assert bench.machine.state.queue.queued == 16


def test_other_tenants_first_load_waits_for_one_round_though_a_flood_waits() -> None:
    bench = Bench(slots=64, loads_in_flight=1)
    for number in range(40):
        bench.ask(number, tenant="flood")
    ask = bench.ask(100, tenant="other")
    for number in (0, 1):
        bench.fetched(number)
        bench.installed(number, tenant="flood")
    bench.fetched(100)
    bench.installed(100, tenant="other")
    assert bench.granted(ask)


def test_flood_of_one_tenant_hardly_delays_another() -> None:
    def p95(*, flood: bool) -> float:
        world = World(slots=32, use_s=0.5, seed=3)
        for _ in range(4):
            world.client("light", lambda: world.random.randrange(200), until=120.0)
        if flood:
            for _ in range(100):
                world.client("flood", lambda: world.random.randrange(10_000), until=120.0)
        world.run(120.0)
        world.check()
        return percentile((request.waited for request in answered(world.requests, "light")), 0.95)

    # its loads share one storage lane and one engine with at most as many of the flood's as are in flight
    assert p95(flood=True) <= p95(flood=False) + 3 * 0.3


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=20), st.integers(0, 1000))
def test_fair_share_is_max_min_fair(demands: list[float], bound: int) -> None:
    share = fair_share(demands, bound)
    given_ = [min(demand, share) for demand in demands]
    assert sum(given_) <= bound * (1 + 1e-9)
    if sum(demands) > bound:
        assert sum(given_) >= bound * (1 - 1e-9), "nothing is left while somebody lacks something"


# slots


def test_flood_does_not_take_the_slots_that_others_use() -> None:
    world = World(slots=16, use_s=0.2, seed=5)
    for _ in range(3):
        world.client("light", lambda: world.random.randrange(4), until=100.0)
    world.run(20.0)
    for _ in range(60):
        world.client("flood", lambda: world.random.randrange(10_000), until=100.0)
    loaded = world.now
    world.run(80.0)
    late = [request for request in answered(world.requests, "light") if request.asked > loaded + 1.0]
    assert len(late) > 100
    assert sum(request.waited == 0.0 for request in late) >= 0.98 * len(late)
    world.check()


def test_hot_set_larger_than_the_slots_starves_nobody() -> None:
    world = World(slots=8, use_s=2.0, install_s=0.05, fetch_s=0.05, seed=2)
    # residents that never pause: two clients each, so that a lease follows before the last one ends
    for number in range(8):
        for _ in range(2):
            world.client("acme", lambda number=number: number, until=120.0)  # type: ignore[misc]
    world.run(10.0)
    for number in range(8, 12):
        world.client("acme", lambda number=number: number, until=120.0)  # type: ignore[misc]
    world.run(110.0)
    served = [sum(request.number == number for request in answered(world.requests, "acme")) for number in range(12)]
    assert min(served) >= 5, served
    waits = [request.waited for request in answered(world.requests, "acme")]
    # the age bound, and a resident's drain: its requests end within theirs
    assert max(waits) <= 5.0 + 4 * 2.0
    world.check()


def test_first_estimates_know_that_an_engine_installs_one_at_a_time() -> None:
    """Before any queue was seen to drain, with room for many loads in flight and few in the queue."""
    world = World(slots=8, fetch_s=0.01, install_s=0.5, use_s=0.1, loads_queued=6, loads_queued_per_tenant=5,
                  loads_in_flight_min=8, loads_in_flight=8)  # fmt: skip
    for number in range(8):
        world.request("a", 100 + number)
        world.run(3.0)
    burst = [world.request("a", number) for number in range(30)]
    world.run(60.0)
    refused = [request for request in burst if request.refusals]
    assert len(refused) > 10
    assert sum(len(request.refusals) > 1 for request in refused) <= 2
    counts = world.machine.state.counts
    assert (counts["retry_after_true"], counts["retry_after_off"]) == (len(refused), 0)
    world.check()
