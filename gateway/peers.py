"""Whom a node may ask for bytes that it lacks: nodes that have them, as reported, where that node can reach them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import msgspec

from wire.hosts import is_everywhere, is_loopback
from wire.node import Residency
from wire.peers import Peer

from .nodes import Node, NodeTable
from .settings import NodeAddress

_MAX_PEERS = 2
# how long a node that was sent to the store is believed to be getting there, and how many are told of it: no more than
# it gives to at a time, or the last of them would wait for the first
_FIRST_S, _MAX_TOLD = 30.0, 8
_MAX_FIRST = 4096
_TCP = "tcp://"


class PeerDirectory:
    """``address`` gives the address of a node by its name; ``clock`` gives seconds.

    Of nodes that ask at once for what none has, the first goes to the store and the others are told of it; where they
    are many, one more goes to the store for each so many.
    """

    def __init__(
        self, table: NodeTable, address: Callable[[str], NodeAddress | None], *, clock: Callable[[], float]
    ) -> None:
        self._table = table
        self._address = address
        self._clock = clock
        self._turn = 0
        # by digest, the node that was told of nobody last
        self._first: dict[str, _First] = {}

    def __call__(self, node: Node, digest: str) -> tuple[Peer, ...]:
        """For ``node``, that is asked for ``digest``; nobody where it has the bytes, or is getting them."""
        known = not digest or node.holds(digest) or node.resident.get(digest) is Residency.FETCHING
        if known or len(self._table) < 2:
            return ()
        asker = self._address(node.name)
        if asker is None:
            return ()
        holders = [other for other in self._table.all if other.holds(digest) and other is not node and _gives(other)]
        if len(holders) > _MAX_PEERS:
            # all of them in turn
            self._turn = (self._turn + 1) % len(holders)
            holders = holders[self._turn :] + holders[: self._turn]
        found = (self._peer(asker, other) for other in holders or self._getting(node, digest))
        return tuple(islice(filter(None, found), _MAX_PEERS))

    def _getting(self, node: Node, digest: str) -> list[Node]:
        """Who is on its way to the store for what nobody has; the node itself where nobody is."""
        now = self._clock()
        first = self._first.get(digest)
        if first is not None and now < first.until:
            if first.node == node.name:
                return []
            known = self._table.get(first.node)
            if known is not None and _gives(known) and (node.name in first.told or len(first.told) < _MAX_TOLD):
                first.told.add(node.name)
                return [known]
        fetching = [
            other
            for other in self._table.all
            if other.resident.get(digest) is Residency.FETCHING and other is not node and _gives(other)
        ]
        if not fetching or (first is not None and len(first.told) >= _MAX_TOLD):
            self._first.pop(digest, None)
            self._first[digest] = _First(node.name, now + _FIRST_S, set())
            fetching = []
            if len(self._first) > _MAX_FIRST:
                del self._first[next(iter(self._first))]
        return fetching

    def _peer(self, asker: NodeAddress, other: Node) -> Peer | None:
        address = self._address(other.name)
        endpoint = None if address is None else _reached(asker.endpoint, address.endpoint, other.bytes_endpoint)
        if address is None or endpoint is None:
            return None
        return Peer(other.name, endpoint, address.public)


class _First(msgspec.Struct):
    """Who went to the store, until when that counts, and who were told of it."""

    node: str
    until: float
    told: set[str]


def _gives(node: Node) -> bool:
    return bool(node.bytes_endpoint) and node.heard and not node.doubtful


def _reached(asker: str, other: str, gives_at: str) -> str | None:
    """Where the node at ``asker`` reaches ``gives_at`` of the node at ``other``; None where it can't.

    Socket files are of this gateway's host, where both have to be, and so is who is reached by one. A port is on the
    host that the gateway knows the node by: the node itself may listen at all addresses.
    """
    here = _is_here(asker)
    if not gives_at.startswith(_TCP):
        return gives_at if here and _is_here(other) else None
    host = _host(other if other.startswith(_TCP) else gives_at)
    if is_everywhere(host) or host == "*" or (is_loopback(host) and not here):
        return None
    return f"{_TCP}{host}:{gives_at.rpartition(':')[2]}"


def _is_here(endpoint: str) -> bool:
    return not endpoint.startswith(_TCP) or is_loopback(_host(endpoint))


def _host(endpoint: str) -> str:
    return endpoint.removeprefix(_TCP).rpartition(":")[0]
