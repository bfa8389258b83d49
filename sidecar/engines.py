"""One engine watched: started or adopted, asked how it is, called, restarted when it died."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from backends.interface import (
    EngineBackend,
    Health,
    Installable,
    InstallFailed,
    InstallRefused,
    InstallUncertain,
)
from wire.outcomes import RoostError

from .arena import Arena
from .effects import ReadInstalled, StartInstall, StartRemove
from .events import (
    AnyEvent,
    EngineDown,
    EngineRemarked,
    EngineUp,
    InstallBroke,
    InstallDone,
    InstalledRead,
    InstallRejected,
    InstallUnsure,
    RemoveDone,
    RemoveUnsure,
)

_log = logging.getLogger(__name__)

_HEALTH_EVERY_S = 0.5
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
# an engine that was up for this long before it died is restarted at once again
_STEADY_S = 60.0


class EngineKeeper:
    """Keeps one engine alive, and turns the machine's effects into calls and their ends into events.

    ``emit`` gets every event on the loop's thread. EngineDown is emitted before any call of the dead engine ends, and
    EngineUp of its next life after all of them have.
    """

    def __init__(
        self, backend: EngineBackend, arena: Arena, emit: Callable[[AnyEvent], None], *, timeout_s: float
    ) -> None:
        self._backend = backend
        self._name = backend.settings.name
        self._arena = arena
        self._emit = emit
        self._timeout_s = timeout_s
        self._look = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled; the engine goes on then."""
        pause_s = _FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                detail = await self._live()
                _log.warning("engine %s is down: %s", self._name, detail)
                self._emit(EngineDown(engine=self._name, health=Health.DEAD, detail=detail, at=time.time()))
                await self._end_calls()
                pause_s = _FIRST_PAUSE_S if loop.time() - began > _STEADY_S else pause_s
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                self._emit(EngineDown(engine=self._name, health=Health.STARTING, detail=detail, at=time.time()))
        finally:
            await self._end_calls()
            await self._backend.detach()

    def look_now(self) -> None:
        """Somebody had trouble with the engine: ask it at once."""
        self._look.set()

    def perform(self, call: StartInstall | StartRemove | ReadInstalled) -> None:
        """Make the call; its end is emitted, however it ends."""
        task = asyncio.get_running_loop().create_task(self._perform(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _live(self) -> str:
        """One life of the engine, from its start to its death; why it died."""
        backend = self._backend
        try:
            await backend.start()
            while (health := await backend.health()) is Health.STARTING:
                await self._pause()
            if health is Health.READY:
                await self._announce()
            remark = ""
            while health is Health.READY:
                await self._pause()
                health = await backend.health()
                if health is Health.READY and backend.detail != remark:
                    remark = backend.detail
                    self._emit(EngineRemarked(engine=self._name, detail=remark))
        except RoostError as error:
            return error.message
        except Exception as error:
            # a fault of one driver must not take the node's other engines along
            _log.exception("engine %s", self._name)
            return f"{type(error).__name__}: {error}"
        return backend.detail or f"it says that it is {health}"

    async def _announce(self) -> None:
        limits = await self._backend.limits()
        names = await self._backend.installed()
        host, port = self._backend.address()
        _log.info("engine %s is ready at %s:%d with %d adapters", self._name, host, port, len(names))
        self._emit(
            EngineUp(
                engine=self._name,
                limits=limits,
                installed=names,
                host=host,
                port=port,
                token=self._backend.token(),
                pid=self._backend.pid or 0,
                at=time.time(),
            )
        )

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_HEALTH_EVERY_S):
                await self._look.wait()
        except TimeoutError:
            return
        self._look.clear()

    async def _end_calls(self) -> None:
        """Cancel what is under way and wait until it has let go of the arena."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    async def _perform(self, call: StartInstall | StartRemove | ReadInstalled) -> None:
        if isinstance(call, StartInstall):
            ended = await self._install(call)
        elif isinstance(call, StartRemove):
            ended = await self._remove(call)
        else:
            ended = await self._read(call)
        self._emit(ended)

    async def _install(self, call: StartInstall) -> AnyEvent:
        installable = Installable(
            adapter=call.adapter,
            digest=call.digest,
            rank=call.rank,
            segment=self._arena.segment,
            offset=call.extent.offset,
            length=call.extent.length,
            generation=call.extent.generation,
            view=lambda: self._arena.read(call.extent),
        )
        engine, op = call.engine, call.op
        try:
            await self._backend.install(installable, self._timeout_s)
        except InstallRefused as error:
            return InstallRejected(engine=engine, op=op, message=error.message)
        except InstallFailed as error:
            return InstallBroke(engine=engine, op=op, message=error.message)
        except InstallUncertain as error:
            return InstallUnsure(engine=engine, op=op, message=error.message)
        except asyncio.CancelledError:
            return InstallUnsure(engine=engine, op=op, message="the engine died")
        except Exception as error:
            # not one of the three ends that a driver may give: what the engine has is as unknown as after silence
            _log.exception("install of %s on %s", call.adapter, engine)
            return InstallUnsure(engine=engine, op=op, message=str(error))
        return InstallDone(engine=engine, op=op)

    async def _remove(self, call: StartRemove) -> AnyEvent:
        try:
            removal = await self._backend.remove(call.adapter, self._timeout_s)
        except RoostError as error:
            return RemoveUnsure(engine=call.engine, op=call.op, message=error.message)
        except asyncio.CancelledError:
            return RemoveUnsure(engine=call.engine, op=call.op, message="the engine died")
        except Exception as error:
            _log.exception("removal of %s from %s", call.adapter, call.engine)
            return RemoveUnsure(engine=call.engine, op=call.op, message=str(error))
        return RemoveDone(engine=call.engine, op=call.op, removal=removal)

    async def _read(self, call: ReadInstalled) -> AnyEvent:
        try:
            names: frozenset[str] | None = await self._backend.installed()
        except (RoostError, asyncio.CancelledError):
            names = None
        except Exception:
            _log.exception("reading what %s has", call.engine)
            names = None
        return InstalledRead(engine=call.engine, op=call.op, names=names)
