"""The gateway's connections to its nodes: reports come in by a feed, full state is asked for, leases go out."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from wire.curve import CurveKeys
from wire.node import (
    AnswerOfNode,
    AskOfNode,
    AskState,
    Cordon,
    GatewayAlive,
    Holding,
    NodeReport,
    ReportOfNode,
)
from wire.outcomes import InvalidRequest, NoHealthyNode, NotFound, RoostError
from wire.sockets import ZEROMQ, FeedSubscriber, Requester, Sockets

from .nodes import Node, NodeTable
from .settings import NodeAddress
from .signs import SignsOfLife

_log = logging.getLogger(__name__)

SILENCE_S = 5.0
# how long a sidecar that restarts is waited for, where no other node can take a request
GRACE_S = 3.0
_STATE_TIMEOUT_S = 5.0
_STATE_RETRY_S = 0.5
# the sidecar's next answer is newer, unless it has changed again within a round trip
_STALE_RETRY_S = 0.01
# how often a node that has left is looked at, and how long it must have had nothing: longer than the releases of its
# last requests are gathered
_LEAVING_LOOK_S = 0.25
_LEAVING_IDLE_S = 0.2


class NodeLink:
    """One node's sockets. Keeps its ``node`` current: full state at the start, after a gap and after a silence; and the
    node told that this gateway lives, with what it holds there where the node is heard again or is another life.

    Raises RoostError for an address or a key that is none, or where there is no socket left.
    """

    def __init__(
        self,
        address: NodeAddress,
        node: Node,
        curve: CurveKeys | None,
        sockets: Sockets,
        *,
        alive: GatewayAlive,
        holding: Callable[[], Holding | None],
        keys: Callable[[], dict[str, str]],
    ) -> None:
        self.address = address
        self.node = node
        self._loop = asyncio.get_running_loop()
        self._refresh: asyncio.Task[None] | None = None
        self._refresh_again = False
        self._grace: asyncio.TimerHandle | None = None
        # (epoch, number) of the full state that was taken last
        self._taken = (0, 0)
        # why what is reached there is not taken for this node
        self.trouble = ""
        self._named = False
        self.requester: Requester[AskOfNode, AnswerOfNode] = sockets.requester(
            address.endpoint,
            AskOfNode,
            AnswerOfNode,
            peer=f"node {address.name}",
            curve=curve,
            server_public=address.public,
            patience_s=GRACE_S,
        )
        try:
            self._feed: FeedSubscriber[ReportOfNode] = sockets.subscriber(
                address.feed_endpoint,
                ReportOfNode,
                on_message=self._on_report,
                on_gap=lambda expected, got: self.ask_state(),
                on_silence=self._on_silence,
                on_return=self._on_return,
                silence_s=SILENCE_S,
                curve=curve,
                server_public=address.public,
            )
        except RoostError:
            self.requester.close()
            raise
        # another node would take it for all that is held of it
        self.signs = SignsOfLife(self.requester, alive, lambda: holding() if self._named else None, keys)

    def ask_state(self) -> None:
        """Ask for full state, until the answer is no older than what the feed has told by the time it comes."""
        if self._refresh is None:
            self._refresh = self._loop.create_task(self._refresh_state())
        else:
            self._refresh_again = True

    def dropped(self) -> Counter[str]:
        """Messages dropped by both sockets, by reason."""
        return Counter(self.requester.dropped) + Counter(self._feed.dropped)

    def close(self) -> None:
        for pending in (self._refresh, self._grace):
            if pending is not None:
                pending.cancel()
        self.signs.close()
        self._feed.close()
        self.requester.close()

    def leave(self) -> None:
        """Follow the node no longer; what is under way there can still be given back."""
        for pending in (self._refresh, self._grace):
            if pending is not None:
                pending.cancel()
        self._feed.close()

    @property
    def unused(self) -> bool:
        """Whether this gateway has nothing there."""
        return self.node.leased == 0 and self.requester.in_flight == 0

    def take(self, report: NodeReport) -> None:
        """A full state that was asked for otherwise, unless the feed has told of later changes already."""
        if (report.epoch, report.number) >= self._feed.position:
            self._take_state(report)

    def _on_return(self) -> None:
        self.signs.tell_all()
        self.ask_state()

    def _on_report(self, number: int, report: ReportOfNode) -> None:
        if isinstance(report, NodeReport):
            self._take_state(report)
            return
        epoch, newest = self._taken
        if self._feed.position[0] != epoch or number > newest:
            self.node.apply(report)

    def _on_silence(self) -> None:
        self.node.doubt()
        self._end_grace()
        self._grace = self._loop.call_later(GRACE_S, self.node.fall_silent)

    def _take_state(self, report: NodeReport) -> None:
        self._end_grace()
        self._named = report.node == self.address.name
        if not self._named:
            self.trouble = f"node {self.address.name}: the sidecar at {self.address.endpoint} is node {report.node}"
            self.node.fall_silent()
            return
        self.trouble = ""
        if report.epoch != self._taken[0]:
            self.signs.tell_all()
        self._taken = (report.epoch, report.number)
        self.node.replace(report)

    def _end_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    async def _refresh_state(self) -> None:
        try:
            while True:
                self._refresh_again = False
                try:
                    answer = await self.requester.request(AskState(), timeout_s=_STATE_TIMEOUT_S)
                except RoostError as error:
                    _log.info("%s does not tell its state: %s", self.requester.endpoint, error.message)
                    await asyncio.sleep(_STATE_RETRY_S)
                    continue
                if isinstance(answer, NodeReport):
                    if (answer.epoch, answer.number) < self._feed.position:
                        # the two sockets are not in step: the feed has told of later changes already
                        await asyncio.sleep(_STALE_RETRY_S)
                        continue
                    self._take_state(answer)
                if not self._refresh_again:
                    return
        finally:
            self._refresh = None


class Fleet:
    """The nodes that this gateway sends requests to, and its signs of life to them.

    ``table`` gets the nodes of ``addresses`` that it lacks. ``update`` changes who they are.
    """

    def __init__(
        self,
        addresses: Iterable[NodeAddress],
        table: NodeTable,
        *,
        gateway: str,
        instance: str,
        curve: CurveKeys | None,
        sockets: Sockets = ZEROMQ,
    ) -> None:
        self.requesters: dict[str, Requester[AskOfNode, AnswerOfNode]] = {}
        """Where to ask each node, by its name; also those that have left and are still in use."""
        self._table = table
        self._curve = curve
        self._sockets = sockets
        self._links: dict[str, NodeLink] = {}
        self._leaving: dict[str, NodeLink] = {}
        # since when those that leave have had nothing
        self._idle_since: dict[str, float] = {}
        self._holding: Callable[[str], Holding] | None = None
        self._alive = GatewayAlive(gateway=gateway, instance=instance)
        self._loop = asyncio.get_running_loop()
        self._leaving_timer: asyncio.TimerHandle | None = None
        self.update(addresses)

    def tell_holding(self, holding: Callable[[str], Holding]) -> None:
        """Have nodes told what ``holding`` says of them: after a break or a restart, and now and then."""
        self._holding = holding
        for link in self._links.values():
            link.signs.tell_all()

    @property
    def addresses(self) -> tuple[NodeAddress, ...]:
        """Of the nodes that are in the fleet."""
        return tuple(link.address for link in self._links.values())

    def update(self, addresses: Iterable[NodeAddress]) -> None:
        """Have exactly these nodes. One that leaves gets no new request; those under way go on.

        Raises RoostError, and changes nothing, for a name that is there twice, for an address or a key that no socket
        takes, and where there are no more sockets.
        """
        wanted: dict[str, NodeAddress] = {}
        for address in addresses:
            if wanted.setdefault(address.name, address) is not address:
                raise InvalidRequest(f"two nodes are called {address.name}", field="nodes")
        # whatever can go wrong does so before anybody leaves
        made = self._connected([one for name, one in wanted.items() if self.address_of(name) != one])
        for name in [name for name in self._links if name not in wanted or name in made]:
            self._leave(name, moved=name in made)
        for name, link in made.items():
            self._forget(name)
            if self._table.get(name) is not link.node:
                self._table.put(link.node)
            self._links[name] = link
            self.requesters[name] = link.requester
        for link in self._links.values():
            link.signs.tell_keys()

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why nodes of the fleet are not used though they are there."""
        return tuple(link.trouble for link in self._links.values() if link.trouble)

    async def cordon(self, name: str, *, on: bool) -> None:
        """Take a node out of service, or back in; here its state is known afterwards, by others soon.

        Raises NotFound for a name that no node has, and what the request to it raises.
        """
        link = self._links.get(name)
        if link is None:
            raise NotFound(f"there is no node {name[:64]}", field="name")
        answer = await link.requester.request(Cordon(on=on), timeout_s=_STATE_TIMEOUT_S)
        if not isinstance(answer, NodeReport):
            raise NoHealthyNode(f"node {name} answered {type(answer).__name__} when it was to be cordoned")
        link.take(answer)

    def dropped(self) -> dict[str, int]:
        """Messages dropped by all sockets, by reason."""
        return dict(sum((link.dropped() for link in self._all_links()), Counter[str]()))

    def close(self) -> None:
        if self._leaving_timer is not None:
            self._leaving_timer.cancel()
        for link in self._all_links():
            link.close()

    def _all_links(self) -> Iterator[NodeLink]:
        yield from self._links.values()
        yield from self._leaving.values()

    def address_of(self, name: str) -> NodeAddress | None:
        """Of a node that is in the fleet."""
        link = self._links.get(name)
        return None if link is None else link.address

    def _connected(self, addresses: Iterable[NodeAddress]) -> dict[str, NodeLink]:
        """A link to each, by name; none is left where one can't be made."""
        made: dict[str, NodeLink] = {}
        try:
            for address in addresses:
                name = address.name
                known = self._table.get(name) if name not in self._links else None
                made[name] = NodeLink(
                    address,
                    known or self._table.make(name),
                    self._curve,
                    self._sockets,
                    alive=self._alive,
                    holding=functools.partial(self._held_of, name),
                    keys=self._keys,
                )
        except BaseException:
            for link in made.values():
                link.close()
            raise
        return made

    def _held_of(self, name: str) -> Holding | None:
        return None if self._holding is None else self._holding(name)

    def _keys(self) -> dict[str, str]:
        return {name: link.address.public for name, link in self._links.items() if link.address.public}

    def _leave(self, name: str, *, moved: bool) -> None:
        """``moved``: the same node is reached elsewhere from now on, and gives back there what it has."""
        link = self._links.pop(name)
        self._table.remove(name)
        if moved:
            link.close()
            del self.requesters[name]
        else:
            link.leave()
            self._leaving[name] = link
            if self._leaving_timer is None:
                self._leaving_timer = self._loop.call_later(_LEAVING_LOOK_S, self._look_at_leaving)
        _log.info("node %s %s", name, "has another address" if moved else "leaves")

    def _look_at_leaving(self) -> None:
        now = self._loop.time()
        for name, link in list(self._leaving.items()):
            if not link.unused:
                self._idle_since.pop(name, None)
            elif now - self._idle_since.setdefault(name, now) >= _LEAVING_IDLE_S:
                self._forget(name)
        again = bool(self._leaving)
        self._leaving_timer = self._loop.call_later(_LEAVING_LOOK_S, self._look_at_leaving) if again else None

    def _forget(self, name: str) -> None:
        """End the connection to a node that has left."""
        link = self._leaving.pop(name, None)
        self._idle_since.pop(name, None)
        if link is not None:
            link.close()
            self.requesters.pop(name, None)
