"""Revisions pulled from a trainer while they are written: what a node takes, and when it serves."""

from __future__ import annotations

from sidecar.effects import CancelPull, ClearExtent, StartFetch, StartInstall, StartPull, StartRemove
from sidecar.events import (
    Cordoned,
    PullDone,
    PullFailed,
    RevisionOffered,
    TransferBound,
    TransferOffered,
    TransferWithdrawn,
)
from sidecar.report import residencies
from wire.node import Residency
from wire.outcomes import Outcome
from wire.transfer import Offered

from .bench import BASE, SIZE, TENANT, Bench, digest, name

POLICY = f"{TENANT}/p"


def offer(bench: Bench, transfer: str = "t1", policy: str = POLICY, **changes: object) -> None:
    given: dict[str, object] = {"base": BASE, "rank": 8, "size": SIZE} | changes
    offered = Offered(transfer=transfer, policy=policy, **given)  # type: ignore[arg-type]
    bench.send(TransferOffered(trainer="here", offer=offered))


def bind(bench: Bench, number: int, transfer: str = "t1") -> None:
    bench.send(TransferBound(transfer=transfer, digest=digest(number)))


def done(bench: Bench, number: int, transfer: str = "t1") -> None:
    generation = bench.pulls.pop(transfer).extent.generation
    bench.send(PullDone(transfer=transfer, generation=generation, digest=digest(number)))


def fail(bench: Bench, transfer: str = "t1") -> None:
    generation = bench.pulls.pop(transfer).extent.generation
    bench.send(PullFailed(transfer=transfer, generation=generation, message="the trainer is gone"))


def announce(bench: Bench, number: int, policy: str = POLICY) -> None:
    bench.send(RevisionOffered(policy=policy, digest=digest(number), size=SIZE))


def serving_first(slots: int = 3) -> Bench:
    """A node that serves revision 1, which nobody uses just now."""
    bench = Bench(slots=slots)
    bench.release(bench.serve(1))
    return bench


def test_a_node_that_serves_the_older_revision_has_the_new_one_serve_when_it_is_announced() -> None:
    bench = serving_first()
    offer(bench)
    bind(bench, 2)
    done(bench, 2)
    assert not bench.calls, "no event names it yet"
    announce(bench, 2)
    bench.installed(2)
    ask = bench.ask(2)
    assert not bench.granted(ask).waited
    assert len(bench.started(StartFetch)) == 1, "the older one's"


def test_announced_while_it_is_pulled_it_is_installed_when_it_is_there() -> None:
    bench = serving_first()
    offer(bench)
    bind(bench, 2)
    announce(bench, 2)
    assert not bench.calls
    done(bench, 2)
    bench.installed(2)
    assert name(2) in bench.serving()


def test_pulled_and_never_announced_it_is_not_installed() -> None:
    bench = serving_first()
    offer(bench)
    bind(bench, 2)
    done(bench, 2)
    bench.send(TransferWithdrawn(transfer="t1"))
    bench.wait(5.0)
    assert len(bench.started(StartInstall)) == 1, "the older one's"
    assert name(2) not in bench.serving()


def test_nobody_is_told_of_what_has_no_digest() -> None:
    bench = serving_first()
    offer(bench)
    assert set(residencies(bench.machine.state)) == {digest(1)}
    bind(bench, 2)
    assert residencies(bench.machine.state)[digest(2)] is Residency.FETCHING
    done(bench, 2)
    assert residencies(bench.machine.state)[digest(2)] is Residency.RESIDENT


def test_who_asks_while_it_is_pulled_waits_for_the_pull() -> None:
    bench = serving_first()
    offer(bench)
    bind(bench, 2)
    ask = bench.ask(2)
    assert list(bench.fetches) == []
    done(bench, 2)
    bench.installed(2)
    assert bench.granted(ask).adapter == name(2)


def test_who_waited_for_a_pull_that_failed_has_it_from_the_store() -> None:
    bench = serving_first()
    offer(bench)
    bind(bench, 2)
    ask = bench.ask(2)
    fail(bench)
    bench.fetched(2)
    bench.installed(2)
    assert bench.granted(ask).adapter == name(2)
    assert digest(2) not in bench.machine.state.failures


def test_a_pull_that_failed_leaves_nothing_and_later_ones_are_pulled() -> None:
    bench = serving_first()
    used = bench.machine.state.cache.used
    for transfer in ("t1", "t2"):
        offer(bench, transfer)
        fail(bench, transfer)
        assert bench.machine.state.cache.used == used
    offer(bench, "t3")
    bind(bench, 3, "t3")
    fail(bench, "t3")
    assert bench.machine.state.cache.used == used
    assert residencies(bench.machine.state) == {digest(1): Residency.SERVING}
    offer(bench, "t4")
    assert "t4" in bench.pulls


def test_a_withdrawn_transfer_is_given_up() -> None:
    bench = serving_first()
    offer(bench)
    bench.send(TransferWithdrawn(transfer="t1"))
    assert bench.started(CancelPull) == [CancelPull(transfer="t1")]
    fail(bench)
    assert len(list(bench.machine.state.cache)) == 1


def test_the_same_bytes_again_are_pulled_no_further() -> None:
    bench = serving_first()
    offer(bench)
    bind(bench, 1)
    assert bench.started(CancelPull) == [CancelPull(transfer="t1")]
    fail(bench)
    announce(bench, 1)
    assert not bench.calls
    assert list(bench.machine.state.cache) == [digest(1)]


