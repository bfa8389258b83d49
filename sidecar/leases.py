"""Who uses what: the leases that gateways hold, counted exactly."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import msgspec

from .timers import Timers

LeaseKey = tuple[str, int]


class Lease(msgspec.Struct, frozen=True):
    """One request's use of an engine since ``since``; ``adapter`` and ``digest`` are empty for the base itself."""

    gateway: str
    lease: int
    engine: str
    adapter: str
    digest: str
    since: float = 0.0

    @property
    def key(self) -> LeaseKey:
        return self.gateway, self.lease


class Life(enum.Enum):
    """Which life of a gateway a message is of. NEW: what the former one held is void. PAST: it came too late."""

    SAME = enum.auto()
    NEW = enum.auto()
    PAST = enum.auto()


class _Gateway:
    __slots__ = ("former", "heard_at", "instance", "leases")

    def __init__(self, instance: str, heard_at: float) -> None:
        self.instance = instance
        # what was sent before a restart may arrive after it
        self.former = ""
        self.heard_at = heard_at
        self.leases: set[int] = set()


class LeaseTable:
    """All leases by gateway, engine and digest. Whatever ends leases returns them, each exactly once."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._leases: dict[LeaseKey, Lease] = {}
        self._gateways: dict[str, _Gateway] = {}
        self._by_engine: dict[str, set[LeaseKey]] = {}
        self._by_digest: Counter[str] = Counter()
        self._added = 0
        self._ended = 0
        self._expiries: Timers[LeaseKey] = Timers()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def get(self, key: LeaseKey) -> Lease | None:
        return self._leases.get(key)

    def uses(self, digest: str) -> bool:
        """Whether any lease, on any engine, is for ``digest``."""
        return digest in self._by_digest

    def add(self, lease: Lease, instance: str, expires: float, now: float) -> None:
        """Count a new lease of the gateway's life ``instance``. Raises KeyError if its key is in use."""
        if lease.key in self._leases:
            raise KeyError(lease.key)
        known = self._gateways.get(lease.gateway)
        if known is None:
            # silent for long while it waited for this
            known = self._gateways[lease.gateway] = _Gateway(instance, now)
        self._added += 1
        known.leases.add(lease.lease)
        self._leases[lease.key] = lease
        self._by_engine.setdefault(lease.engine, set()).add(lease.key)
        if lease.digest:
            self._by_digest[lease.digest] += 1
        self._expiries.set(lease.key, expires)

    def renew(self, key: LeaseKey, expires: float) -> None:
        """The same lease was asked again: it lives at least until ``expires``."""
        self._expiries.set(key, expires)

    def drop(self, key: LeaseKey) -> Lease | None:
        """End one lease; None where there is none of that key."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return None
        self._ended += 1
        self._gateways[lease.gateway].leases.discard(lease.lease)
        self._by_engine[lease.engine].discard(key)
        if lease.digest:
            self._by_digest[lease.digest] -= 1
            if not self._by_digest[lease.digest]:
                del self._by_digest[lease.digest]
        self._expiries.cancel(key)
        return lease

    def hear(self, gateway: str, instance: str, now: float) -> Life:
        """Any message of a gateway is a sign of life, and says which life. Nothing of a PAST one may be acted on."""
        known = self._gateways.get(gateway)
        if known is None:
            self._gateways[gateway] = _Gateway(instance, now)
            return Life.SAME
        if known.instance != instance:
            if known.former == instance:
                return Life.PAST
            known.former, known.instance, known.heard_at = known.instance, instance, now
            return Life.NEW
        known.heard_at = now
        return Life.SAME

    def drop_gateway(self, gateway: str) -> list[Lease]:
        known = self._gateways.get(gateway)
        return self._drop_all([(gateway, lease) for lease in known.leases]) if known else []

    @property
    def gateways(self) -> Collection[str]:
        """Those heard of, and not silent for longer than the bound when that was last looked at."""
        return self._gateways.keys()

    def of_gateway(self, gateway: str) -> set[int]:
        """The numbers of the gateway's leases. Not to be kept."""
        known = self._gateways.get(gateway)
        return known.leases if known else set()

    def of_engine(self, engine: str) -> Iterator[Lease]:
        """The engine's leases, as far as the table's indexes agree."""
        return (lease for key in self._by_engine.get(engine, ()) if (lease := self._leases.get(key)) is not None)

    def drop_engine(self, engine: str) -> list[Lease]:
        return self._drop_all(list(self._by_engine.get(engine, ())))

    def drop_adapter(self, engine: str, adapter: str) -> list[Lease]:
        keys = self._by_engine.get(engine, ())
        return self._drop_all([key for key in keys if self._leases[key].adapter == adapter])

    def drop_silent(self, now: float) -> list[Lease]:
        """End the leases of gateways unheard of for longer than the bound, and forget those gateways."""
        ended: list[Lease] = []
        for name, gateway in list(self._gateways.items()):
            if now - gateway.heard_at > self._silence_s:
                ended += self.drop_gateway(name)
                del self._gateways[name]
        return ended

    def drop_expired(self, now: float) -> list[Lease]:
        return self._drop_all(self._expiries.due(now))

    def check(self) -> list[str]:
        """What does not add up between the leases and their indexes."""
        indexes = {
            "gateways": sum(len(gateway.leases) for gateway in self._gateways.values()),
            "engines": sum(len(keys) for keys in self._by_engine.values()),
            "expiries": len(self._expiries),
            "what was added and ended": self._added - self._ended,
        }
        return [f"{count} leases by {by}, of {len(self)}" for by, count in indexes.items() if count != len(self)]

    def excuse(self, seconds: float) -> None:
        """We were not listening for ``seconds``: that time is nobody's silence."""
        for gateway in self._gateways.values():
            gateway.heard_at += seconds

    def _drop_all(self, keys: Iterable[LeaseKey]) -> list[Lease]:
        return [lease for key in keys if (lease := self.drop(key)) is not None]
