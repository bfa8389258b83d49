"""What a tenant may ask for in a minute: requests, and tokens as engines count them. Token buckets; the clock is given.

A bucket holds a minute's worth. Tokens are known only when an answer is over: a request takes what this tenant's
requests took on average, and the difference is settled at its end, so that a level may be below zero for a while.

Who is turned away is promised a moment: when the bucket will have refilled for all who were promised before and for
him. So not all who are turned away at once are told to come back at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from wire.outcomes import QuotaExceeded

# tokens that a tenant's first requests are taken to need
_FIRST_GUESS = 256.0
_SMOOTHING = 0.1
# a promise that nobody came for is given up after this: clients wait whole seconds
_PATIENCE_S = 3.0
# with each further one in a row so many times as many of the latest are: who asked again and again, without waiting,
# was promised a moment each time
_DISBELIEF, _MOST_DISBELIEF = 4, 4**6
# further ahead than this nobody is promised a place of his own: those who never come back would push it on and on
_HORIZON_S = 600.0
# tenants that are remembered without need; past it those that can be forgotten are, whenever there are twice as many
_REMEMBERED = 4096


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds of one tenant over a minute; 0 is none."""

    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)!r}")

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)

    def share(self, gateways: int) -> Quota:
        """What one of so many gateways may let in."""
        return Quota(
            requests_per_minute=self.requests_per_minute / gateways, tokens_per_minute=self.tokens_per_minute / gateways
        )


