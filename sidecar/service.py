"""The sidecar's edge: sockets, clocks, threads and engines around the machine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from backends.interface import EngineBackend
from catalog.artifacts import open_store
from wire.node import (
    Acquire,
    AnswerOfNode,
    AskOfNode,
    AskState,
    Cordon,
    FleetKeys,
    GatewayAlive,
    Holding,
    Release,
    ReportOfNode,
)
from wire.outcomes import RoostError
from wire.peers import Peer
from wire.sockets import ZEROMQ, FeedPublisher, Reply, Responder, Sockets

from .arena import Arena, SegmentLost, segment_name
from .cordon import CordonFile, Mark
from .disk import DiskTier, open_tier
from .effects import Answer, AnyEffect, CancelFetch, CancelPull, ClearExtent, StartFetch, StartPull
from .engines import EngineKeeper
from .events import (
    AnyEvent,
    Asked,
    Cordoned,
    FetchCancelled,
    FetchDone,
    FetchFailed,
    FetchOverdue,
    GatewayHeard,
    GatewayHolds,
    Released,
    Tick,
)
from .fetch import Fetcher
from .giving import Giver
from .machine import Machine
from .offers import OfferFeed
from .peers import Peers, PeerSource
from .policies import make_policy
from .pulls import Pulls
from .reporter import Reporter
from .settings import SidecarSettings
from .transitions import log_effect, log_event

_log = logging.getLogger(__name__)

_TICK_S = 0.05
_STATS_EVERY_S = 60.0
# a refusal must reach the asker before it stops waiting
_ANSWER_MARGIN_S = 0.05


class Storage(NamedTuple):
    """The node's arena, what brings artifacts into it, and the copies on disk that it may look for them in."""

    arena: Arena
    fetcher: Fetcher
    disk: DiskTier | None = None


def open_storage(settings: SidecarSettings) -> Storage:
    """Raises StorageFull where the host has no room for the arena."""
    arena = Arena(segment_name(settings.node, settings.run_dir), settings.arena_bytes)
    store = open_store(Path(settings.store_dir), settings.store)
    disk = None
    if settings.store.remote and settings.disk_dir and settings.disk_bytes:
        policy = make_policy(settings.cache_policy, settings.disk_bytes)
        disk = open_tier(Path(settings.disk_dir), settings.disk_bytes, arena, policy)
    fetcher = Fetcher(
        store,
        arena,
        workers=settings.loads_in_flight + 1,
        timeout_s=settings.load_timeout_s,
        nearer=[disk] if disk else [],
    )
    return Storage(arena, fetcher, disk)


