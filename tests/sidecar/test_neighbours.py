"""Whom a node asks for bytes, and what it holds for those who ask it."""

from __future__ import annotations

import pytest

from sidecar.effects import ClearExtent, StartFetch
from sidecar.events import FetchDone, GiveBegun, GiveEnded, PeerFailed, RevisionOffered
from sidecar.report import full_report
from wire.peers import Peer

from .bench import SIZE, TENANT, Bench, digest

POLICY = f"{TENANT}/p"
OTHERS = tuple(Peer(f"n{number}", f"ipc:///nowhere/{number}") for number in range(1, 6))
N2, N3, N4 = OTHERS[1:4]


def ask(bench: Bench, number: int, *peers: Peer) -> StartFetch:
    """The fetch that an ask for a cold revision begins."""
    bench.ask(number, peers=peers)
    return bench.fetches[digest(number)]


def asked(bench: Bench, number: int, *peers: Peer) -> tuple[Peer, ...]:
    return ask(bench, number, *peers).peers


def failed(bench: Bench, peer: Peer, *, wrong: bool) -> None:
    bench.send(PeerFailed(node=peer.node, wrong=wrong, message="m"))


def arrive(bench: Bench, number: int, source: str, peer: str = "") -> None:
    fetch = bench.fetches.pop(digest(number))
    bench.send(FetchDone(digest=fetch.digest, generation=fetch.extent.generation, source=source, peer=peer))


def test_who_was_told_of_is_asked_but_never_this_node_nor_more_than_two() -> None:
    assert asked(Bench(), 1, *OTHERS[:1], N2, N3, N4) == (N2, N3)


def test_what_a_gateway_says_last_counts() -> None:
    bench = Bench(slots=4, loads_in_flight=4)
    ask(bench, 1, N2)
    bench.fetch_failed(1)
    bench.wait(10.0)
    assert asked(bench, 1, N3) == (N3,)
    bench.fetch_failed(1)
    bench.wait(20.0)
    assert asked(bench, 1) == ()


def test_a_node_that_takes_no_part_asks_nobody() -> None:
    assert asked(Bench(peer_transfers=0), 1, N2) == ()


@pytest.mark.parametrize(("wrong", "pause_s"), [(False, 5.0), (True, 300.0)])
def test_who_failed_is_not_asked_for_a_while(wrong: bool, pause_s: float) -> None:
    bench = Bench(slots=8, loads_in_flight=8)
    failed(bench, N2, wrong=wrong)
    assert asked(bench, 1, N2, N3, N4) == (N3, N4)
    bench.wait(pause_s - 1.0)
    assert asked(bench, 2, N2) == ()
    bench.wait(2.0)
    assert asked(bench, 3, N2) == (N2,)


def test_the_second_time_is_longer_unless_it_gave_something_in_between() -> None:
    bench = Bench(slots=8, loads_in_flight=8)
    for _ in range(2):
        failed(bench, N2, wrong=False)
    bench.wait(6.0)
    assert asked(bench, 1, N2) == ()
    bench.wait(6.0)
    assert asked(bench, 2, N2) == (N2,)
    arrive(bench, 2, "peer", N2.node)
    failed(bench, N2, wrong=False)
    bench.wait(6.0)
    assert asked(bench, 3, N2) == (N2,)


def test_wrong_bytes_are_told_by_name_and_silence_is_not() -> None:
    bench = Bench()
    for wrong in (True, False, True):
        failed(bench, N2, wrong=wrong)
    failed(bench, N3, wrong=False)
    assert full_report(bench.machine.state, epoch=1, number=1).peer_faults == {N2.node: 2}


def test_bytes_are_counted_by_where_they_came_from() -> None:
    bench = Bench(slots=4)
    for number, source in ((1, "peer"), (2, "store"), (3, "peer")):
        ask(bench, number, N2)
        arrive(bench, number, source)
        bench.installed(number)
    report = full_report(bench.machine.state, epoch=1, number=1)
    assert report.arrived_bytes == {"peer": 2 * SIZE, "store": SIZE}


def test_the_next_revision_is_asked_of_those_who_had_the_one_before() -> None:
    bench = Bench(slots=4)
    ask(bench, 1, N2)
    arrive(bench, 1, "peer")
    bench.installed(1)
    bench.send(RevisionOffered(policy=POLICY, digest=digest(2), size=SIZE))
    bench.wait(1.0)
    assert bench.fetches[digest(2)].peers == (N2,)


def test_who_failed_is_asked_for_no_next_revision_before_it_is_told_of_again() -> None:
    bench = Bench(slots=4)
    ask(bench, 1, N2, N3)
    arrive(bench, 1, "peer")
    bench.installed(1)
    failed(bench, N2, wrong=False)
    bench.wait(120.0)
    bench.send(RevisionOffered(policy=POLICY, digest=digest(2), size=SIZE))
    bench.wait(1.0)
    assert bench.fetches[digest(2)].peers == (N3,)


def give(bench: Bench, number: int, transfer: int = 1) -> None:
    bench.send(GiveBegun(give=transfer, digest=digest(number)))


def end(bench: Bench, number: int, transfer: int = 1) -> None:
    bench.send(GiveEnded(give=transfer, digest=digest(number), given_bytes=SIZE))


def test_what_is_being_given_stays_and_what_waits_for_its_room_comes_afterwards() -> None:
    bench = Bench(slots=1, arena_bytes=12_288)
    bench.release(bench.serve(1))
    give(bench, 1)
    give(bench, 1, 2)
    waiting = bench.ask(2)
    end(bench, 1)
    bench.wait(2.0)
    assert not bench.started(ClearExtent), "another one still reads it"
    end(bench, 1, 2)
    assert [effect.digest for effect in bench.started(ClearExtent)] == [digest(1)]  # type: ignore[union-attr]
    bench.fetched(2)
    bench.removed(1)
    bench.installed(2)
    assert bench.granted(waiting)
    assert full_report(bench.machine.state, epoch=1, number=1).given_bytes == 2 * SIZE
