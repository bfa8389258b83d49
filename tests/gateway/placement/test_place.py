from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.nodes import NodeTable
from gateway.placement import Demand, Placer
from gateway.placement.rendezvous import Rendezvous
from wire.node import Health, NodeReport, Residency
from wire.outcomes import BaseNotDeployed, NoHealthyNode, RoostError, Unfit

from ..fleet_states import base_demand, demand, digest_of, engine, report, table

ADAPTER = "acme@" + digest_of(1)


def chosen(asked: Demand, *reports: NodeReport, excluded: tuple[str, ...] = ()) -> str:
    return Placer(table(*reports)).place(asked, excluded=excluded).name


@st.composite
def fleets(draw: st.DrawFn) -> list[NodeReport]:
    names = draw(st.lists(st.sampled_from([f"n{i}" for i in range(12)]), min_size=1, unique=True))
    return [
        report(
            name,
            engine(
                serving=draw(st.sampled_from([(), (ADAPTER,)])),
                outstanding=draw(st.integers(0, 200)),
                slots=draw(st.integers(1, 2)),
                health=draw(st.sampled_from(["ready", "ready", "starting"])),
            ),
            resident=draw(st.sampled_from([{}, {digest_of(1): Residency.RESIDENT}])),
        )
        for name in names
    ]


@given(fleet=fleets(), data=st.data())
def test_gateways_that_see_the_same_reports_choose_the_same_node(fleet: list[NodeReport], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(fleet))
    mine, theirs = table(*fleet), table(*shuffled)
    # leases of one's own are not in the reports
    for count, node in enumerate(theirs):
        node.leased = count

    def outcome(nodes: NodeTable) -> str:
        try:
            return Placer(nodes).place(demand()).name
        except RoostError as error:
            return error.message

    assert outcome(mine) == outcome(theirs)


