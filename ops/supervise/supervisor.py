"""Starts the processes one after the other, keeps them up, and stops them in the opposite order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from wire.outcomes import RoostError

from .child import Child, ChildSpec
from .state import EngineState, Identity, MeshState, Phase

_log = logging.getLogger(__name__)

ENGINE_POLL_S = 1.0
KEEPER_POLL_S = 1.0


class Supervisor:
    """Runs what ``steps`` yields, in that order: a step may do work between two processes.

    ``keeper`` restarts this process when it is killed; where that was killed, ``new_keeper`` starts another.
    ``publish`` gets every new state; where it raises OSError (a full disk, say) the mesh goes on, and the state is told
    again within seconds. ``engines`` asks the node for its engines, and raises RoostError when it can't.
    """

    def __init__(
        self,
        steps: Callable[[], AsyncIterator[ChildSpec]],
        *,
        url: str,
        identity: Identity,
        publish: Callable[[MeshState], None],
        engines: Callable[[], Awaitable[tuple[EngineState, ...]]],
        keeper: Identity | None = None,
        new_keeper: Callable[[], Identity | None] = lambda: None,
    ) -> None:
        self.state = MeshState(Phase.STARTING, identity, url, keeper=keeper)
        self._steps = steps
        self._publish = publish
        self._ask_engines = engines
        self._new_keeper = new_keeper
        self._children: list[Child] = []
        self._untold = False

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set. Raises the RoostError that kept the mesh from starting, with everything stopped."""
        keepers: list[asyncio.Task[None]] = []
        try:
            starting = asyncio.create_task(self._start(keepers))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                self._change(phase=Phase.READY)
                keepers.append(asyncio.create_task(self._watch_engines()))
                if self.state.keeper is not None:
                    keepers.append(asyncio.create_task(self._watch_keeper()))
                await _first_failure(stopping, keepers)
            else:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
        except RoostError as error:
            self._change(phase=Phase.FAILED, detail=error.message)
            raise
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._stop()

    async def _start(self, keepers: list[asyncio.Task[None]]) -> None:
        async for spec in self._steps():
            child = Child(spec, on_change=self._change)
            self._children.append(child)
            await child.start()
            keepers.append(asyncio.create_task(child.keep(), name=spec.name))

    async def _stop(self) -> None:
        failed = self.state.phase is Phase.FAILED
        if not failed:
            self._change(phase=Phase.STOPPING)
        for child in reversed(self._children):
            await child.stop()
        if not failed:
            self._change(phase=Phase.STOPPED)

    async def _watch_engines(self) -> None:
        while True:
            with contextlib.suppress(RoostError):
                engines = await self._ask_engines()
                if engines != self.state.engines:
                    self._change(engines=engines)
            if self._untold:
                self._change()
            await asyncio.sleep(ENGINE_POLL_S)

    async def _watch_keeper(self) -> None:
        while True:
            if self.state.keeper is None or not self.state.keeper.alive:
                try:
                    self._change(keeper=self._new_keeper())
                except OSError as error:
                    _log.warning("the keeper was killed, and another can't be started: %s", error)
                else:
                    _log.warning("the keeper was killed: started another")
            await asyncio.sleep(KEEPER_POLL_S)

    def _change(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(
            self.state, processes=tuple(child.state for child in self._children), **changes
        )
        try:
            self._publish(self.state)
        except OSError as error:
            if not self._untold:
                _log.warning("the state of the mesh can't be told: %s", error)
            self._untold = True
        else:
            self._untold = False


async def _first_failure(stopping: asyncio.Task[object], keepers: list[asyncio.Task[None]]) -> None:
    """Until told to stop; a keeper that ends has failed, and its error is ours."""
    await asyncio.wait({stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
    for keeper in keepers:
        if keeper.done():
            keeper.result()
