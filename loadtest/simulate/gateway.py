"""A gateway's process: its node table, fleet, leases, placement and data plane, without listening sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from gateway.auth import Authenticator
from gateway.bounds import GenerationBounds
from gateway.catalog_source import CatalogSource
from gateway.dataplane import ROUTES, DataPlane, Timeouts
from gateway.fleet import Fleet
from gateway.http import Exchange, Pair, UpstreamPool
from gateway.http.reader import Message
from gateway.leases import LeaseDesk
from gateway.metrics import Metrics
from gateway.nodes import NodeTable
from gateway.placement import Placer
from gateway.settings import NodeAddress

from .backend import EngineProcess
from .network import Network
from .sockets import sockets
from .upstream import ModelUpstream

_LAST_WORDS_S = 0.1

MakePlacer = Callable[[NodeTable], Placer]


class Answer:
    """What a client saw so far. ``status`` 0: nothing, or the connection broke. Times are the loop's."""

    def __init__(self, on_token: Callable[[], None] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_token = on_token
        self.status = 0
        self.retry_after_s = 0.0
        self.revision = ""
        self.node = ""
        self.text = ""
        self.first_token = math.nan
        self.whole = False
        self.broken = False
        self.writing_paused = False
        self._head = b""
        self._body = bytearray()
        self._chunked = False

    # as the gateway's transport and connection

    def write(self, data: bytes) -> None:
        if self.broken:
            return
        if not self._head:
            self._head, _, data = data.partition(b"\r\n\r\n")
            self._read_head()
        if not data or (self._chunked and data == b"0\r\n\r\n"):
            return
        self._body += data
        if self.status == 200 and (not self._chunked or b"data: {" in data):
            if math.isnan(self.first_token):
                self.first_token = self._loop.time()
            if self._on_token is not None:
                self._on_token()

    def answer_over(self, *, keep_alive: bool) -> None:
        if self.broken:
            return
        self.whole = True
        if self.status == 200:
            self.text = _said(bytes(self._body))

    def answer_broken(self, *, flush: bool) -> None:
        self.broken = True
        self.status = 0

    def keeps_alive(self, message: Message) -> bool:
        return True

    def _read_head(self) -> None:
        line, *fields = self._head.split(b"\r\n")
        self.status = int(line.split(b" ", 2)[1])
        for field in fields:
            name, _, value = field.partition(b": ")
            if name == b"retry-after":
                self.retry_after_s = float(value)
            elif name == b"x-roost-revision":
                self.revision = value.decode()
            elif name == b"x-roost-node":
                self.node = value.decode()
            elif name == b"transfer-encoding":
                self._chunked = True


class GatewayProcess:
    """One life of a gateway at a time; ``crash`` ends it with everything that it had under way."""

    def __init__(
        self,
        name: str,
        network: Network,
        addresses: Sequence[NodeAddress],
        catalog: Any,
        engines: dict[tuple[str, int], tuple[str, EngineProcess]],
        *,
        make_placer: MakePlacer = Placer,
        acquire_timeout_s: float = 120.0,
    ) -> None:
        self.name = name
        self._network = network
        self._addresses = tuple(addresses)
        self._catalog = catalog
        self._engines = engines
        self._make_placer = make_placer
        self._acquire_timeout_s = acquire_timeout_s
        self._loop = asyncio.get_running_loop()
        self._lives = 0
        self._requests: dict[asyncio.Task[None], Answer] = {}
        self.up = False

    def start(self) -> None:
        self._lives += 1
        instance = f"{self.name}-{self._lives}"
        self.nodes = NodeTable((address.name for address in self._addresses), clock=self._loop.time)
        self._fleet = Fleet(
            self._addresses, self.nodes, gateway=self.name, instance=instance, curve=None,
            sockets=sockets(self._network, self.name),
        )  # fmt: skip
        self.leases = LeaseDesk(self._fleet.requesters, gateway=self.name, instance=instance)
        self._fleet.tell_holding(self.leases.holding)
        self._upstream = ModelUpstream(self._network, self.name, self._engines)
        self.metrics = Metrics(tuple(ROUTES.values()))
        self._data = DataPlane(
            catalog=cast(CatalogSource, self._catalog),
            authenticator=Authenticator(anonymous=True),
            placer=self._make_placer(self.nodes),
            leases=self.leases,
            upstream=cast(UpstreamPool, self._upstream),
            metrics=self.metrics,
            access_log=None,
            timeouts=Timeouts(600.0, self._acquire_timeout_s),
            bounds=GenerationBounds(128, 1 << 18, 20),
        )
        self.up = True

    def update(self, addresses: Sequence[NodeAddress]) -> None:
        """Have exactly these nodes, now and after a restart."""
        self._addresses = tuple(addresses)
        if self.up:
            self._fleet.update(addresses)

    def crash(self) -> None:
        """The process is killed: no word to anybody."""
        self.up = False
        self._fleet.close()
        for request, answer in list(self._requests.items()):
            answer.answer_broken(flush=False)
            request.cancel()
        self._upstream.close()
        # what the cancelled requests give back first goes nowhere
        self._loop.call_later(_LAST_WORDS_S, self.leases.close)

    async def ask(self, headers: list[Pair], body: bytes, on_token: Callable[[], None] | None = None) -> Answer:
        """One request, until its answer is over. Cancelled, the client went away. A gateway that is down answers 0."""
        answer = Answer(on_token)
        if not self.up:
            return answer
        message = Message(b"POST", b"/v1/completions", headers, old=False, keep_alive=True)
        message.pieces.append(body)
        exchange = Exchange(message, answer, cast(asyncio.Transport, answer), self._loop, "client")
        request = self._loop.create_task(self._data.handle(exchange))
        self._requests[request] = answer
        request.add_done_callback(self._requests.pop)
        try:
            await asyncio.wait([request])
        except asyncio.CancelledError:
            exchange.client_gone()
            request.cancel()
            raise
        if not answer.whole:
            answer.status = 0
        return answer


def _said(body: bytes) -> str:
    """The text of an answer, which names all contents that its slot had; the last event's where it is a stream."""
    event = body.rpartition(b"data: {")[2]
    document = b"{" + event.partition(b"\n")[0] if event != body else body
    choices = msgspec.json.decode(document)["choices"]
    return str(choices[0]["text"])