@pytest.mark.parametrize(
    ("nodes", "asked", "error", "reason"),
    [
        ([report("a", engine(base="other"))], demand(), BaseNotDeployed, "no node runs"),
        ([report("a", engine(fingerprint="0" * 64))], demand(), BaseNotDeployed, "fingerprint"),
        ([report("a")], demand(rank=32), Unfit, "rank 32"),
        ([report("a", engine(targets=("q", "v")))], demand(targets=("q", "gate")), Unfit, "vllm can't change gate"),
        ([report("a", engine(backend="sglang", max_rank=0))], demand(), Unfit, "sglang takes no adapters"),
        (
            [report("a", engine(max_rank=8)), report("b", engine(backend="sglang", targets=("q",)))],
            demand(rank=16, targets=("q", "v")), Unfit, "sglang can't change v; rank 16 is above vllm's 8",
        ),
        # what one has of rank and the other of modules is no engine that takes both
        ([report("a", engine(max_rank=8), engine("e1", targets=("q",)))], demand(rank=16), Unfit, "can't change v"),
        (
            [report("a", engine(health=Health.STARTING), engine("e1", targets=("q",)))],
            demand(), NoHealthyNode, "healthy",
        ),
        ([report("a", engine(health=Health.STARTING))], demand(), NoHealthyNode, "healthy"),
        ([report("a", draining=True)], demand(), NoHealthyNode, "draining"),
        ([], demand(), NoHealthyNode, "reported"),
    ],
)  # fmt: skip
def test_where_no_node_is_left_the_last_filter_says_why(
    nodes: list[NodeReport], asked: Demand, error: type[RoostError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        chosen(asked, *nodes)


def test_what_a_backend_can_not_be_asked_goes_to_another_one() -> None:
    nodes = report("a"), report("b", engine(backend="sglang"))
    for number in range(20):
        asked = demand(f"acme/p{number}")
        assert chosen(msgspec.structs.replace(asked, not_by="sglang"), *nodes) == "a"
    with pytest.raises(Unfit):
        chosen(msgspec.structs.replace(asked, not_by="sglang"), nodes[1])


@pytest.mark.parametrize("narrow", [{"targets": ("q", "v")}, {"max_rank": 4}, {"max_rank": 0}])
def test_a_policy_goes_to_a_node_that_takes_it(narrow: dict[str, Any]) -> None:
    able = report("able", engine(outstanding=90, serving=tuple(f"acme@{digest_of(n)}" for n in range(9, 13))))
    for number in range(1, 40):
        asked = demand(f"acme/p{number}", number, targets=("q", "gate"))
        unable = report("unable", engine(backend="sglang", **narrow), resident={asked.digest: Residency.RESIDENT})
        assert chosen(asked, able, unable) == "able"
    assert chosen(base_demand(), able, unable) == "unable"


def test_a_silent_node_is_unhealthy_but_still_known_to_run_the_base() -> None:
    nodes = table(report("a"))
    nodes["a"].fall_silent()
    with pytest.raises(NoHealthyNode) as caught:
        Placer(nodes).place(demand())
    assert caught.value.retry_after_s is not None


def test_a_node_in_doubt_is_taken_where_there_is_no_other() -> None:
    nodes = table(report("a"), report("b"))
    first = Placer(nodes).place(demand())
    first.doubt()
    second = Placer(nodes).place(demand())
    assert second is not first
    second.doubt()
    assert Placer(nodes).place(demand()) is first


@pytest.mark.parametrize(
    ("good", "poor"),
    [
        (report("NAME", engine(serving=(ADAPTER,), outstanding=60, slots=1)), report("NAME")),
        (report("NAME", resident={digest_of(1): Residency.RESIDENT}), report("NAME")),
        (report("NAME"), report("NAME", engine(slots=1, serving=("acme@" + digest_of(2),)))),
        (report("NAME", engine(outstanding=3)), report("NAME", engine(outstanding=70))),
    ],
    ids=["serving", "resident", "free slot", "idle"],
)
def test_the_better_node_wins_whichever_comes_first_in_order(good: NodeReport, poor: NodeReport) -> None:
    for better, worse in (("a", "b"), ("b", "a")):
        reports = [_called(better, good), _called(worse, poor)]
        assert chosen(demand(), *reports) == better


def _called(name: str, state: NodeReport) -> NodeReport:
    return report(name, *state.engines, resident=state.resident)


def test_a_load_goes_where_the_revision_did_not_fail_unless_it_failed_everywhere() -> None:
    names = ["n0", "n1", "n2"]
    first = Placer(table(*(report(name) for name in names))).place(demand()).name

    def placed(failed: list[str]) -> str:
        resident = {demand().digest: Residency.FAILED}
        reports = (report(name, resident=resident if name in failed else {}) for name in names)
        return Placer(table(*reports)).place(demand()).name

    assert placed([first]) != first
    assert placed(names) == first


def test_a_node_that_just_failed_is_left_out_unless_it_is_the_only_one() -> None:
    first = chosen(demand(), report("a"), report("b"))
    other = {"a": "b", "b": "a"}[first]
    assert chosen(demand(), report("a"), report("b"), excluded=(first,)) == other
    assert chosen(demand(), report("a"), excluded=("a",)) == "a"
    assert chosen(demand(), report("a"), report("b"), excluded=("a", "b")) == first


def test_base_requests_go_where_the_least_is_outstanding() -> None:
    nodes = table(report("a", engine(outstanding=5)), report("b", engine(outstanding=2)))
    assert Placer(nodes).place(base_demand()).name == "b"
    nodes["b"].leased = 9
    assert Placer(nodes).place(base_demand()).name == "a"


def test_a_few_leases_more_do_not_move_a_policy() -> None:
    names = Counter(
        chosen(demand(), report("a", engine(outstanding=one)), report("b", engine(outstanding=other)))
        for one, other in itertools.product(range(0, 30, 5), repeat=2)
    )
    assert len(names) == 1


def _share_that_moves(before: list[str], after: list[str], policies: int = 3000) -> float:
    def winners(nodes: list[str]) -> Callable[[str], str]:
        rendezvous = Rendezvous(nodes)
        return lambda policy: rendezvous.order(policy)[0]

    old, new = winners(before), winners(after)
    moved = sum(old(f"t/p{i}") != new(f"t/p{i}") for i in range(policies))
    return moved / policies


def test_a_node_that_joins_moves_the_least_that_it_can() -> None:
    nodes = [f"node-{i}" for i in range(10)]
    assert _share_that_moves(nodes, [*nodes, "new"]) < 1.15 / 11
    assert _share_that_moves(nodes, nodes[1:]) < 1.15 / 10


def test_policies_are_spread_evenly() -> None:
    nodes = [f"node-{i}" for i in range(8)]
    rendezvous = Rendezvous(nodes)
    counts = Counter(rendezvous.order(f"t/p{i}")[0] for i in range(8000))
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_the_order_is_the_same_everywhere() -> None:
    # pinned: gateways of two releases must agree while one replaces the other
    assert Rendezvous(f"n{i}" for i in range(5)).order("acme/bot") == ["n0", "n1", "n3", "n4", "n2"]


def test_dead_nodes_past_those_that_are_remembered_are_passed_over() -> None:
    nodes = table(*(report(f"n{i}") for i in range(30)))
    placer = Placer(nodes)
    order = Rendezvous(node.name for node in nodes).order("acme/bot")
    for name in order[:20]:
        nodes[name].fall_silent()
    assert placer.place(demand()).name == order[20]
    for name in order[20:]:
        nodes[name].fall_silent()
    with pytest.raises(NoHealthyNode):
        placer.place(demand())
    nodes[order[29]].replace(report(order[29]))
    assert placer.place(demand()).name == order[29]
