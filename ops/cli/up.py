"""``roost up`` and ``roost down``: the mesh of this host."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.live import Live

from backends.interface import Health
from backends.process import stop_recorded
from wire.hosts import is_loopback
from wire.outcomes import DeadlinePassed, InvalidRequest

from ..config import EngineConfig, RoostConfig, load, with_engines
from ..engine_log import engine_cause
from ..layout import Layout
from ..supervise.child import StartFailed, last_line
from ..supervise.run import ENGINE_GRACE_S, end_leftovers, save_config, stop_mesh, supervise
from ..supervise.state import EngineState, MeshState, Phase, SupervisorLock, read_state
from .config import ConfigFile
from .doctor import PORT_ADVICE, port_trouble
from .kept import kept_engines, tell_kept
from .output import OUT, tell, tell_json
from .render import mesh_view
from .session import AsJson, StateDir, default_file, session

POLL_S = 0.2


class Backend(enum.StrEnum):
    """Engines that can be started."""

    VLLM = "vllm"
    SGLANG = "sglang"


def register(app: typer.Typer) -> None:
    app.command("up")(up)
    app.command("down")(down)


def up(
    context: typer.Context,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    base: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="Start an engine for this base; repeat for more.")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="What --base's engines are.")] = Backend.VLLM,
    train: Annotated[
        str, typer.Option(metavar="NAME", help="Train policies over this --base too: start a trainer of it.")
    ] = "",
    slots: Annotated[int, typer.Option(min=1, help="Adapter slots of each engine of --base.")] = 8,
    max_rank: Annotated[int, typer.Option(min=1, help="Largest rank of --base's engines.")] = 16,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float32, ...")] = "auto",
    max_model_len: Annotated[int, typer.Option(min=0, help="Longest context, in tokens.  [default: the model's]")] = 0,
    engines: Annotated[int, typer.Option(min=1, help="Engines for each --base.")] = 1,
    host: Annotated[str | None, typer.Option(help="Address to serve at.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to serve at.  [default: 8080]")] = None,
    allow_anonymous: Annotated[bool, typer.Option(help="Let requests without a key in (loopback only).")] = False,
    keep_engines: Annotated[
        bool, typer.Option(help="Leave engines running at the end: the next `up` adopts them.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background, once everything is ready.")
    ] = False,
) -> None:
    """Start the mesh: registrar, sidecar, engines and gateway; restart what dies; until Ctrl-C or `roost down`."""
    shape = EngineConfig(
        base="", backend=backend.value, slots=slots, max_rank=max_rank, dtype=dtype, max_model_len=max_model_len,
        count=engines,
    )  # fmt: skip
    wanted = [_engine(text, shape) for text in base or ()]
    overrides = {
        **trained(train, wanted),
        "state_dir": state_dir or session(context).state_dir or None,
        "gateway.host": host,
        "gateway.port": port,
        "gateway.anonymous": True if allow_anonymous else None,
    }
    settled = with_engines(load(config or default_file(), os.environ, overrides), wanted)
    layout = _free_layout(settled)
    if detach:
        _detached(settled, layout)
    else:
        _foreground(settled, layout, keep_engines=keep_engines)


def down(
    context: typer.Context,
    state_dir: StateDir = None,
    keep_engines: Annotated[bool, typer.Option(help="Leave engines running: the next `up` adopts them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop everything in order: gateway, sidecar, registrar, engines. Also what a killed supervisor left."""
    layout = session(context).layout(state_dir)
    ended = stop_mesh(layout, keep_engines=keep_engines) if layout.run.is_dir() else []
    if as_json:
        tell_json({"ended": ended, "kept": kept_engines(layout)})
    else:
        tell(f"Stopped: {', '.join(ended)}." if ended else f"No mesh runs from {layout.root}.")
        tell_kept(layout)


def _free_layout(config: RoostConfig) -> Layout:
    """The state folder, where nothing runs any more. Raises RoostError where a mesh does, or the port is taken."""
    layout = Layout.of(config.state_dir)
    layout.make()
    SupervisorLock(layout.lock_file).release()
    end_leftovers(layout)
    trouble = port_trouble(config.gateway)
    if trouble:
        address = f"{config.gateway.host}:{config.gateway.port}"
        raise InvalidRequest(f"gateway.port: {address}: {trouble}; {PORT_ADVICE}", field="gateway.port")
    return layout


def _engine(text: str, shape: EngineConfig) -> EngineConfig:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise InvalidRequest(f"--base {text!r}: expected NAME=PATH, as in --base smol=./models/smol", field="base")
    if not Path(path).expanduser().is_dir():
        raise InvalidRequest(f"--base {name}: there is no folder {path}", field="base")
    return msgspec.structs.replace(shape, base=name, model_path=path)


def trained(name: str, engines: list[EngineConfig]) -> dict[str, object]:
    """What --train sets: a trainer of the base that one of ``engines`` serves, of no rank that it could not serve."""
    if not name:
        return {}
    served = next((engine for engine in engines if engine.base == name), None)
    if served is None:
        raise InvalidRequest(f"--train {name}: no --base is called so", field="train")
    trainer = {"model_path": served.model_path, "max_rank": served.max_rank}
    return {"training.base": name} | {f"training.trainer.{field}": value for field, value in trainer.items()}


