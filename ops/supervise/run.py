"""One supervisor's life, in the foreground or detached, and how to end what it left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import msgspec

from backends.process import stop_recorded
from sidecar.arena import unlink_left
from wire.outcomes import InvalidRequest

from ..config import RoostConfig
from ..layout import Layout, write_private
from .keeper import start_keeper
from .logs import keep_bounded
from .mesh import Mesh
from .state import Identity, MeshState, Phase, SupervisorLock, end, read_state, write_state
from .supervisor import Supervisor

SUPERVISOR_GRACE_S = 30.0
CHILD_GRACE_S = 5.0
ENGINE_GRACE_S = 15.0


def save_config(config: RoostConfig, layout: Layout) -> None:
    """For a supervisor in another process, and for whoever asks what is in force."""
    write_private(layout.config_file, msgspec.json.encode(config))


def saved_config(layout: Layout) -> RoostConfig | None:
    """The configuration of the last ``up`` on this state folder, if any."""
    try:
        return msgspec.json.decode(layout.config_file.read_bytes(), type=RoostConfig)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def supervise(
    config: RoostConfig,
    layout: Layout,
    *,
    keeper: Identity | None = None,
    note: Callable[[str], None] = lambda _: None,
    on_state: Callable[[MeshState], None] = lambda _: None,
) -> None:
    """Run the mesh until SIGTERM or SIGINT; engines go on. Raises the RoostError that kept it from starting.

    Only one supervisor runs on a state folder; what a killed one left is ended first.
    """
    lock = SupervisorLock(layout.lock_file)
    try:
        end_leftovers(layout)
        save_config(config, layout)
        asyncio.run(_run(config, layout, keeper, note, on_state))
    finally:
        lock.release()


def end_leftovers(layout: Layout) -> None:
    """End the processes, engines aside, that a supervisor which is gone had started."""
    state = read_state(layout.state_file)
    for process in reversed(state.processes if state is not None else ()):
        end(process.identity, grace_s=CHILD_GRACE_S)


def stop_mesh(layout: Layout, *, keep_engines: bool = False) -> list[str]:
    """End the keeper, the supervisor and its processes, then the engines; free the arena that a killed sidecar left.

    Returns what was ended, in order.

    Works from what is recorded in the state folder, so also where the supervisor was killed.
    """
    state = read_state(layout.state_file)
    ended: list[str] = []
    if state is not None:
        # the keeper passes the signal on and waits: ended first, it can't start the supervisor anew
        kept = end(state.keeper, grace_s=SUPERVISOR_GRACE_S)
        if end(state.supervisor, grace_s=SUPERVISOR_GRACE_S) or kept:
            ended.append("supervisor")
        ended += [
            process.name
            for process in reversed(state.processes)
            if end(process.identity, grace_s=CHILD_GRACE_S) or (ended and process.phase is not Phase.STOPPED)
        ]
        write_state(layout.state_file, msgspec.structs.replace(state, phase=Phase.STOPPED, engines=()))
    config = saved_config(layout)
    if config is not None:
        unlink_left(config.node.name, str(layout.run))
    if not keep_engines:
        ended += [f"engine {name}" for name in stop_recorded(layout.run, grace_s=ENGINE_GRACE_S)]
    return ended


async def _run(
    config: RoostConfig,
    layout: Layout,
    keeper: Identity | None,
    note: Callable[[str], None],
    on_state: Callable[[MeshState], None],
) -> None:
    identity = Identity.of(os.getpid())
    if identity is None:
        raise InvalidRequest("/proc is not mounted: the supervisor can't tell processes apart without it")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def publish(state: MeshState) -> None:
        on_state(state)
        write_state(layout.state_file, state)

    mesh = Mesh(config, layout, note)
    logs = asyncio.create_task(keep_bounded(layout.logs))
    try:
        await Supervisor(
            mesh.steps,
            url=mesh.url,
            identity=identity,
            publish=publish,
            engines=mesh.engines,
            keeper=keeper,
            new_keeper=lambda: start_keeper(layout.root),
        ).run(stop)
    finally:
        logs.cancel()
        mesh.close()