def test_the_same_bytes_again_whose_digest_only_the_last_chunk_told_are_dropped() -> None:
    bench = serving_first()
    offer(bench)
    done(bench, 1)
    assert list(bench.machine.state.cache) == [digest(1)]
    cleared = bench.started(ClearExtent)[-1]
    assert isinstance(cleared, ClearExtent)
    assert cleared.digest != digest(1)


def two_policies_with_the_same_bytes(bench: Bench) -> None:
    """Both are expected here, and t1 alone is still pulled."""
    for transfer, policy in (("t1", f"{TENANT}/p"), ("t2", "other/q")):
        offer(bench, transfer, policy, nodes=("n1",))
        bind(bench, 2, transfer)
    assert bench.started(CancelPull) == [CancelPull(transfer="t2")]
    fail(bench, "t2")


def test_the_same_bytes_of_two_policies_serve_for_both() -> None:
    bench = Bench(slots=3)
    two_policies_with_the_same_bytes(bench)
    announce(bench, 2, POLICY)
    announce(bench, 2, "other/q")
    done(bench, 2)
    bench.installed(2)
    bench.installed(2, tenant="other")
    assert bench.serving() == {name(2), name(2, "other")}
    assert bench.started(StartFetch) == []


def test_bytes_that_did_not_come_are_fetched_for_each_policy_that_is_announced_later() -> None:
    bench = Bench(slots=3)
    offer(bench, "t0", "other/q", nodes=("n1",))
    bind(bench, 1, "t0")
    done(bench, 1, "t0")
    two_policies_with_the_same_bytes(bench)
    fail(bench)
    announce(bench, 2, "other/q")
    bench.wait(1.0)
    assert list(bench.fetches) == [digest(2)]


def test_bytes_that_the_store_gives_already_are_pulled_no_further() -> None:
    bench = serving_first()
    offer(bench)
    ask = bench.ask(2)
    bind(bench, 2)
    assert bench.started(CancelPull)
    bench.fetched(2)
    fail(bench)
    bench.installed(2)
    assert bench.granted(ask)


def test_only_what_concerns_this_node_is_pulled() -> None:
    bench = serving_first()
    offer(bench, "t1", f"{TENANT}/other")
    offer(bench, "t2", base="another")
    offer(bench, "t3", rank=99)
    offer(bench, "t4", size=0)
    offer(bench, "t5", size=1 << 40)
    assert bench.started(StartPull) == []
    offer(bench, "t6", f"{TENANT}/other", nodes=("n1",))
    assert "t6" in bench.pulls, "it would be asked first"
    offer(bench, "t6", f"{TENANT}/other", nodes=("n1",))
    assert len(bench.started(StartPull)) == 1
    bench.send(Cordoned(on=True))
    offer(bench, "t7")
    assert len(bench.started(StartPull)) == 1


def test_the_first_revision_serves_where_it_is_expected() -> None:
    bench = Bench()
    offer(bench, nodes=("n1",))
    bind(bench, 1)
    announce(bench, 1)
    done(bench, 1)
    bench.installed(1)
    assert not bench.granted(bench.ask(1)).waited


def test_a_pull_takes_no_room_from_what_leases_use() -> None:
    bench = Bench(arena_bytes=2 * 12288)
    bench.serve(1)
    bench.serve(2)
    offer(bench)
    assert bench.started(StartPull) == []
    assert bench.refused(bench.ask(3, size=10**9)).outcome is Outcome.STORAGE_FULL


def test_without_a_free_slot_it_takes_that_of_an_older_revision_which_nobody_uses() -> None:
    bench = Bench(slots=2)
    held = bench.serve(1)
    bench.release(bench.serve(2))
    offer(bench)
    bind(bench, 3)
    done(bench, 3)
    announce(bench, 3)
    bench.removed(2)
    bench.installed(3)
    assert bench.serving() == {name(1), name(3)}
    bench.release(held)


def test_another_policy_s_slot_is_not_taken_for_what_nobody_asked_for() -> None:
    bench = Bench(slots=2)
    held = bench.serve(1)
    other = bench.ask(9, tenant="other")
    bench.fetched(9)
    bench.installed(9, tenant="other")
    bench.release(other)
    offer(bench)
    bind(bench, 3)
    done(bench, 3)
    announce(bench, 3)
    assert bench.started(StartRemove) == []
    ask = bench.ask(3)
    assert len(bench.started(StartFetch)) == 2, "its bytes are here"
    bench.calls.pop("e1")
    assert ask not in bench.answers
    bench.release(held)


def announced(bench: Bench, number: int) -> None:
    """A new revision on its whole way."""
    offer(bench, f"t{number}")
    bind(bench, number, f"t{number}")
    done(bench, number, f"t{number}")
    announce(bench, number)
    bench.installed(number)


def test_a_loop_finds_a_free_slot_for_each_revision() -> None:
    bench = serving_first(slots=2)
    announced(bench, 2)
    bench.wait(4.0)
    bench.removed(1)
    announced(bench, 3)
    assert bench.serving() == {name(2), name(3)}


def test_what_is_in_use_or_was_just_now_keeps_its_slot() -> None:
    bench = Bench(slots=2)
    held = bench.serve(1)
    announced(bench, 2)
    bench.wait(4.0)
    assert bench.started(StartRemove) == []
    bench.release(held)
    bench.wait(4.0)
    assert bench.serving() == {name(1), name(2)}, "it is looked at once a revision"


def test_with_a_free_slot_nothing_leaves_ahead_of_time() -> None:
    bench = serving_first(slots=3)
    announced(bench, 2)
    bench.wait(5.0)
    assert bench.serving() == {name(1), name(2)}