class Sidecar:
    """One node's sidecar on the running loop. ``backends`` are the drivers of ``settings.engines``, by name.

    Raises InvalidRequest where it can't serve at its endpoints (another sidecar does), StorageFull without an arena.
    ``sockets``, ``storage`` and ``mark`` (that of a cordoned node) are others where the world around it is simulated.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        backends: Mapping[str, EngineBackend],
        *,
        sockets: Sockets = ZEROMQ,
        storage: Callable[[SidecarSettings], Storage] = open_storage,
        mark: Mark | None = None,
    ) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.machine = Machine(settings)
        self._mark = mark or CordonFile(settings.run_dir, settings.node)
        if self._mark.is_set():
            self.machine.handle(Cordoned(on=True), self._loop.time())
        self._replies: dict[int, Reply[AnswerOfNode]] = {}
        self._asks = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._closed = False
        self._broken: asyncio.Future[None] = self._loop.create_future()
        # binding comes first: it fails where another sidecar of this node runs, whose arena must not be unlinked
        self._responder: Responder[AskOfNode, AnswerOfNode] = sockets.responder(
            settings.endpoint, AskOfNode, AnswerOfNode, self._on_ask, curve=settings.curve
        )
        self._feed: FeedPublisher[ReportOfNode] = sockets.publisher(
            settings.feed_endpoint, ReportOfNode, epoch=time.time_ns(), curve=settings.curve
        )
        self._giver: Giver | None = None
        if settings.bytes_endpoint and settings.peer_transfers:
            self._giver = Giver(settings, self.machine.state, self._apply, sockets=sockets)
            self.machine.state.bytes_endpoint = self._giver.endpoint
        self.arena, self._fetcher, disk = storage(settings)
        if self._giver is not None:
            self._giver.open(self.arena, disk)
        self._peers = Peers(settings, self._apply, self._may_follow, sockets=sockets)
        self._keepers = {
            name: EngineKeeper(backend, self.arena, self._apply, timeout_s=settings.load_timeout_s)
            for name, backend in backends.items()
        }
        self._reporter = Reporter(self.machine.state, self._feed, full_every_s=settings.full_state_every_s)
        self._offers = self._follow_offers(sockets, disk) if settings.registrar_feed else None
        self._pulls = Pulls(settings, self.arena, self._apply, sockets=sockets)
        self._tick = self._loop.call_later(_TICK_S, self._on_tick)
        self._stats = self._loop.call_later(_STATS_EVERY_S, self._on_stats)

    def _follow_offers(self, sockets: Sockets, disk: DiskTier | None) -> OfferFeed:
        return OfferFeed(
            self._settings.registrar_feed,
            self._apply,
            self.machine.known.holds,
            disk.drop if disk else _nothing,
            curve=self._settings.curve,
            sockets=sockets,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then detach: engines go on. Raises what broke the machine, if anything did."""
        for keeper in self._keepers.values():
            self._spawn(keeper.run())
        _log.info("sidecar of node %s serves at %s", self._settings.node, self._responder.endpoint)
        stopped = self._loop.create_task(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopped, self._broken]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
        finally:
            stopped.cancel()
            await self._close()

    async def _close(self) -> None:
        self._closed = True
        self._tick.cancel()
        self._stats.cancel()
        self._responder.close()
        if self._offers is not None:
            self._offers.close()
        await self._pulls.close()
        if self._giver is not None:
            await self._giver.close()
        self._peers.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._reporter.close()
        self._feed.close()
        self._fetcher.close()
        self.arena.close()

    # events in

    def _on_ask(self, ask: AskOfNode, reply: Reply[AnswerOfNode]) -> None:
        if isinstance(ask, Acquire):
            if reply.wanted:
                number = next(self._asks)
                self._replies[number] = reply
                self._apply(Asked(ask=number, request=ask, deadline=reply.deadline - _ANSWER_MARGIN_S))
        elif isinstance(ask, Release):
            self._apply(Released(gateway=ask.gateway, instance=ask.instance, leases=ask.leases))
            if ask.failed_engine in self._keepers:
                self._keepers[ask.failed_engine].look_now()
        elif isinstance(ask, GatewayAlive):
            self._apply(GatewayHeard(gateway=ask.gateway, instance=ask.instance))
        elif isinstance(ask, AskState):
            reply(self._reporter.report())
        elif isinstance(ask, FleetKeys):
            if self._giver is not None:
                self._giver.allow(ask)
        elif isinstance(ask, Holding):
            self._apply(GatewayHolds(holding=ask))
        elif isinstance(ask, Cordon):
            self._cordon(ask, reply)

    def _cordon(self, ask: Cordon, reply: Reply[AnswerOfNode]) -> None:
        try:
            self._mark.set(on=ask.on)
        except OSError as error:
            # what the operator wants holds all the same, but not for the next life
            _log.error("that node %s is cordoned (or is not) can't be kept: %s", self._settings.node, error)
        _log.info("node %s is %s service", self._settings.node, "out of" if ask.on else "in")
        self._apply(Cordoned(on=ask.on))
        reply(self._reporter.report())

    def _on_tick(self) -> None:
        self._tick = self._loop.call_later(_TICK_S, self._on_tick)
        self._check_arena()
        self._apply(Tick())
        for line in self.machine.auditor.untold():
            _log.error("the books are wrong: %s", line)

    def _check_arena(self) -> None:
        """Without its segment a sidecar can install nothing: it ends, and its next life makes another one."""
        if self._broken.done():
            return
        try:
            self.arena.check()
        except SegmentLost as error:
            self._broken.set_exception(error)

    def _on_stats(self) -> None:
        self._stats = self._loop.call_later(_STATS_EVERY_S, self._on_stats)
        counts = sorted(self.machine.state.counts.items())
        _log.info("since the start: %s", " ".join(f"{name}={count}" for name, count in counts))

    def _apply(self, event: AnyEvent) -> None:
        if self._closed or self._broken.done():
            return
        log_event(event)
        try:
            effects = self.machine.handle(event, self._loop.time())
        except Exception as error:
            # a half-applied event leaves books that can't be trusted; a fresh start adopts the engines as they are
            self._broken.set_exception(error)
            raise
        for effect in effects:
            self._perform(effect)
        self._reporter.notice()
        if self._giver is not None:
            self._giver.notice()

    # effects out

    def _perform(self, effect: AnyEffect) -> None:
        log_effect(effect)
        if isinstance(effect, Answer):
            self._replies.pop(effect.ask)(effect.answer)
        elif isinstance(effect, StartFetch):
            self._start_fetch(effect)
        elif isinstance(effect, CancelFetch):
            self._fetches[effect.generation].cancel()
        elif isinstance(effect, StartPull):
            self._pulls.start(effect)
        elif isinstance(effect, CancelPull):
            self._pulls.cancel(effect)
        elif isinstance(effect, ClearExtent):
            self.arena.clear(effect.extent)
        else:
            self._keepers[effect.engine].perform(effect)

    def _start_fetch(self, effect: StartFetch) -> None:
        task = self._spawn(self._fetch(effect))
        self._fetches[effect.extent.generation] = task
        task.add_done_callback(lambda task: self._on_fetch_ended(task, effect))

    def _on_fetch_ended(self, task: asyncio.Task[None], effect: StartFetch) -> None:
        del self._fetches[effect.extent.generation]
        if task.cancelled():
            # also where it was cancelled before it had begun
            self._apply(FetchCancelled(digest=effect.digest, generation=effect.extent.generation))

    async def _fetch(self, effect: StartFetch) -> None:
        digest, generation = effect.digest, effect.extent.generation

        def overdue(message: str) -> None:
            self._apply(FetchOverdue(digest=digest, generation=generation, message=message))

        try:
            source = await self._fetcher.fetch(digest, effect.extent, overdue, self._peers.sources(effect))
        except RoostError as error:
            failed = FetchFailed(digest=digest, generation=generation, outcome=error.outcome, message=error.message)
            self._apply(failed)
        else:
            name = source.name if source else "store"
            peer = source.node if isinstance(source, PeerSource) else ""
            self._apply(FetchDone(digest=digest, generation=generation, source=name, peer=peer))

    def _may_follow(self, peer: Peer) -> bool:
        """Whether a node is asked that another one names."""
        known = self._giver is not None and self._giver.knows(peer)
        return known and self.machine.state.neighbours.may_ask(peer.node, self._loop.time())

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None and not self._broken.done():
                self._broken.set_exception(error)


def _nothing(digest: str) -> None:
    """There are no copies on disk."""
