"""Token buckets and their promises, and what a client sees of them."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.quotas import Quota, Quotas
from gateway.settings import GatewaySettings
from wire.outcomes import QuotaExceeded

from . import stub_engine, stub_sidecar
from .fleet_states import BASE
from .mesh import Mesh, until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def of_acme(clock: Clock, *, requests: float = 0.0, tokens: float = 0.0, gateways: int = 1) -> Quotas:
    quota = Quota(requests_per_minute=requests, tokens_per_minute=tokens)
    return Quotas({"acme": quota}, Quota(), gateways=gateways, clock=clock)


def wait_of(quotas: Quotas) -> float:
    """What ``acme`` is told; 0 where it is let in."""
    try:
        quotas.admit("acme", everywhere=False)
    except QuotaExceeded as error:
        assert error.retry_after_s is not None
        return error.retry_after_s
    return 0.0


def test_a_minutes_worth_at_once_and_then_as_it_refills() -> None:
    clock = Clock()
    quotas = of_acme(clock, requests=60)
    assert [wait_of(quotas) for _ in range(60)] == [0.0] * 60
    waits = [wait_of(quotas) for _ in range(5)]
    assert waits == pytest.approx([1, 2, 3, 4, 5])
    for wait in waits:
        clock.now = wait
        assert wait_of(quotas) == 0.0


@given(
    st.floats(6, 600),
    st.just(0.0) | st.floats(2500, 9000),
    st.integers(0, 40),
    st.lists(st.floats(0, 30), max_size=40),
    st.integers(),
)
def test_who_comes_back_when_told_is_let_in(
    requests: float, tokens: float, burst: int, gaps: list[float], seed: int
) -> None:
    """No client ignores what it is told, and requests take what was expected: then nobody is turned away twice."""
    clock = Clock()
    quotas = of_acme(clock, requests=requests, tokens=tokens)
    chance = random.Random(seed)
    arrivals = [(0.0, number, 0) for number in range(burst)]
    at = 0.0
    for number, gap in enumerate(gaps):
        at += gap
        arrivals.append((at, burst + number, 0))
    heapq.heapify(arrivals)
    turned_away = 0
    while arrivals:
        clock.now, number, times = heapq.heappop(arrivals)
        wait = wait_of(quotas)
        if not wait:
            continue
        turned_away += times
        assert times < 4, "turned away again and again"
        # headers tell whole seconds
        heapq.heappush(arrivals, (clock.now + wait + chance.random(), number, times + 1))
    # those that arrive between may take a place that was promised: few, as each of them has to find one free
    assert turned_away <= len(gaps)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 500), st.booleans()), max_size=60))
def test_over_time_no_more_tokens_pass_than_the_quota(asks: list[tuple[float, float, bool]]) -> None:
    clock = Clock()
    quotas = of_acme(clock, tokens=600)
    taken = 0.0
    largest = 0.0
    for gap, cost, known in asks:
        clock.now += gap
        try:
            admission = quotas.admit("acme", everywhere=False)
        except QuotaExceeded:
            continue
        assert admission is not None
        admission.settle(cost if known else None)
        admission.settle(1e9)
        taken += cost if known else 0.0
        largest = max(largest, cost)
    assert taken <= 600 + clock.now * 10 + largest


def test_what_reached_no_engine_counts_for_nothing() -> None:
    quotas = of_acme(Clock(), requests=1, tokens=100)
    for _ in range(5):
        admission = quotas.admit("acme", everywhere=False)
        assert admission is not None
        admission.withdraw()
    assert wait_of(quotas) == 0.0
    assert wait_of(quotas) > 0


def test_an_expensive_answer_is_waited_for_in_full() -> None:
    clock = Clock()
    quotas = of_acme(clock, tokens=60)
    admission = quotas.admit("acme", everywhere=False)
    assert admission is not None
    admission.settle(600.0)
    wait = wait_of(quotas)
    assert wait == pytest.approx(540 + 60, abs=65)
    clock.now = wait
    assert wait_of(quotas) == 0.0


def test_who_never_comes_back_costs_nobody_for_long() -> None:
    clock = Clock()
    quotas = of_acme(clock, requests=60)
    for _ in range(60 + 1000):
        wait_of(quotas)
    assert wait_of(quotas) <= 601
    clock.now = 10.0
    assert wait_of(quotas) == 0.0, "who comes in between finds what was refilled"
    clock.now = 700.0
    for _ in range(60):
        wait_of(quotas)
    assert wait_of(quotas) < 2
    clock.now = 900.0
    assert wait_of(quotas) == 0.0


def test_who_asked_again_and_again_without_waiting_is_soon_counted_on_no_more() -> None:
    clock = Clock()
    quotas = of_acme(clock, requests=30)
    while clock.now < 8.0:
        clock.now += 0.002
        wait_of(quotas)
    assert wait_of(quotas) > 500
    clock.now += 12.0
    waits = [wait_of(quotas) for _ in range(8)]
    assert waits[:6] == [0.0] * 6
    assert all(0 < wait < 15 for wait in waits[6:])


def test_a_few_who_do_not_come_back_do_not_bring_the_others_back_too_early() -> None:
    clock = Clock()
    quotas = of_acme(clock, requests=60)
    waits = [wait for _ in range(100) if (wait := wait_of(quotas))]
    for number, wait in enumerate(waits[:20]):
        if number % 5:
            clock.now = wait
            assert wait_of(quotas) == 0.0
    newcomers = [wait_of(quotas) for _ in range(5)]
    assert newcomers[:4] == [0.0] * 4, "what the others did not come for"
    assert newcomers[4] > 0.5 * (waits[-1] - clock.now)


def test_gateways_divide_a_quota_and_only_those_who_have_one_are_bounded() -> None:
    clock = Clock()
    quotas = of_acme(clock, requests=60, gateways=3)
    assert [wait_of(quotas) > 0 for _ in range(21)] == [False] * 20 + [True]
    assert quotas.admit("other", everywhere=False) is None
    everybody = Quotas({"vip": Quota()}, Quota(requests_per_minute=1), clock=clock)
    assert everybody.admit("vip", everywhere=False) is None
    assert everybody.admit("*", everywhere=True) is None
    assert everybody.admit("any", everywhere=False) is not None
    assert not Quotas({"vip": Quota()}, Quota())


def test_many_tenants_that_came_once_are_forgotten() -> None:
    clock = Clock()
    quotas = Quotas({}, Quota(requests_per_minute=600), clock=clock)
    for number in range(20_000):
        clock.now += 0.01
        admission = quotas.admit(f"t{number}", everywhere=False)
        assert admission is not None
        admission.settle(0.0)
    assert len(quotas._tenants) < 5000


def test_a_tenant_whose_request_is_under_way_is_not_forgotten() -> None:
    clock = Clock()
    quotas = Quotas({}, Quota(tokens_per_minute=1000), clock=clock)
    admission = quotas.admit("acme", everywhere=False)
    assert admission is not None
    clock.now += 120
    for number in range(10_000):
        quotas.admit(f"t{number}", everywhere=False)
    admission.settle(500_000.0)
    assert wait_of(quotas) > 1000


def test_tenants_that_can_not_be_forgotten_are_not_looked_through_at_each_ask() -> None:
    quotas = Quotas({}, Quota(requests_per_minute=60), clock=Clock())
    looks = 0

    def forget(now: float) -> None:
        nonlocal looks
        looks += 1

    quotas._forget = forget  # type: ignore[method-assign]
    for number in range(40_000):
        quotas.admit(f"t{number}", everywhere=False)
    assert looks == 4


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_quota_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="tokens_per_minute"):
        Quota(tokens_per_minute=value)


def test_settings_hold_quotas() -> None:
    fields = {"name": "g", "catalog_dir": "c", "store_dir": "s", "registrar_endpoint": "ipc:///r", "nodes": ()}
    settings = GatewaySettings(**fields, quotas={"acme": Quota(requests_per_minute=3)})  # type: ignore[arg-type]
    assert settings.quotas["acme"].requests_per_minute == 3


# through the gateway


async def test_a_tenant_above_its_requests_is_told_when_to_come_back(tmp_path: Path) -> None:
    quotas = {"acme": Quota(requests_per_minute=6)}
    async with Mesh(tmp_path, anonymous=False, quotas=quotas) as mesh:
        mesh.publish("acme/bot")
        acme, other = mesh.key("acme"), mesh.key("other")
        clock = mesh.gateways[0].quotas._clock = Clock()
        told = await asyncio.gather(*(mesh.chat("acme/bot", headers=acme) for _ in range(6)))
        assert {answer.status for answer in told} == {200}
        refused = await mesh.chat("acme/bot", headers=acme)
        assert (refused.status, refused.error["type"]) == (429, "quota")
        assert "requests a minute" in refused.error["message"]
        assert (await mesh.chat(BASE, headers=other)).status == 200
        assert (await mesh.chat("acme/bot", headers=mesh.key("*"))).status == 200
        clock.now = float(refused.headers["retry-after"])
        assert (await mesh.chat("acme/bot", headers=acme)).status == 200
        await mesh.all_leases_are_back()
        assert mesh.gateways[0].metrics.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_counted_from_what_the_engine_says(tmp_path: Path, stream: bool) -> None:
    quotas = {"acme": Quota(tokens_per_minute=1000)}
    async with Mesh(tmp_path, anonymous=False, quotas=quotas) as mesh:
        mesh.publish("acme/bot")
        acme = mesh.key("acme")
        told = await mesh.chat("acme/bot", headers=acme, stream=stream)
        assert told.status == 200
        level = mesh.gateways[0].quotas._tenants["acme"].tokens.level
        assert level == pytest.approx(1000 - 7, abs=5)
        if stream:
            assert b"usage" not in told.body
            assert len(told.events) == 3
            assert told.body.endswith(b"data: [DONE]\n\n")
            assert mesh.engine.asked[0]["stream_options"] == {"include_usage": True}
            wanted = await mesh.chat("acme/bot", headers=acme, stream=True, stream_options={"include_usage": True})
            assert wanted.events[-1]["usage"] == {"total_tokens": 7}
        else:
            assert told.json["usage"] == {"total_tokens": 7}


GUESS = 256.0
WORDS = {"short": "hi", "long": "word " * 4000}


@pytest.mark.parametrize("prompt", ["short", "long"])
@pytest.mark.parametrize(
    ("script", "stream", "timeout", "events"),
    [
        (stub_engine.die_after_chunks(3), True, "9", 3),
        (stub_engine.never_answer, True, "0.3", 0),
        (stub_engine.never_answer, False, "0.3", 0),
    ],
    ids=["after three events", "before its first token", "as a whole"],
)
async def test_what_is_cut_off_costs_its_prompt_and_what_came_of_it(
    tmp_path: Path, prompt: str, script: stub_engine.Script, stream: bool, timeout: str, events: int
) -> None:
    quotas = {"acme": Quota(requests_per_minute=1000, tokens_per_minute=100_000)}
    async with Mesh(tmp_path, anonymous=False, quotas=quotas) as mesh:
        mesh.publish("acme/bot")
        mesh.gateways[0].quotas._clock = Clock()
        mesh.engine.scripts.append(script)
        messages = [{"role": "user", "content": WORDS[prompt]}]
        body = {"model": "acme/bot", "messages": messages, "stream": stream}
        headers = mesh.key("acme") | {"x-request-timeout": timeout}
        await mesh.chat("acme/bot", headers=headers, messages=messages, stream=stream)
        await mesh.all_leases_are_back()
        tenant = mesh.gateways[0].quotas._tenants["acme"]
        await until(lambda: tenant.unsettled == 0)
        assert 100_000 - tenant.tokens.level == max(GUESS, len(json.dumps(body)) / 4 + events)


async def test_a_client_that_goes_away_pays_for_what_it_asked(tmp_path: Path) -> None:
    quotas = {"acme": Quota(tokens_per_minute=100_000)}
    async with Mesh(tmp_path, anonymous=False, quotas=quotas) as mesh:
        mesh.publish("acme/bot")
        mesh.gateways[0].quotas._clock = Clock()
        mesh.engine.scripts.append(stub_engine.never_answer)
        asking = asyncio.ensure_future(mesh.chat("acme/bot", headers=mesh.key("acme")))
        await until(lambda: len(mesh.engine.asked) == 1)
        asking.cancel()
        tenant = mesh.gateways[0].quotas._tenants["acme"]
        await until(lambda: tenant.unsettled == 0)
        assert 100_000 - tenant.tokens.level == GUESS


async def test_what_is_refused_costs_no_tokens(tmp_path: Path) -> None:
    quotas = {"acme": Quota(requests_per_minute=1000, tokens_per_minute=100_000)}
    async with Mesh(tmp_path, anonymous=False, quotas=quotas) as mesh:
        mesh.publish("acme/bot")
        acme = mesh.key("acme")
        mesh.gateways[0].quotas._clock = Clock()
        mesh.sidecar.scripts.append(stub_sidecar.refuse(stub_sidecar.Outcome.COLD_LOAD_BOUND, retry_after_s=1.0))
        assert (await mesh.chat("acme/bot", headers=acme)).status == 429
        mesh.engine.scripts.append(stub_engine.refuse(400))
        assert (await mesh.chat("acme/bot", headers=acme)).status == 400
        mesh.engine.scripts.append(stub_engine.fail_in_stream(400))
        assert (await mesh.chat("acme/bot", headers=acme, stream=True)).status == 400
        mesh.engine.scripts.extend([stub_engine.fail_in_stream(500)] * 2)
        assert (await mesh.chat("acme/bot", headers=acme, stream=True)).status == 502
        tenant = mesh.gateways[0].quotas._tenants["acme"]
        assert tenant.tokens.level == tenant.tokens.capacity
        assert tenant.mean_tokens == GUESS, "and says nothing about what requests take"


async def test_a_second_attempt_is_charged_for_itself(tmp_path: Path) -> None:
    quotas = {"acme": Quota(tokens_per_minute=100_000)}
    async with Mesh(tmp_path, anonymous=False, quotas=quotas) as mesh:
        mesh.publish("acme/bot")
        mesh.gateways[0].quotas._clock = Clock()
        mesh.engine.scripts.extend([stub_engine.fail_in_stream(500), stub_engine.refuse(400)])
        assert (await mesh.chat("acme/bot", headers=mesh.key("acme"), stream=True)).status == 400
        tenant = mesh.gateways[0].quotas._tenants["acme"]
        assert tenant.tokens.level == tenant.tokens.capacity
