"""The node as gateways see it: full state, and what changed since they were last told."""

from __future__ import annotations

from typing import TypedDict

from catalog.blobs import is_digest
from wire.node import EngineReport, NodeDelta, NodeReport, Residency
from wire.outcomes import Outcome

from .slots import Engine, SlotState
from .state import Changes, NodeState

_BY_SLOT = {
    SlotState.SERVING: Residency.SERVING,
    SlotState.INSTALLING: Residency.INSTALLING,
    SlotState.DRAINING: Residency.DRAINING,
    SlotState.REMOVING: Residency.DRAINING,
}
# a bound on what a report holds, whoever asks
MOST_TENANTS = 16
# the best of a revision's slots counts
_RANKING = (Residency.SERVING, Residency.INSTALLING, Residency.DRAINING)


def residencies(state: NodeState, digests: set[str] | None = None) -> dict[str, Residency]:
    """Where each of ``digests`` stands; without ``digests`` all that are not absent."""
    if digests is None:
        digests = {slot.digest for engine in state.engines.values() for slot in engine.slots.values()}
        # not those yet that have no digest
        digests.update(filter(is_digest, state.cache), state.failures)
        digests.update(digest for memory in (state.unfit, state.broken) for digest, _ in memory)
    in_slots: dict[str, set[Residency]] = {}
    for engine in state.engines.values():
        for slot in engine.slots.values():
            if slot.digest in digests:
                in_slots.setdefault(slot.digest, set()).add(_BY_SLOT[slot.state])
    return {digest: _residency(state, digest, in_slots.get(digest, set())) for digest in digests}


def _residency(state: NodeState, digest: str, in_slots: set[Residency]) -> Residency:
    for residency in _RANKING:
        if residency in in_slots:
            return residency
    entry = state.cache.get(digest)
    if state.rejected(digest) or (entry is not None and entry.overdue):
        return Residency.FAILED
    if entry is not None:
        return Residency.RESIDENT if entry.ready else Residency.FETCHING
    return Residency.FAILED if digest in state.failures else Residency.ABSENT


def engine_report(engine: Engine) -> EngineReport:
    limits = engine.limits
    serving = [slot for slot in engine.slots.values() if slot.state is SlotState.SERVING]
    return EngineReport(
        engine=engine.name,
        backend=engine.settings.backend,
        base=engine.base,
        fingerprint=engine.settings.fingerprint,
        health=engine.health,
        detail=engine.detail,
        slots=max(0, limits.slots - engine.foreign) if limits else 0,
        # of an engine that starts, what it is started with: a gateway must not take it for one that never fits
        max_rank=limits.max_rank if limits else engine.settings.max_rank,
        targets=limits.targets if limits else (),
        serving=tuple(slot.adapter for slot in serving),
        outstanding=engine.outstanding,
        pid=engine.pid,
        since=engine.since,
        restarts=engine.restarts,
        leases=tuple(slot.leases for slot in serving),
        changing=len(engine.slots) - len(serving),
    )


def full_report(state: NodeState, *, epoch: int, number: int) -> NodeReport:
    return NodeReport(
        node=state.settings.node,
        endpoint=state.settings.endpoint,
        epoch=epoch,
        engines=tuple(engine_report(engine) for engine in state.engines.values()),
        resident=residencies(state),
        arena_bytes=state.cache.capacity,
        base_names=tuple(sorted(state.by_base)),
        queued_by_tenant=_queued_by_tenant(state),
        number=number,
        bytes_endpoint=state.bytes_endpoint,
        **_figures(state),
    )


def delta_report(state: NodeState, changes: Changes) -> NodeDelta:
    """All that ``changes`` names, with the values of now: applying one twice, or late, ends in the same state."""
    return NodeDelta(
        node=state.settings.node,
        residency=residencies(state, changes.digests) if changes.digests else {},
        engines=tuple(engine_report(state.engines[name]) for name in sorted(changes.engines | changes.counts)),
        queued_by_tenant=_queued_by_tenant(state) if changes.loads else None,
        **_figures(state),
    )


class _Figures(TypedDict):
    """What both kinds of report tell each time."""

    arena_used: int
    loads_in_flight: int
    loads_queued: int
    loads_limit: int
    load_s: float
    load_rate: float
    draining: bool
    fetches: int
    installs: int
    rejected: int
    audit_findings: int
    arrived_bytes: dict[str, int]
    given_bytes: int
    peer_faults: dict[str, int]


def _figures(state: NodeState) -> _Figures:
    queue, counts = state.queue, state.counts
    return {
        "arena_used": state.cache.used,
        "loads_in_flight": queue.in_flight,
        "loads_queued": queue.queued,
        "loads_limit": queue.limit + queue.hands,
        "load_s": queue.times.load_s,
        "load_rate": queue.start_rate,
        "draining": state.cordoned,
        "fetches": counts["fetched"],
        "installs": counts["installed"],
        "rejected": counts[f"refused_{Outcome.COLD_LOAD_BOUND}"],
        "audit_findings": counts["audit_findings"],
        "arrived_bytes": dict(state.arrived_bytes),
        "given_bytes": counts["given_bytes"],
        "peer_faults": dict(state.neighbours.faults),
    }


def _queued_by_tenant(state: NodeState) -> dict[str, int]:
    return dict(state.queue.turns.longest(MOST_TENANTS))
