"""The lease desk, on a node that is only a list."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.leases import LeaseDesk, TryElsewhere
from gateway.nodes import Node, NodeTable
from wire.node import Acquire, Granted, NodeReport, Refused, Release
from wire.outcomes import ColdLoadBound, DeadlinePassed, KnownBad, NoHealthyNode, Outcome, Unfit

from .fleet_states import demand, report
from .mesh import until


class Peer:
    """Answers each ask with ``answer``, or raises it. ``present`` is whether one-way messages arrive."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.asked: list[Acquire] = []
        self.sent: list[Release] = []
        self.present = True

    async def request(self, ask: Acquire, *, timeout_s: float) -> Any:
        self.asked.append(ask)
        await asyncio.sleep(0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(ask)

    def send(self, release: Release) -> bool:
        if self.present:
            self.sent.append(release)
        return self.present

    @property
    def released(self) -> list[int]:
        return [lease for release in self.sent for lease in release.leases]


def granted(ask: Acquire) -> Granted:
    return Granted(lease=ask.lease, engine="e0", host="h", port=1, adapter="a")


def refused(outcome: Outcome, *, elsewhere: bool = False) -> Any:
    return lambda ask: Refused(
        lease=ask.lease, outcome=outcome, message="no", field="model", retry_after_s=4.0, elsewhere=elsewhere
    )


def desk_with(peer: Peer) -> LeaseDesk:
    return LeaseDesk({"a": peer}, gateway="g", instance="i")  # type: ignore[dict-item]


async def acquire(peer: Peer, node: Node) -> Any:
    return await desk_with(peer).acquire(node, demand(), size=10, timeout_s=1.0, use_s=1000.0)


async def test_a_lease_is_given_back_once_however_often_it_is_released() -> None:
    peer, node = Peer(), NodeTable(["a"])["a"]
    peer.answer = granted
    lease = await acquire(peer, node)
    assert node.leased == 1
    lease.release()
    lease.release(engine_failed=True)
    assert node.leased == 0
    await until(lambda: peer.released == [lease.number])
    assert peer.sent[0].failed_engine == ""


async def test_a_failed_engine_is_told_at_once() -> None:
    peer, node = Peer(), NodeTable(["a"])["a"]
    peer.answer = granted
    lease = await acquire(peer, node)
    lease.release(engine_failed=True)
    assert [(release.leases, release.failed_engine) for release in peer.sent] == [((lease.number,), "e0")]


async def test_a_lease_says_whose_it_is_and_lives_longer_than_its_request() -> None:
    peer, node = Peer(), NodeTable(["a"])["a"]
    peer.answer = granted
    lease = await acquire(peer, node)
    lease.release()
    await until(lambda: peer.released == [lease.number])
    assert (peer.asked[0].gateway, peer.asked[0].instance) == ("g", "i")
    assert (peer.sent[0].gateway, peer.sent[0].instance) == ("g", "i")
    assert 1000.0 < peer.asked[0].ttl_s < 1100.0


async def test_a_lease_of_a_failed_engine_is_given_back_even_where_the_node_is_away() -> None:
    peer, node = Peer(), NodeTable(["a"])["a"]
    peer.answer = granted
    lease = await acquire(peer, node)
    peer.present = False
    lease.release(engine_failed=True)
    assert peer.sent == []
    peer.present = True
    await until(lambda: peer.released == [lease.number])


async def test_lease_numbers_never_repeat_not_even_over_restarts() -> None:
    peer = Peer()
    peer.answer = granted
    numbers = [(await acquire(peer, NodeTable(["a"])["a"])).number for _ in range(3)]
    await asyncio.sleep(0.002)
    numbers.append((await acquire(peer, NodeTable(["a"])["a"])).number)
    assert numbers == sorted(numbers)
    assert numbers[-1] > numbers[0]
    assert numbers[-1] < 1 << 63


@pytest.mark.parametrize(
    ("outcome", "error"),
    [(Outcome.COLD_LOAD_BOUND, ColdLoadBound), (Outcome.UNFIT, Unfit), (Outcome.KNOWN_BAD, KnownBad)],
)
async def test_a_refusal_is_raised_as_it_was_meant(outcome: Outcome, error: type[Exception]) -> None:
    peer, node = Peer(), NodeTable(["a"])["a"]
    peer.answer = refused(outcome)
    with pytest.raises(error) as caught:
        await acquire(peer, node)
    assert vars(caught.value) == {"message": "no", "field": "model", "retry_after_s": 4.0}
    peer.answer = refused(outcome, elsewhere=True)
    with pytest.raises(TryElsewhere) as elsewhere:
        await acquire(peer, node)
    assert isinstance(elsewhere.value.error, error)
    assert node.leased == 0
    # there is nothing to give back
    await asyncio.sleep(0.01)
    assert peer.sent == []


@pytest.mark.parametrize(
    ("failure", "raised"), [(DeadlinePassed("late"), DeadlinePassed), (NoHealthyNode("gone"), TryElsewhere)]
)
async def test_a_lease_that_may_be_on_its_way_is_given_back(failure: Exception, raised: type[Exception]) -> None:
    peer = Peer()
    peer.answer = failure
    with pytest.raises(raised):
        await acquire(peer, NodeTable(["a"])["a"])
    await until(lambda: peer.released == [peer.asked[0].lease])


async def test_an_answer_that_makes_no_sense_is_another_nodes_chance() -> None:
    peer = Peer()
    peer.answer = lambda ask: report("a")
    assert isinstance(peer.answer(None), NodeReport)
    with pytest.raises(TryElsewhere, match="NodeReport"):
        await acquire(peer, NodeTable(["a"])["a"])


async def test_what_a_node_that_is_away_does_not_get_is_sent_again() -> None:
    peer = Peer()
    peer.present = False
    desk = desk_with(peer)
    desk.give_back("a", 1)
    desk.flush()
    desk.give_back("a", 2)
    assert peer.released == []
    peer.present = True
    await until(lambda: peer.released == [1, 2])


async def test_what_was_given_back_is_told_before_what_is_held() -> None:
    peer, node = Peer(), NodeTable(["a"])["a"]
    peer.answer = granted
    desk = desk_with(peer)
    given, kept = [await desk.acquire(node, demand(), size=10, timeout_s=1.0, use_s=1000.0) for _ in range(2)]
    given.release()
    assert not peer.released, "it is gathered with others"
    holding = desk.holding("a")
    assert peer.released == [given.number]
    assert [held.lease for held in holding.leases] == [kept.number]
    desk.close()
    assert peer.released == [given.number], "and told once"
