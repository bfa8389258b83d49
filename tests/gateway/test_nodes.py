from __future__ import annotations

from gateway.nodes import NodeTable
from wire.node import Health, NodeDelta, Residency

from .fleet_states import BASE, FINGERPRINT, digest_of, engine, report


def test_a_delta_before_the_first_state_means_nothing() -> None:
    node = NodeTable(["a"])["a"]
    node.apply(NodeDelta(node="a", residency={digest_of(1): Residency.SERVING}))
    assert not node.heard
    assert node.resident == {}


def test_deltas_change_what_they_name_and_nothing_else() -> None:
    node = NodeTable(["a"])["a"]
    node.replace(report("a", engine("e0"), engine("e1"), resident={digest_of(1): Residency.RESIDENT}))
    node.apply(
        NodeDelta(
            node="a",
            residency={digest_of(2): Residency.FETCHING},
            engines=(engine("e1", serving=("acme@" + digest_of(1),), outstanding=3),),
            loads_in_flight=1,
        )
    )
    assert node.resident == {digest_of(1): Residency.RESIDENT, digest_of(2): Residency.FETCHING}
    assert node.holds(digest_of(1))
    assert not node.holds(digest_of(2))
    assert (node.loads_in_flight, node.loads_queued, node.outstanding) == (1, 0, 3)
    deployment = node.deployment(BASE, FINGERPRINT)
    assert deployment is not None
    assert (deployment.ready, deployment.free_slots, deployment.outstanding) == (2, 7, 3)
    assert deployment.serving == {"acme@" + digest_of(1)}
    node.apply(NodeDelta(node="a", residency={digest_of(1): Residency.ABSENT}))
    assert digest_of(1) not in node.resident


def test_an_engine_that_is_not_ready_counts_for_nothing_that_needs_it() -> None:
    node = NodeTable(["a"])["a"]
    node.replace(
        report("a", engine("e0", health=Health.DEAD, serving=("acme@" + digest_of(1),), outstanding=9, max_rank=64))
    )
    deployment = node.deployment(BASE, FINGERPRINT)
    assert deployment is not None
    assert (deployment.ready, deployment.free_slots, deployment.outstanding, deployment.serving) == (
        0,
        0,
        0,
        frozenset(),
    )
    (kind,) = deployment.kinds
    assert (kind.max_rank, kind.ready) == (64, False)


def test_engines_of_one_sort_are_one_kind_ready_where_one_of_them_is() -> None:
    node = NodeTable(["a"])["a"]
    node.replace(report("a", engine("e0", health=Health.DEAD), engine("e1"), engine("e2", backend="sglang")))
    deployment = node.deployment(BASE, FINGERPRINT)
    assert deployment is not None
    assert [(kind.backend, kind.ready) for kind in deployment.kinds] == [("vllm", True), ("sglang", True)]


def test_another_build_of_a_base_is_another_deployment() -> None:
    node = NodeTable(["a"])["a"]
    node.replace(report("a", engine("e0"), engine("e1", fingerprint="0" * 64)))
    assert node.deployment(BASE, FINGERPRINT) is not node.deployment(BASE, "0" * 64)
    assert node.deployment(BASE, "1" * 64) is None


def test_after_silence_only_a_full_state_counts() -> None:
    nodes = NodeTable(["a"])
    node = nodes["a"]
    node.replace(report("a"))
    assert nodes.ready_engines() == 1
    node.doubt()
    assert node.heard
    node.fall_silent()
    assert nodes.ready_engines() == 0
    node.apply(NodeDelta(node="a", residency={digest_of(1): Residency.SERVING}))
    assert not node.heard
    node.replace(report("a", epoch=2))
    assert node.heard
    assert not node.doubtful
    assert node.resident == {}
