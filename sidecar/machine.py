"""The node's state machine: events in, effects out. No sockets, no files, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from catalog.names import adapter_name, split_adapter_name
from wire.node import Acquire
from wire.outcomes import Outcome

from .audit import Auditor
from .calls import EngineCalls
from .completions import Completions
from .effects import AnyEffect
from .events import (
    AnyEvent,
    Asked,
    Cordoned,
    EngineDown,
    EngineRemarked,
    EngineUp,
    FetchCancelled,
    FetchDone,
    FetchFailed,
    FetchOverdue,
    GatewayHeard,
    GatewayHolds,
    GiveBegun,
    GiveEnded,
    OperationEnded,
    PeerFailed,
    PullDone,
    PullFailed,
    Released,
    RevisionOffered,
    Tick,
    TransferBound,
    TransferOffered,
    TransferWithdrawn,
)
from .gives import Gives
from .known import KnownRevisions
from .leases import Life
from .lifecycle import Lifecycle
from .loads import Loads
from .negative import Failure
from .policies import CachePolicy, make_policy
from .prefetch import Prefetches
from .resync import Resync
from .settings import SidecarSettings
from .slots import Engine, least_loaded
from .state import NodeState
from .transfers import Transfers
from .waiters import WaitingRoom

# ticks are far closer together than this: a longer pause means that we were stopped, and heard nobody
_STALL_S = 1.0


class Machine:
    """One node. ``handle`` is called with every event in the order of happening, and with the time of it."""

    def __init__(self, settings: SidecarSettings, policy: CachePolicy | None = None) -> None:
        self.state = NodeState(settings, policy or make_policy(settings.cache_policy, settings.arena_bytes))
        self.waiters = WaitingRoom(self.state)
        self._calls = EngineCalls(self.state)
        self._loads = Loads(self.state, self._calls, self.waiters)
        self.known = KnownRevisions(self.state)
        self.prefetches = Prefetches(self.state, self._loads, self.known)
        self._transfers = Transfers(self.state, self._loads, self.known)
        self._completions = Completions(self.state, self._calls, self._loads)
        self._gives = Gives(self.state)
        self._resync = Resync(self.state, self.waiters)
        self._lifecycle = Lifecycle(self.state, self._calls, self._loads, self.waiters, self._resync)
        self.auditor = Auditor(self.state)
        self._ticked: float | None = None
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            Asked: self._asked,
            Released: self._released,
            GatewayHeard: self._gateway_heard,
            GatewayHolds: self._gateway_holds,
            Cordoned: self._then_pump(self._lifecycle.cordoned),
            RevisionOffered: self._then_pump(self._revision_offered),
            TransferOffered: self._transfers.offered,
            TransferBound: self._transfers.bound,
            TransferWithdrawn: self._transfers.withdrawn,
            PullDone: self._then_pump(self._transfers.pull_done),
            PullFailed: self._then_pump(self._transfers.pull_failed),
            FetchDone: self._then_pump(self._completions.fetch_done),
            FetchOverdue: self._then_pump(self._completions.fetch_overdue),
            FetchFailed: self._then_pump(self._completions.fetch_failed),
            FetchCancelled: self._then_pump(self._completions.fetch_cancelled),
            PeerFailed: self.state.neighbours.failed,
            GiveBegun: self._gives.begun,
            GiveEnded: self._then_pump(self._gives.ended),
            EngineUp: self._then_pump(self._lifecycle.engine_up),
            EngineDown: self._then_pump(self._lifecycle.engine_down),
            EngineRemarked: self._lifecycle.engine_remarked,
            Tick: self._then_pump(self._tick),
        }
        call_ended = self._then_pump(self._completions.call_ended)
        self._handlers.update(dict.fromkeys(OperationEnded.__subclasses__(), call_ended))

    def handle(self, event: AnyEvent, now: float) -> list[AnyEffect]:
        """Apply one event; what it wants done, in order."""
        self._handlers[type(event)](event, now)
        self.prefetches.settle(now)
        effects, self.state.effects = self.state.effects, []
        return effects

    def _then_pump(self, handler: Callable[[Any, float], None]) -> Callable[[Any, float], None]:
        def handle(event: Any, now: float) -> None:
            handler(event, now)
            self._loads.pump(now)

        return handle

    # leases

    def _asked(self, event: Asked, now: float) -> None:
        request = event.request
        if not self._heard(request.gateway, request.instance, now):
            message = f"a later life of gateway {request.gateway} was heard already: is its name in use twice?"
            self.state.refuse((event.ask,), request.lease, Outcome.NO_HEALTHY_NODE, message)
            return
        if not 0.0 < request.ttl_s < math.inf:
            message = f"ttl_s must be a positive number of seconds, not {request.ttl_s:g}"
            self.state.refuse((event.ask,), request.lease, Outcome.INVALID_REQUEST, message, field="ttl_s")
            return
        if request.digest:
            self.state.neighbours.told(request.policy, request.digest, request.peers)
        if request.policy and request.digest:
            self.known.note(request.policy, request.tenant, request.digest)
        key = request.gateway, request.lease
        adapter = adapter_name(request.tenant, request.digest) if request.digest else ""
        if self._asked_before(event, key, adapter, now):
            return
        if self.state.cordoned:
            outcome, message = Outcome.NO_HEALTHY_NODE, self.state.cordon_message
            self.state.refuse((event.ask,), request.lease, outcome, message, elsewhere=True)
            return
        engines = self.state.to_ask(request)
        engine = self._serves(request, adapter, engines or [], now)
        if engine is not None:
            self.state.grant((event.ask,), request, engine, now, waited=False)
            return
        refusal = self._hopeless(request, adapter, engines or [], now)
        if refusal is None and event.deadline <= now:
            refusal = {"outcome": Outcome.DEADLINE, "message": "the deadline had passed when the ask came"}
        if refusal is None:
            self._loads.admit(event, adapter, now)
        else:
            self.state.refuse((event.ask,), request.lease, **refusal)

    def _asked_before(self, event: Asked, key: tuple[str, int], adapter: str, now: float) -> bool:
        """Answer an ask for a lease that exists or waits: it is that lease, or its number is wrongly used twice."""
        request = event.request
        lease = self.state.leases.get(key)
        load = None if lease else self.waiters.load_of(key)
        if lease is not None and lease.adapter == adapter and self.state.engines[lease.engine].base == request.base:
            self.state.leases.renew(key, now + request.ttl_s)
            self.state.repeat((event.ask,), lease)
        elif load is not None and load.key == (request.base, adapter):
            self.waiters.join(event, load)
        elif lease is not None or load is not None:
            message = f"lease {key[1]} of gateway {key[0]} is in use for another revision"
            self.state.refuse((event.ask,), key[1], Outcome.INVALID_REQUEST, message, field="lease")
        else:
            return False
        return True

    def _serves(self, request: Acquire, adapter: str, engines: list[Engine], now: float) -> Engine | None:
        """Which engine a lease is for at once: where one just failed the request, another, which may have to load."""
        if not request.failed_engine:
            return least_loaded(engines, adapter)
        others = [engine for engine in engines if engine.name != request.failed_engine]
        engine = least_loaded(others, adapter)
        loads = adapter and any(
            other.loadable and self.state.misfit(other, request.digest, request.rank, now) is None for other in others
        )
        return engine if engine is not None or loads else least_loaded(engines, adapter)

    def _hopeless(self, request: Acquire, adapter: str, engines: list[Engine], now: float) -> dict[str, Any] | None:
        """Why a load would not help, as the arguments of a refusal; None where it may."""
        node = self.state.settings.node
        if not engines:
            if request.base in self.state.by_base:
                message = f"node {node} has no engine of base {request.base} that has a way to be asked this"
                return {"outcome": Outcome.INVALID_REQUEST, "message": message, "elsewhere": True}
            message = f"base {request.base} is not deployed on node {node}"
            return {"outcome": Outcome.BASE_NOT_DEPLOYED, "message": message, "elsewhere": True}
        ready = [engine for engine in engines if engine.ready]
        if not ready:
            message = f"no engine of base {request.base} is ready on node {node}: {engines[0].trouble}"
            return {"outcome": Outcome.NO_HEALTHY_NODE, "message": message, "elsewhere": True}
        if not adapter:
            message = f"node {node} serves adapters of {request.base}, but not the base itself"
            return {"outcome": Outcome.BASE_NOT_DEPLOYED, "message": message, "elsewhere": True}
        if split_adapter_name(adapter) is None:
            return {"outcome": Outcome.INVALID_REQUEST, "message": "the tenant or the digest is malformed"}
        misfits = [self.state.misfit(engine, request.digest, request.rank, now) for engine in ready]
        if all(misfits):
            broken = [self.state.broken.blocked((request.digest, engine.name), now) for engine in ready]
            soonest = min(filter(None, broken), key=lambda failure: failure.until, default=None)
            refusal = _known_bad(soonest, now) if soonest else {"outcome": Outcome.UNFIT, "message": misfits[0]}
            return refusal | {"elsewhere": True}
        if self.state.cache.overdue(request.digest):
            message = f"node {node} waits for its storage to give these bytes"
            return {"outcome": Outcome.KNOWN_BAD, "message": message, "elsewhere": True}
        failure = self.state.failures.blocked(request.digest, now)
        if failure is not None:
            return _known_bad(failure, now)
        if request.size <= 0:
            return {"outcome": Outcome.INVALID_REQUEST, "message": "size must be positive", "field": "size"}
        if not self.state.cache.fits(request.size):
            message = f"{request.size} bytes don't fit into the arena of node {node}"
            return {"outcome": Outcome.STORAGE_FULL, "message": message, "elsewhere": True}
        return None

    def _released(self, event: Released, now: float) -> None:
        if not self._heard(event.gateway, event.instance, now):
            return
        ended = []
        for number in event.leases:
            key = event.gateway, number
            lease = self.state.leases.drop(key)
            if lease is not None:
                ended.append(lease)
            elif not self._withdraw(key, "released before it was granted", now):
                self.state.counts["releases_unknown"] += 1
        if self.state.end_leases(ended, now, lost=False):
            self._loads.pump(now)

    def _revision_offered(self, event: RevisionOffered, now: float) -> None:
        if not self._transfers.announced(event, now):
            self.prefetches.offered(event, now)

    def _withdraw(self, key: tuple[str, int], message: str, now: float, outcome: Outcome = Outcome.CLIENT_GONE) -> bool:
        load = self.waiters.leave(key, outcome, message)
        if load is None:
            return False
        self._loads.give_up_unwanted(load, now)
        return True

    def _gateway_heard(self, event: GatewayHeard, now: float) -> None:
        self._heard(event.gateway, event.instance, now)

    def _gateway_holds(self, event: GatewayHolds, now: float) -> None:
        holding = event.holding
        if not self._heard(holding.gateway, holding.instance, now):
            return
        waited, idle = self._resync.take(holding, now)
        for key in waited:
            self._withdraw(key, "its gateway waits for it no more", now)
        if idle:
            self._loads.pump(now)

    def _heard(self, gateway: str, instance: str, now: float) -> bool:
        """Take a message as its gateway's sign of life; False where it is of a life that has ended.

        The first message of a new life, whichever it is, ends all that the former one held and waited for.
        """
        life = self.state.leases.hear(gateway, instance, now)
        if life is Life.NEW:
            self.state.counts["gateway_restarts"] += 1
            for key in self.waiters.of_gateway(gateway):
                self._withdraw(key, "its gateway restarted", now)
            self.state.end_leases(self.state.leases.drop_gateway(gateway), now, lost=True)
            self._loads.pump(now)
        elif life is Life.PAST:
            self.state.counts["messages_of_past_lives"] += 1
        return life is not Life.PAST

    # time

    def _tick(self, event: Tick, now: float) -> None:
        if self._ticked is not None and now - self._ticked > _STALL_S:
            self.state.leases.excuse(now - self._ticked)
            self._resync.excuse(now - self._ticked)
        self._ticked = now
        for key in self.waiters.overdue(now):
            load = self.waiters.load_of(key)
            stage = load.stage if load else ""
            self._withdraw(key, f"the deadline passed while the load was {stage}", now, Outcome.DEADLINE)
        expired = self.state.leases.drop_expired(now)
        silent = self.state.leases.drop_silent(now)
        self.state.counts["leases_expired"] += len(expired)
        self.state.counts["leases_of_silent_gateways"] += len(silent)
        self.state.end_leases(expired + silent, now, lost=True)
        self._resync.end_holds(now)
        for digest in self.state.failures.forget_old(now):
            self.state.digest_changed(digest)
        for digest, _ in (*self.state.unfit.forget_old(now), *self.state.broken.forget_old(now)):
            self.state.digest_changed(digest)
        self._loads.estimates.expire(now)
        self._completions.retry_unsure(now)
        self._completions.compare(now)
        self._transfers.tick(now)
        self.auditor.tick(now)


def _known_bad(failure: Failure, now: float) -> dict[str, Any]:
    message = f"failed {failure.times} time(s) in a row: {failure.message}"
    return {"outcome": Outcome.KNOWN_BAD, "message": message, "retry_after_s": failure.until - now}