class Bucket:
    """Refills at ``per_minute``/60 a second up to ``capacity``; 0 a minute is a bucket that is never empty."""

    __slots__ = ("_at", "_rate", "capacity", "level")

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60.0
        # less than one request a minute must still let one in at a time
        self.capacity = max(1.0, per_minute)
        self.level = self.capacity
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` can be taken; 0 for now."""
        if not self._rate:
            return 0.0
        self.level = min(self.capacity, self.level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (amount - self.level) / self._rate)

    def take(self, amount: float) -> None:
        """Take what ``wait_s`` said is there; a negative ``amount`` gives back."""
        if self._rate:
            self.level = min(self.capacity, self.level - amount)


class _Tenant:
    """One tenant's buckets, and the promises made to whom it turned away: when each is due. ``unsettled`` requests have
    been let in and are not over.
    """

    __slots__ = ("disbelief", "mean_tokens", "metered", "promises", "requests", "tokens", "unsettled")

    def __init__(self, quota: Quota, now: float) -> None:
        self.requests = Bucket(quota.requests_per_minute, now)
        self.tokens = Bucket(quota.tokens_per_minute, now)
        self.metered = quota.tokens_per_minute > 0
        self.mean_tokens = min(_FIRST_GUESS, self.tokens.capacity)
        self.promises: deque[float] = deque()
        self.disbelief = 1
        self.unsettled = 0

    def admit(self, now: float) -> float:
        """Take one request's worth, and return how many tokens that was. Raises QuotaExceeded."""
        self._give_up(now)
        if self.promises and self.promises[0] <= now:
            self.promises.popleft()
            self.disbelief = 1
        reserved = self.mean_tokens
        wait_s = self._wait_s(1, reserved, now)
        if wait_s > 0:
            raise QuotaExceeded(self._why(now), retry_after_s=self._promise(wait_s, reserved, now))
        self.requests.take(1.0)
        self.tokens.take(reserved)
        return reserved

    def idle(self, now: float) -> bool:
        """Whether forgetting it changes nothing for the tenant."""
        self._wait_s(1, 0.0, now)
        full = self.requests.level == self.requests.capacity and self.tokens.level == self.tokens.capacity
        return full and not self.promises and not self.unsettled

    def _wait_s(self, count: int, reserved: float, now: float) -> float:
        # no bucket ever holds more than its capacity: beyond that a wait is for refilling, not for a level
        return max(self.requests.wait_s(float(count), now), self.tokens.wait_s(count * reserved, now))

    def _give_up(self, now: float) -> None:
        """Count no more on those who did not come when they were told to, nor on others like them."""
        while self.promises and self.promises[0] < now - _PATIENCE_S:
            for _ in range(min(self.disbelief, len(self.promises) - 1)):
                self.promises.pop()
            self.promises.popleft()
            self.disbelief = min(self.disbelief * _DISBELIEF, _MOST_DISBELIEF)

    def _promise(self, alone_s: float, reserved: float, now: float) -> float:
        """Seconds until a place is free that nobody else was promised."""
        wait_s = self._wait_s(len(self.promises) + 1, reserved, now)
        if wait_s > alone_s + _HORIZON_S:
            return alone_s + _HORIZON_S
        self.promises.append(now + wait_s)
        return wait_s

    def _why(self, now: float) -> str:
        by_requests = self.requests.wait_s(1.0, now) > 0
        return f"this tenant's quota of {'requests' if by_requests else 'tokens'} a minute is used up"


class Admission:
    """One request's part of a quota, until it is settled. ``metered``: somebody must count its tokens."""

    __slots__ = ("_reserved", "_settled", "_tenant")

    def __init__(self, tenant: _Tenant, reserved: float) -> None:
        self._tenant = tenant
        self._reserved = reserved
        self._settled = False
        tenant.unsettled += 1

    @property
    def metered(self) -> bool:
        return self._tenant.metered

    def settle(self, tokens: float | None, *, least: float = 0.0) -> None:
        """The request is over and took so many tokens; where nobody can say, what such requests take and no less than
        ``least``. Only the first call counts.
        """
        if not self._settle():
            return
        tenant = self._tenant
        if tokens is None:
            tenant.tokens.take(max(0.0, least - self._reserved))
            return
        tenant.tokens.take(tokens - self._reserved)
        if tokens:
            # what was refused says nothing about what requests take
            tenant.mean_tokens += _SMOOTHING * (min(tokens, tenant.tokens.capacity) - tenant.mean_tokens)

    def withdraw(self) -> None:
        """The request reached no engine: it counts for nothing."""
        if self._settle():
            self._tenant.requests.take(-1.0)
            self._tenant.tokens.take(-self._reserved)

    def _settle(self) -> bool:
        """Whether this is the first call."""
        if self._settled:
            return False
        self._settled = True
        self._tenant.unsettled -= 1
        return True


class Quotas:
    """The quotas of one gateway's tenants: ``own`` ones by name, and ``default`` for the others. ``clock`` in seconds.

    ``gateways`` is among how many a quota is divided: they don't ask each other at each request.
    """

    def __init__(
        self,
        own: Mapping[str, Quota],
        default: Quota,
        *,
        gateways: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = {tenant: quota.share(gateways) for tenant, quota in own.items()}
        self._default = default.share(gateways)
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._sweep_at = _REMEMBERED

    def __bool__(self) -> bool:
        """Whether any tenant has a quota."""
        return bool(self._default) or any(self._own.values())

    def admit(self, tenant: str, *, everywhere: bool) -> Admission | None:
        """Let one request of ``tenant`` in; None where it has no quota. Raises QuotaExceeded.

        Keys that reach ``everywhere`` run the fleet: they have a quota only where one is theirs by name.
        """
        now = self._clock()
        known = self._tenants.get(tenant)
        if known is None:
            quota = self._own.get(tenant, Quota() if everywhere else self._default)
            if not quota:
                return None
            if len(self._tenants) >= self._sweep_at:
                self._forget(now)
                self._sweep_at = max(_REMEMBERED, 2 * len(self._tenants))
            known = self._tenants[tenant] = _Tenant(quota, now)
        return Admission(known, known.admit(now))

    def _forget(self, now: float) -> None:
        for name in [name for name, tenant in self._tenants.items() if tenant.idle(now)]:
            del self._tenants[name]
