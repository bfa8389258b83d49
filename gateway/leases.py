"""Leases: what holds a revision in its slot on an engine for as long as a request uses it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping

from wire.node import Acquire, AnswerOfNode, AskOfNode, Granted, HeldLease, Holding, Refused, Release
from wire.outcomes import NoHealthyNode, RoostError, error_for
from wire.peers import Peer
from wire.sockets import Requester

from .nodes import Node
from .placement import Demand

# a message costs more than a slot is worth for so long
_GATHER_S = 0.002
_RETRY_S = 0.5
# a lease outlives its request's deadline by so much: its own end is only for releases that were lost
_SLACK_S = 30.0
# of a node that is away: past this many it has long forgotten them
_MOST_OWED = 65_536


class TryElsewhere(Exception):
    """This node can't take the request now, another one may. ``error`` is the answer where there is no other.

    ``refused``: the node said so itself, and would say it again; otherwise an engine or a connection broke. ``not_by``
    is the backend of which no engine can be asked this, and ``engine`` the node's that could not be reached.
    """

    def __init__(self, error: RoostError, *, refused: bool = False, not_by: str = "", engine: str = "") -> None:
        super().__init__(error.message)
        self.error = error
        self.refused = refused
        self.not_by = not_by
        self.engine = engine


class Lease:
    """A granted lease. Whoever holds it calls ``release`` exactly once or more; only the first call counts."""

    __slots__ = (
        "_desk", "_released", "adapter", "backend", "engine", "held_for", "host", "node", "number", "port", "token",
        "until", "waited",
    )  # fmt: skip

    def __init__(self, desk: LeaseDesk, node: Node, granted: Granted, held_for: str, until: float) -> None:
        self._desk = desk
        self._released = False
        # what the sidecar knows it by: the adapter, or nothing for the base; and when its request is over at the latest
        self.held_for = held_for
        self.until = until
        self.node = node
        self.number = granted.lease
        self.engine = granted.engine
        self.host = granted.host
        self.port = granted.port
        self.adapter = granted.adapter
        self.waited = granted.waited
        self.token = granted.token
        self.backend = granted.backend

    def release(self, *, engine_failed: bool = False) -> None:
        """Give it back. ``engine_failed`` has the sidecar look at the engine at once."""
        if not self._released:
            self._released = True
            self.node.leased -= 1
            self._desk.give_back(self.node.name, self.number, self.engine if engine_failed else "")


class _Book:
    """What this gateway has of one node: leases by number, and the numbers that it waits for."""

    __slots__ = ("asked", "held")

    def __init__(self) -> None:
        self.held: dict[int, Lease] = {}
        self.asked: set[int] = set()


def _nobody(node: Node, digest: str) -> tuple[Peer, ...]:
    return ()


class LeaseDesk:
    """Acquires from sidecars and gives back to them. Releases of a few milliseconds share one message.

    ``peers`` says which other nodes a node may ask for a digest.
    """

    def __init__(
        self,
        requesters: Mapping[str, Requester[AskOfNode, AnswerOfNode]],
        *,
        gateway: str,
        instance: str,
        peers: Callable[[Node, str], tuple[Peer, ...]] = _nobody,
    ) -> None:
        self._requesters = requesters
        self._peers = peers
        self._gateway = gateway
        self._instance = instance
        self._loop = asyncio.get_running_loop()
        self._returned: dict[str, list[int]] = {}
        self._books: dict[str, _Book] = {}
        self._newest = 0
        self._flush_timer: asyncio.TimerHandle | None = None
        # unique over this gateway's lives too: a number of a former life may still be held
        self._numbers = itertools.count(time.time_ns() // 1_000_000 << 20)

    async def acquire(
        self, node: Node, demand: Demand, *, size: int, timeout_s: float, use_s: float, failed_engine: str = ""
    ) -> Lease:
        """A lease on ``node``, waited for up to ``timeout_s`` and used for up to ``use_s`` seconds; not on its
        ``failed_engine`` if it has another.

        Raises TryElsewhere, or the refusal, or DeadlinePassed. Where no grant arrives, the lease is given back all the
        same: the grant may be on its way.
        """
        requester = self._requesters.get(node.name)
        if requester is None:
            raise TryElsewhere(NoHealthyNode(f"node {node.name} has left the fleet"))
        number = self._newest = next(self._numbers)
        adapter = demand.adapter if demand.digest else ""
        ask = Acquire(
            gateway=self._gateway,
            instance=self._instance,
            lease=number,
            base=demand.base,
            tenant=demand.tenant,
            policy=demand.policy,
            digest=demand.digest,
            size=size,
            rank=demand.rank,
            not_by=demand.not_by,
            ttl_s=use_s + _SLACK_S,
            peers=self._peers(node, demand.digest),
            failed_engine=failed_engine,
        )
        answer: AnswerOfNode | None = None
        book = self._books.get(node.name) or self._books.setdefault(node.name, _Book())
        book.asked.add(number)
        node.asked[adapter] += 1
        try:
            answer = await requester.request(ask, timeout_s=timeout_s)
        except NoHealthyNode as error:
            raise TryElsewhere(error) from None
        finally:
            _count_down(node.asked, adapter)
            book.asked.discard(number)
            if answer is None:
                self.give_back(node.name, number)
        if isinstance(answer, Granted):
            node.leased += 1
            lease = book.held[number] = Lease(self, node, answer, adapter, self._loop.time() + use_s)
            return lease
        raise _refusal(answer, node)

    def holding(self, node: str) -> Holding:
        """All that is held of ``node`` and asked of it, for its books. What was given back is told first."""
        self._flush_of(node)
        book, now = self._books.get(node) or _Book(), self._loop.time()
        held = tuple(
            HeldLease(lease.number, lease.engine, lease.held_for, max(0.0, lease.until - now) + _SLACK_S)
            for lease in book.held.values()
        )
        return Holding(
            gateway=self._gateway, instance=self._instance, leases=held, asked=tuple(book.asked), newest=self._newest
        )

    def give_back(self, node: str, number: int, failed_engine: str = "") -> None:
        """Release a lease by number; with the message that its engine failed, at once if the node is there."""
        book = self._books.get(node)
        if book is not None:
            book.held.pop(number, None)
        if failed_engine and self._send(node, [number], failed_engine):
            return
        self._returned.setdefault(node, []).append(number)
        if self._flush_timer is None:
            self._flush_timer = self._loop.call_later(_GATHER_S, self.flush)

    def flush(self) -> None:
        """Send the releases that were collected; what a node that is away doesn't get is tried again."""
        self._flush_timer = None
        for node in list(self._returned):
            self._flush_of(node)
        if self._returned:
            self._flush_timer = self._loop.call_later(_RETRY_S, self.flush)

    def close(self) -> None:
        """Send what is left, and no more after that."""
        self.flush()
        if self._flush_timer is not None:
            self._flush_timer.cancel()

    def _flush_of(self, node: str) -> None:
        numbers = self._returned.pop(node, None)
        if numbers and not self._send(node, numbers, "") and len(numbers) < _MOST_OWED:
            self._returned[node] = numbers

    def _send(self, node: str, numbers: list[int], failed_engine: str) -> bool:
        release = Release(
            gateway=self._gateway, instance=self._instance, leases=tuple(numbers), failed_engine=failed_engine
        )
        requester = self._requesters.get(node)
        # a node that has left the fleet is owed nothing
        return requester is None or requester.send(release)


def _count_down(asked: dict[str, int], adapter: str) -> None:
    left = asked[adapter] - 1
    if left:
        asked[adapter] = left
    else:
        del asked[adapter]


def _refusal(answer: AnswerOfNode, node: Node) -> Exception:
    if not isinstance(answer, Refused):
        return TryElsewhere(NoHealthyNode(f"node {node.name} answered a lease with {type(answer).__name__}"))
    error = error_for(answer.outcome, answer.message, field=answer.field, retry_after_s=answer.retry_after_s)
    return TryElsewhere(error, refused=True) if answer.elsewhere else error
