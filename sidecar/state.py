"""What the parts of the state machine share: the node as it stands, and the effects of the event being handled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from backends.interface import EngineLimits
from catalog.names import adapter_name
from wire.node import Acquire, Granted, Refused
from wire.outcomes import Outcome

from .admission import LoadQueue
from .cache import ArenaCache
from .effects import Answer, AnyEffect
from .leases import Lease, LeaseTable
from .negative import NegativeCache
from .neighbours import Neighbours
from .policies import CachePolicy
from .rates import Smoothed
from .settings import SidecarSettings
from .slots import HOLD_S, Engine, Slot

# an engine that refused an adapter would nearly always do so again, and each try takes a resident's slot; but what
# looks like the adapter's fault may have been the engine's, so it is not for ever
_UNFIT_FIRST_S = 30.0
_FIRST_GUESS_LEASE_S = 1.0


class Changes:
    """What changed since the gateways were last told. ``counts`` are engines of which only the outstanding work did."""

    def __init__(self) -> None:
        self.digests: set[str] = set()
        self.engines: set[str] = set()
        self.counts: set[str] = set()
        self.loads = False

    def __bool__(self) -> bool:
        return bool(self.digests or self.engines or self.loads)


class NodeState:
    """One node. Mutated by the machine's parts only, within one event at a time."""

    def __init__(self, settings: SidecarSettings, policy: CachePolicy) -> None:
        self.settings = settings
        self.engines = {engine.name: Engine(engine) for engine in settings.engines}
        self.by_base: dict[str, list[Engine]] = {}
        for engine in self.engines.values():
            self.by_base.setdefault(engine.base, []).append(engine)
        self.cache = ArenaCache(settings.arena_bytes, policy)
        self.leases = LeaseTable(settings.gateway_silence_s)
        self.queue = LoadQueue(settings)
        self.failures: NegativeCache[str] = NegativeCache(settings.negative_first_s, settings.negative_max_s)
        self.unfit: NegativeCache[tuple[str, EngineLimits]] = NegativeCache(
            min(_UNFIT_FIRST_S, settings.negative_max_s), settings.negative_max_s
        )
        # by digest and engine: what broke there, or died of it or beside it, says nothing of other engines
        self.broken: NegativeCache[tuple[str, str]] = NegativeCache(settings.negative_first_s, settings.negative_max_s)
        # how long leases of adapters lasted lately
        self.lease_s = Smoothed(_FIRST_GUESS_LEASE_S)
        self.neighbours = Neighbours(settings.node, on=settings.peer_transfers > 0)
        self.cordoned = False
        # digests whose fetch was told to stop and has not ended yet
        self.cancelled: set[str] = set()
        self.changes = Changes()
        self.counts: Counter[str] = Counter()
        # bytes that came into the arena, by where they came from
        self.arrived_bytes: Counter[str] = Counter()
        # where other nodes may take bytes, once that is known
        self.bytes_endpoint = ""
        self.effects: list[AnyEffect] = []

    def to_ask(self, request: Acquire) -> list[Engine] | None:
        """The engines of its base that have a way to be asked it."""
        engines = self.by_base.get(request.base)
        if not engines or not request.not_by:
            return engines
        return [engine for engine in engines if engine.settings.backend != request.not_by]

    def grant(self, asks: Iterable[int], request: Acquire, engine: Engine, now: float, *, waited: bool) -> None:
        """Make the lease that ``request`` asks for on ``engine``, which serves it, and answer."""
        adapter = request.digest and adapter_name(request.tenant, request.digest)
        lease = Lease(request.gateway, request.lease, engine.name, adapter, request.digest, now)
        self.count_lease(lease, request.instance, now + request.ttl_s, now)
        if adapter:
            slot = engine.slots[adapter]
            slot.rank = slot.rank or request.rank
            slot.size = slot.size or request.size
            if not waited:
                # what waited counts when its load began, once for all who did
                self.cache.touch(request.digest)
        self.counts["granted_after_load" if waited else "granted"] += 1
        self.repeat(asks, lease, waited=waited)

    def count_lease(self, lease: Lease, instance: str, expires: float, now: float) -> None:
        """Enter a new lease of the gateway's life ``instance``, on an engine that has its adapter."""
        self.leases.add(lease, instance, expires, now)
        engine = self.engines[lease.engine]
        engine.outstanding += 1
        self.changes.counts.add(engine.name)
        if lease.adapter:
            slot = engine.slots[lease.adapter]
            slot.leases += 1
            slot.used_at = now

    def repeat(self, asks: Iterable[int], lease: Lease, *, waited: bool = False) -> None:
        """Tell where a lease that stands leads to."""
        engine = self.engines[lease.engine]
        served_base = engine.limits.served_base if engine.limits else engine.base
        granted = Granted(
            lease=lease.lease,
            engine=engine.name,
            host=engine.host,
            port=engine.port,
            adapter=lease.adapter or served_base,
            token=engine.token,
            backend=engine.settings.backend,
            waited=waited,
        )
        self.effects.extend(Answer(ask=ask, answer=granted) for ask in asks)

    def refuse(
        self,
        asks: Iterable[int],
        lease: int,
        outcome: Outcome,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        elsewhere: bool = False,
    ) -> None:
        refused = Refused(
            lease=lease,
            outcome=outcome,
            message=message,
            field=field,
            retry_after_s=retry_after_s,
            elsewhere=elsewhere,
        )
        for ask in asks:
            self.counts[f"refused_{outcome}"] += 1
            self.effects.append(Answer(ask=ask, answer=refused))

    def end_leases(self, ended: Iterable[Lease], now: float, *, lost: bool) -> list[Slot]:
        """Take ended leases out of the engines' counts; returns the slots that became idle by it.

        ``lost`` leases ended without a word of their gateway, so that a request may still be running.
        """
        idle = []
        for lease in ended:
            engine = self.engines[lease.engine]
            engine.outstanding -= 1
            self.changes.counts.add(engine.name)
            slot = engine.slots.get(lease.adapter)
            if slot is None:
                continue
            slot.leases -= 1
            slot.used_at = now
            self._measure(slot, now - lease.since)
            if lost and engine.limits is not None and not engine.limits.removes_for_real:
                # this engine would not answer "busy", it would take the adapter away under the request
                slot.hold_until = now + self.settings.lost_lease_hold_s
            if slot.leases == 0:
                idle.append(slot)
        return idle

    def _measure(self, slot: Slot, lease_s: float) -> None:
        if slot.lease_s is None:
            slot.lease_s = Smoothed(lease_s)
        slot.lease_s.add(lease_s)
        self.lease_s.add(lease_s)

    def misfit(self, engine: Engine, digest: str, rank: int, now: float) -> str | None:
        """Why a ready ``engine`` can't be given an adapter: its rank, that it, or one like it, refused it lately, or
        that it failed with it lately."""
        if engine.limits is None:
            return None
        failed = self.unfit.blocked((digest, engine.limits), now) or self.broken.blocked((digest, engine.name), now)
        return engine.misfit(rank) or (failed.message if failed else None)

    def rejected(self, digest: str) -> bool:
        """Whether every ready engine of a base refused an adapter lately, or failed with it, so that another node may
        do better."""
        return any(
            all((digest, limits) in self.unfit or (digest, name) in self.broken for name, limits in ready)
            for engines in self.by_base.values()
            if (ready := [(engine.name, engine.limits) for engine in engines if engine.limits is not None])
        )

    def broke(self, engine: Engine, digest: str, message: str, now: float) -> None:
        """``engine`` failed while it loaded an adapter, which is not tried there again for a while."""
        self.broken.remember((digest, engine.name), message, now)
        self.counts["load_failures"] += 1
        self.digest_changed(digest)

    def engines_changed(self) -> None:
        """Others are ready than before: what all of them had refused may be wanted here again, or not any more."""
        calls = (engine.calls_at_once for engine in self.engines.values())
        self.queue.hands = sum(count for count in calls if count > 1)
        self.changes.digests.update(digest for memory in (self.unfit, self.broken) for digest, _ in memory)

    @property
    def cordon_message(self) -> str:
        return f"node {self.settings.node} is being drained"

    def hold(self, slot: Slot, now: float) -> None:
        """Leave a slot alone for a while: its engine is not done with it."""
        slot.hold_until = now + HOLD_S

    def digest_changed(self, digest: str) -> None:
        self.changes.digests.add(digest)

    def slot_changed(self, engine: Engine, digest: str) -> None:
        self.changes.digests.add(digest)
        self.changes.engines.add(engine.name)