def _foreground(config: RoostConfig, layout: Layout, *, keep_engines: bool) -> None:
    """Run the supervisor here, with a live picture of what it does; at its end the engines are stopped too."""
    stopped: list[str] = []
    with Live(console=OUT, refresh_per_second=4, transient=True) as live:
        view = _Picture(lambda state, note: live.update(mesh_view(state, note)), config, layout)
        try:
            supervise(config, layout, note=view.note, on_state=view.show)
        finally:
            if view.processes and not keep_engines:
                live.update("Stopping the engines")
                stopped = stop_recorded(layout.run, grace_s=ENGINE_GRACE_S)
    tell(f"Stopped: {', '.join([*reversed(view.processes), *(f'engine {name}' for name in stopped)])}.")
    tell_kept(layout)


def _detached(config: RoostConfig, layout: Layout) -> None:
    """Start a keeper that outlives this command, and wait until all of the mesh is ready."""
    save_config(config, layout)
    layout.state_file.unlink(missing_ok=True)
    log = layout.log_file("supervisor")
    with log.open("ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "ops.supervise.keeper", str(layout.root)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + max([30.0, *(engine.start_timeout_s for engine in config.node.engines)])
    with Live(console=OUT, refresh_per_second=4, transient=True) as live:
        view = _Picture(lambda state, note: live.update(mesh_view(state, note)), config, layout)
        while not view.complete:
            if keeper.poll() is not None:
                stop_mesh(layout)
                raise StartFailed(_why(layout) or f"the supervisor ended: {last_line(log)} (see {log})")
            if time.monotonic() > deadline:
                raise DeadlinePassed("the engines are not ready yet: see `roost status` and `roost logs`")
            state = read_state(layout.state_file)
            if state is not None:
                view.show(state)
                _check_engines(state, layout)
            time.sleep(POLL_S)
    tell("Stop it with `roost down`.")


def _check_engines(state: MeshState, layout: Layout) -> None:
    """An engine that dies before it was ever ready would die again: stop, and raise StartFailed with its reason."""
    dead = next((engine for engine in state.engines if engine.health == Health.DEAD), None)
    if dead is None:
        return
    stop_mesh(layout)
    raise StartFailed(f"engine {dead.name} does not start: {dead_because(dead, layout)}")


class _Picture:
    """Follows the states of a starting mesh; says once, for good, when all of it is ready."""

    def __init__(self, draw: Callable[[MeshState, str], None], config: RoostConfig, layout: Layout) -> None:
        self._draw = draw
        self._config = config
        self._layout = layout
        self._note = ""
        self._last: MeshState | None = None
        self._told_dead: set[str] = set()
        self.complete = False

    @property
    def processes(self) -> list[str]:
        """What was started, in order."""
        return [process.name for process in self._last.processes] if self._last is not None else []

    def note(self, text: str) -> None:
        if text and text != self._note and not OUT.is_terminal:
            tell(text)
        self._note = text
        if self._last is not None:
            self._draw(self._last, text)

    def show(self, state: MeshState) -> None:
        self._last = state
        expected = sum(engine.count for engine in self._config.node.engines)
        ready = state.phase is Phase.READY and state.engines_ready and len(state.engines) == expected
        if state.phase is Phase.READY:
            self.note("" if ready else "engines are starting; `roost logs` shows what they do")
        self._draw(state, self._note)
        self._tell_dead(state)
        if ready and not self.complete:
            self.complete = True
            welcome(state, self._config, self._layout)

    def _tell_dead(self, state: MeshState) -> None:
        """Say once, for good, why an engine does not run; it is started again and again meanwhile."""
        for engine in state.engines:
            if engine.health == Health.READY:
                self._told_dead.discard(engine.name)
            elif engine.health == Health.DEAD and engine.name not in self._told_dead:
                self._told_dead.add(engine.name)
                tell((f"Engine {engine.name} does not run", "bold red"), f": {dead_because(engine, self._layout)}")


def dead_because(engine: EngineState, layout: Layout) -> str:
    """Why, in a line: the first cause that its log tells, else what the sidecar saw of it."""
    log = layout.log_file(f"engine-{engine.name}")
    cause = engine_cause(log) or engine.detail.partition("\n")[0]
    return f"{cause} (see {log})" if log.exists() else cause


def welcome(state: MeshState, config: RoostConfig, layout: Layout) -> None:
    """What a person needs to know once it is up."""
    tell(("Roost is up ", "bold green"), (f"{state.url}/v1", "bold"))
    if not config.node.engines:
        tell("No engine runs: start one with `roost up --base NAME=PATH`, or name it in roost.toml.")
    if config.gateway.anonymous:
        tell("Requests without a key are let in, from this machine only.")
    elif layout.admin_key.exists():
        tell(f"The admin key is in {layout.admin_key}; the commands here use it. For other clients:")
        tell(f"  export OPENAI_BASE_URL={state.url}/v1 OPENAI_API_KEY=$(cat {layout.admin_key})")
    if not is_loopback(config.gateway.host):
        tell("It can be reached from other machines, without TLS of its own: put a proxy with TLS in front.")


def _why(layout: Layout) -> str:
    state = read_state(layout.state_file)
    return state.detail if state is not None else ""
