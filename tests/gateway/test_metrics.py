from __future__ import annotations

from gateway.metrics import GatewayCollector, Metrics, exposition
from wire.node import NodeDelta
from wire.outcomes import Outcome

from .fleet_states import engine, report, table


def text_of(metrics: Metrics) -> str:
    nodes = table(report("a", engine(serving=("acme@x",))))
    return exposition(GatewayCollector(metrics, nodes, lambda: {"bad_frame": 2})).decode()


def test_requests_are_counted_by_route_and_outcome() -> None:
    metrics = Metrics(("chat", "completions"))
    metrics.routes["chat"].outcomes[Outcome.OK] += 3
    metrics.routes["chat"].outcomes[Outcome.COLD_LOAD_BOUND] += 1
    text = text_of(metrics)
    assert 'roost_gateway_requests_total{outcome="ok",route="chat"} 3.0' in text
    assert 'roost_gateway_requests_total{outcome="cold_load_bound",route="chat"} 1.0' in text


def test_histograms_are_cumulative() -> None:
    metrics = Metrics(("chat",))
    for seconds in (0.001, 0.02, 0.02, 1000.0):
        metrics.routes["chat"].latency.observe(seconds)
    text = text_of(metrics)
    for bound, count in (("0.005", 1), ("0.01", 1), ("0.025", 3), ("600.0", 3), ("+Inf", 4)):
        assert f'roost_gateway_request_seconds_bucket{{le="{bound}",route="chat"}} {count}.0' in text
    assert 'roost_gateway_request_seconds_count{route="chat"} 4.0' in text
    assert 'roost_gateway_request_seconds_sum{route="chat"} 1000.041' in text


def test_an_observation_on_a_bound_counts_below_it() -> None:
    metrics = Metrics(("chat",))
    metrics.routes["chat"].latency.observe(0.005)
    assert 'roost_gateway_request_seconds_bucket{le="0.005",route="chat"} 1.0' in text_of(metrics)


def test_the_node_table_and_the_drops_are_shown() -> None:
    text = text_of(Metrics(("chat",)))
    assert 'roost_gateway_node_heard{node="a"} 1.0' in text
    assert 'roost_gateway_node_free_slots{node="a"} 3.0' in text
    assert 'roost_gateway_dropped_messages_total{reason="bad_frame"} 2.0' in text


def test_a_nodes_loads_are_shown_without_a_tenants_name() -> None:
    nodes = table(report("a"))
    nodes["a"].apply(
        NodeDelta(
            node="a", loads_in_flight=2, loads_queued=7, loads_limit=3, load_s=0.5, load_rate=4.0,
            queued_by_tenant={"acme": 5, "other": 2},
        )
    )  # fmt: skip
    text = exposition(GatewayCollector(Metrics(("chat",)), nodes, dict)).decode()
    for name, value in (
        ("loads_in_flight", 2), ("loads_limit", 3), ("loads_queued", 7), ("loads_queued_of_one_tenant", 5),
        ("load_seconds", 0.5), ("load_rate", 4),
    ):  # fmt: skip
        assert f'roost_gateway_node_{name}{{node="a"}} {float(value)}\n' in text
    assert "acme" not in text
