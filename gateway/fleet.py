"""The gateway's connections to its nodes: reports come in by a feed, full state is asked for, leases go out."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from wire.curve import CurveKeys
from wire.node import AnswerOfNode, AskOfNode, AskState, GatewayAlive, NodeReport, ReportOfNode
from wire.outcomes import RoostError
from wire.sockets import ZEROMQ, FeedSubscriber, Requester, Sockets

from .nodes import Node, NodeTable
from .settings import NodeAddress

_log = logging.getLogger(__name__)

SILENCE_S = 5.0
# how long a sidecar that restarts is waited for, where no other node can take a request
GRACE_S = 3.0
_STATE_TIMEOUT_S = 5.0
_STATE_RETRY_S = 0.5
# the sidecar's next answer is newer, unless it has changed again within a round trip
_STALE_RETRY_S = 0.01
_ALIVE_EVERY_S = 3.0
_ALIVE_RETRY_S = 0.25


class NodeLink:
    """One node's sockets. Keeps its ``Node`` current: full state at the start, after a gap and after a silence."""

    def __init__(self, address: NodeAddress, node: Node, curve: CurveKeys | None, sockets: Sockets) -> None:
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._refresh: asyncio.Task[None] | None = None
        self._refresh_again = False
        self._grace: asyncio.TimerHandle | None = None
        # (epoch, number) of the full state that was taken last
        self._taken = (0, 0)
        self.requester: Requester[AskOfNode, AnswerOfNode] = sockets.requester(
            address.endpoint,
            AskOfNode,
            AnswerOfNode,
            peer=f"node {address.name}",
            curve=curve,
            server_public=address.public,
            patience_s=GRACE_S,
        )
        self._feed: FeedSubscriber[ReportOfNode] = sockets.subscriber(
            address.feed_endpoint,
            ReportOfNode,
            on_message=self._on_report,
            on_gap=lambda expected, got: self.ask_state(),
            on_silence=self._on_silence,
            on_return=self.ask_state,
            silence_s=SILENCE_S,
            curve=curve,
            server_public=address.public,
        )

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
        self._feed.close()
        self.requester.close()

    def _on_report(self, number: int, report: ReportOfNode) -> None:
        if isinstance(report, NodeReport):
            self._take_state(report)
            return
        epoch, newest = self._taken
        if self._feed.position[0] != epoch or number > newest:
            self._node.apply(report)

    def _on_silence(self) -> None:
        self._node.doubt()
        self._end_grace()
        self._grace = self._loop.call_later(GRACE_S, self._node.fall_silent)

    def _take_state(self, report: NodeReport) -> None:
        self._end_grace()
        self._taken = (report.epoch, report.number)
        self._node.replace(report)

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
    """All nodes of the settings, and this gateway's signs of life to them."""

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
        self._links = {address.name: NodeLink(address, table[address.name], curve, sockets) for address in addresses}
        self._alive = GatewayAlive(gateway=gateway, instance=instance)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._tell_alive)

    @property
    def requesters(self) -> Mapping[str, Requester[AskOfNode, AnswerOfNode]]:
        """Where to ask each node, by its name."""
        return {name: link.requester for name, link in self._links.items()}

    def dropped(self) -> dict[str, int]:
        """Messages dropped by all sockets, by reason."""
        return dict(sum((link.dropped() for link in self._links.values()), Counter[str]()))

    def close(self) -> None:
        self._timer.cancel()
        for link in self._links.values():
            link.close()

    def _tell_alive(self) -> None:
        away = False
        for link in self._links.values():
            if link.requester.connected:
                link.requester.send(self._alive)
            else:
                away = True
        self._timer = self._loop.call_later(_ALIVE_RETRY_S if away else _ALIVE_EVERY_S, self._tell_alive)
