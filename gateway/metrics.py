"""The gateway's metrics: plain counters on the hot path, turned into Prometheus families when they are scraped.

Label values come from fixed sets (routes, outcomes) and from the configured nodes: never from what clients send.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wire.outcomes import Outcome

from .nodes import NodeTable

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SMALL_SECONDS = (0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0)


class Histogram:
    """Counts of observations by upper bound, in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it), the last one ``+Inf``."""
        total = 0
        rows = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class RouteMetrics:
    """What is counted of one data route."""

    def __init__(self) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        self.latency = Histogram(_SECONDS)
        self.first_byte = Histogram(_SECONDS)
        self.added = Histogram(_SMALL_SECONDS)


class Metrics:
    """All counters of one gateway."""

    def __init__(self, routes: tuple[str, ...]) -> None:
        self.routes = {route: RouteMetrics() for route in routes}
        self.cold_waits = Histogram(_SECONDS)
        self.retries = 0
        self.in_flight = 0


class GatewayCollector(Collector):
    """Reads the counters, the node table and what the wire dropped at each scrape."""

    def __init__(self, metrics: Metrics, nodes: NodeTable, dropped: Callable[[], dict[str, int]]) -> None:
        self._metrics = metrics
        self._nodes = nodes
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._node_table()
        drops = CounterMetricFamily(
            "roost_gateway_dropped_messages", "Messages of peers that were dropped, by reason", labels=["reason"]
        )
        for reason, count in self._dropped().items():
            drops.add_metric([reason], count)
        yield drops

    def _requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "roost_gateway_requests", "Requests that ended, by route and outcome", labels=["route", "outcome"]
        )
        families = {
            "latency": HistogramMetricFamily(
                "roost_gateway_request_seconds", "From a request's arrival to its end", labels=["route"]
            ),
            "first_byte": HistogramMetricFamily(
                "roost_gateway_first_byte_seconds",
                "From a request's arrival to the answer's first byte",
                labels=["route"],
            ),
            "added": HistogramMetricFamily(
                "roost_gateway_added_seconds",
                "The gateway's own time before forwarding, without the wait for the lease",
                labels=["route"],
            ),
        }
        for route, counters in self._metrics.routes.items():
            for outcome, count in counters.outcomes.items():
                requests.add_metric([route, outcome.value], count)
            for name, family in families.items():
                histogram: Histogram = getattr(counters, name)
                family.add_metric([route], histogram.cumulative(), histogram.sum)
        yield requests
        yield from families.values()
        cold = HistogramMetricFamily("roost_gateway_cold_wait_seconds", "Waits for a lease that needed a load")
        cold.add_metric([], self._metrics.cold_waits.cumulative(), self._metrics.cold_waits.sum)
        yield cold
        yield CounterMetricFamily(
            "roost_gateway_retries", "Requests that were tried once more", value=self._metrics.retries
        )
        yield GaugeMetricFamily("roost_gateway_in_flight", "Requests being answered now", value=self._metrics.in_flight)

    def _node_table(self) -> Iterator[Metric]:
        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"roost_gateway_node_{name}", text, labels=["node"])

        heard = gauge("heard", "1 while a node reports")
        ready = gauge("engines_ready", "Engines that answer")
        free = gauge("free_slots", "Empty adapter slots")
        resident = gauge("resident_revisions", "Revisions whose bytes are on the node or on their way")
        leased = gauge("leases", "Leases that this gateway holds")
        loads = gauge("loads_in_flight", "Cold loads that run")
        limit = gauge("loads_limit", "Cold loads that may run at once now")
        queued = gauge("loads_queued", "Cold loads that wait")
        of_one = gauge("loads_queued_of_one_tenant", "Cold loads that wait, of the tenant that has most of them")
        takes = gauge("load_seconds", "How long a cold load takes lately")
        rate = gauge("load_rate", "Waiting cold loads that start a second, while any wait")
        cordoned = gauge("cordoned", "1 while a node gets nothing new")
        findings = gauge("audit_findings", "What did not add up in a node's books: anything but 0 is a bug")
        given = CounterMetricFamily(
            "roost_gateway_node_given_bytes", "Bytes of revisions that a node gave to others", labels=["node"]
        )
        arrived = CounterMetricFamily(
            "roost_gateway_node_arrived_bytes",
            "Bytes that came into a node's arena, by where they came from",
            labels=["node", "source"],
        )
        faults = CounterMetricFamily(
            "roost_gateway_node_peer_faults",
            "How often a node gave wrong bytes to another one, as that one counted",
            labels=["node", "peer"],
        )
        for node in self._nodes:
            labels = [node.name]
            heard.add_metric(labels, float(node.heard))
            ready.add_metric(labels, sum(deployment.ready for deployment in node.deployments()))
            free.add_metric(labels, sum(deployment.free_slots for deployment in node.deployments()))
            resident.add_metric(labels, len(node.resident))
            leased.add_metric(labels, node.leased)
            loads.add_metric(labels, node.loads_in_flight)
            limit.add_metric(labels, node.loads_limit)
            queued.add_metric(labels, node.loads_queued)
            of_one.add_metric(labels, max(node.queued_by_tenant.values(), default=0))
            takes.add_metric(labels, node.load_s)
            rate.add_metric(labels, node.load_rate)
            cordoned.add_metric(labels, float(node.draining))
            findings.add_metric(labels, node.audit_findings)
            given.add_metric(labels, node.given_bytes)
            for source, count in node.arrived_bytes.items():
                arrived.add_metric([node.name, source], count)
            for peer, count in node.peer_faults.items():
                faults.add_metric([node.name, peer], count)
        yield from (heard, ready, free, resident, leased, loads, limit, queued, of_one, takes, rate, cordoned, findings)
        yield from (given, arrived, faults)
        yield GaugeMetricFamily(
            "roost_gateway_busy_policies", "Policies whose load is followed", value=len(self._nodes.popularity)
        )


def exposition(collector: Collector) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
