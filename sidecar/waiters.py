"""The asks that wait for loads: joined to one, answered exactly once, gone at their deadline."""

from __future__ import annotations

from wire.outcomes import Outcome

from .admission import Load, Waiter
from .events import Asked
from .leases import LeaseKey
from .slots import Engine
from .state import NodeState
from .timers import Timers


class WaitingRoom:
    """Every waiter by lease, whichever load it waits for."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._loads: dict[LeaseKey, Load] = {}
        self._deadlines: Timers[LeaseKey] = Timers()

    def __len__(self) -> int:
        return len(self._loads)

    def load_of(self, key: LeaseKey) -> Load | None:
        return self._loads.get(key)

    def of_gateway(self, gateway: str) -> list[LeaseKey]:
        return [key for key in self._loads if key[0] == gateway]

    def join(self, asked: Asked, load: Load) -> None:
        """Let an ask wait. Asking for a lease that waits already is one lease with one more answer."""
        key = asked.request.gateway, asked.request.lease
        waiter = load.waiters.get(key)
        if waiter is None:
            load.waiters[key] = Waiter(asked.request, [asked.ask])
            load.not_by[asked.request.not_by] += 1
            self._loads[key] = load
        else:
            waiter.asks.append(asked.ask)
        self._deadlines.set(key, asked.deadline)

    def leave(self, key: LeaseKey, outcome: Outcome, message: str) -> Load | None:
        """Refuse one waiter; the load that it waited for, None where nobody of that lease waits."""
        load = self._loads.get(key)
        if load is not None:
            self._state.refuse(self._dismiss(load, key).asks, key[1], outcome, message)
        return load

    def overdue(self, now: float) -> list[LeaseKey]:
        """The leases whose deadline has passed; each is told once."""
        return self._deadlines.due(now)

    def grant(self, load: Load, engine: Engine, now: float) -> None:
        """Give everybody who waits for ``load`` and can ask ``engine``, which serves its adapter now, a lease on it."""
        for key, waiter in list(load.waiters.items()):
            if waiter.request.not_by != engine.settings.backend:
                self._dismiss(load, key)
                self._state.grant(waiter.asks, waiter.request, engine, now, waited=True)

    def refuse(
        self, load: Load, outcome: Outcome, message: str, *, retry_after_s: float | None = None, elsewhere: bool = False
    ) -> None:
        """Refuse everybody who waits for ``load``."""
        for key in list(load.waiters):
            self._state.refuse(
                self._dismiss(load, key).asks,
                key[1],
                outcome,
                message,
                retry_after_s=retry_after_s,
                elsewhere=elsewhere,
            )

    def _dismiss(self, load: Load, key: LeaseKey) -> Waiter:
        del self._loads[key]
        self._deadlines.cancel(key)
        waiter = load.waiters.pop(key)
        load.not_by[waiter.request.not_by] -= 1
        return waiter
