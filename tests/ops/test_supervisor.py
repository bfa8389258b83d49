from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ops.config import RoostConfig
from ops.layout import Layout, write_private
from ops.supervise.__main__ import BROKE_LATER
from ops.supervise.backoff import Backoff
from ops.supervise.child import Child, ChildSpec, StartFailed
from ops.supervise.keeper import NEVER_READY, Adopted, Keeper
from ops.supervise.run import end_leftovers, save_config, stop_mesh
from ops.supervise.state import (
    EngineState,
    Identity,
    MeshState,
    Phase,
    ProcessState,
    SupervisorLock,
    end,
    read_state,
    write_state,
)
from ops.supervise.supervisor import Supervisor
from sidecar.arena import segment_name
from wire.outcomes import InvalidRequest, NoHealthyNode

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def fake_process_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def fake(folder: Path, name: str, *mode: str, start_timeout_s: float = 20.0, stop_grace_s: float = 5.0) -> ChildSpec:
    """A process that is ready once the pid in its ready file is that of a living process."""
    ready_file = folder / f"{name}.ready"

    async def ready() -> None:
        if not ready_file.exists() or Identity.of(int(ready_file.read_text())) is None:
            raise NoHealthyNode("not yet")

    return ChildSpec(
        name, "tests.ops.fake_process", (str(ready_file), *mode), folder / f"{name}.log", ready,
        start_timeout_s=start_timeout_s, stop_grace_s=stop_grace_s,
    )  # fmt: skip


class Run:
    """A supervisor in a task of its own, and every state that it published."""

    def __init__(self, *specs: ChildSpec, publish: Callable[[MeshState], None] = lambda _: None) -> None:
        self.states: list[MeshState] = []
        self._stop = asyncio.Event()
        identity = Identity.of(os.getpid())
        assert identity is not None

        async def steps() -> AsyncIterator[ChildSpec]:
            for spec in specs:
                yield spec

        async def engines() -> tuple[EngineState, ...]:
            return (EngineState("engine", "base", "ready"),)

        def note(state: MeshState) -> None:
            self.states.append(state)
            publish(state)

        supervisor = Supervisor(steps, url="http://127.0.0.1:1", identity=identity, publish=note, engines=engines)
        self.task = asyncio.create_task(supervisor.run(self._stop))

    async def until(self, condition: Callable[[MeshState], bool]) -> MeshState:
        async with asyncio.timeout(PATIENCE_S):
            while not self.states or not condition(self.states[-1]):
                assert not self.task.done(), "the supervisor ended"
                await asyncio.sleep(0.02)
        return self.states[-1]

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.wait_for(self.task, PATIENCE_S)


def process(state: MeshState, name: str) -> ProcessState:
    return next(one for one in state.processes if one.name == name)


def pid_of(state: MeshState, name: str) -> int:
    identity = process(state, name).identity
    assert identity is not None
    return identity.pid


async def test_starts_in_order_and_stops_in_the_opposite_one(tmp_path: Path) -> None:
    run = Run(fake(tmp_path, "first"), fake(tmp_path, "second"))
    state = await run.until(lambda state: state.phase is Phase.READY)
    pids = [pid_of(state, name) for name in ("first", "second")]
    await run.stop()
    assert [Identity.of(pid) for pid in pids] == [None, None]
    ready = [
        next(i for i, s in enumerate(run.states) if (name, Phase.READY) in phases(s)) for name in ("first", "second")
    ]
    begun = next(i for i, s in enumerate(run.states) if ("second", Phase.STARTING) in phases(s))
    assert ready[0] < begun < ready[1]
    gone = [next(i for i, s in enumerate(run.states) if (n, Phase.STOPPING) in phases(s)) for n in ("first", "second")]
    assert gone[1] < gone[0]
    assert run.states[-1].phase is Phase.STOPPED


def phases(state: MeshState) -> set[tuple[str, Phase]]:
    return {(one.name, one.phase) for one in state.processes}


async def test_what_is_killed_is_restarted(tmp_path: Path) -> None:
    run = Run(fake(tmp_path, "first"), fake(tmp_path, "second"))
    state = await run.until(lambda state: state.phase is Phase.READY)
    untouched = pid_of(state, "second")
    for number in (1, 2):
        os.kill(pid_of(run.states[-1], "first"), signal.SIGKILL)
        state = await run.until(
            lambda state, number=number: (
                process(state, "first").restarts == number  # type: ignore[misc]
                and process(state, "first").phase is Phase.READY
            )
        )
    assert "killed by SIGKILL" in process(state, "first").detail
    assert pid_of(state, "second") == untouched
    await run.stop()


async def test_a_process_that_ends_while_starting_is_told_with_its_last_words(tmp_path: Path) -> None:
    run = Run(fake(tmp_path, "first"), fake(tmp_path, "second", "fail"))
    with pytest.raises(StartFailed, match=r"second ended while starting \(exit 1\): the port is taken"):
        await asyncio.wait_for(run.task, PATIENCE_S)
    assert run.states[-1].phase is Phase.FAILED
    assert process(run.states[-1], "first").phase is Phase.STOPPED, "what had started is not left behind"


async def test_a_process_that_never_gets_ready_is_told(tmp_path: Path) -> None:
    child = Child(fake(tmp_path, "first", "deaf", start_timeout_s=1.0), on_change=lambda: None)
    with pytest.raises(StartFailed, match="first is not ready after 1 s"):
        await child.start()
    await child.stop()


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    child = Child(fake(tmp_path, "first", "stubborn", stop_grace_s=0.2), on_change=lambda: None)
    await child.start()
    identity = child.state.identity
    assert identity is not None
    await child.stop()
    assert not identity.alive


async def test_a_stop_while_starting_stops_what_has_started(tmp_path: Path) -> None:
    run = Run(fake(tmp_path, "first"), fake(tmp_path, "second", "deaf"))
    state = await run.until(lambda state: ("second", Phase.STARTING) in phases(state))
    await run.stop()
    assert Identity.of(pid_of(state, "first")) is None
    assert Identity.of(pid_of(state, "second")) is None


async def test_engines_are_told_as_the_node_reports_them(tmp_path: Path) -> None:
    run = Run(fake(tmp_path, "first"))
    state = await run.until(lambda state: bool(state.engines))
    assert state.engines_ready
    await run.stop()


def test_children_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    """The process that runs ``entry`` gets SIGTERM when its parent dies, even of SIGKILL."""
    ready = tmp_path / "ready"
    parent = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-P', '-m', 'ops.supervise.entry', str(os.getpid()),"
        f" 'tests.ops.fake_process', {str(ready)!r}])\n"
        "time.sleep(60)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_for(ready.exists)
    child = Identity.of(int(ready.read_text()))
    assert child is not None
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not child.alive)


def test_a_process_gets_all_open_files_that_it_may_have(tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))

    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "ops.supervise.entry", str(os.getpid()), "tests.ops.fake_process", str(ready)],
        preexec_fn=bound,
    )
    wait_for(ready.exists)
    assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (4096, 4096)
    child.kill()
    child.wait()


def test_only_one_supervisor_runs_on_a_state_folder(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    layout.make()
    lock = SupervisorLock(layout.lock_file)
    with pytest.raises(InvalidRequest, match="a supervisor runs on"):
        SupervisorLock(layout.lock_file)
    lock.release()
    SupervisorLock(layout.lock_file).release()


def sleeper() -> tuple[subprocess.Popen[bytes], Identity]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    identity = Identity.of(process.pid)
    assert identity is not None
    return process, identity


def test_down_finds_what_a_killed_supervisor_left(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    layout.make()
    left, identity = sleeper()
    gone = Identity(pid=identity.pid, started=identity.started - 1, boot=identity.boot)
    write_state(
        layout.state_file,
        MeshState(Phase.READY, gone, "http://127.0.0.1:1", processes=(ProcessState("gateway", Phase.READY, identity),)),
    )
    reap_in_background(left)
    assert stop_mesh(layout) == ["gateway"]
    assert not identity.alive
    state = read_state(layout.state_file)
    assert state is not None and state.phase is Phase.STOPPED
    assert stop_mesh(layout) == []


def test_down_frees_the_arena_of_a_killed_sidecar_and_no_other(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    layout.make()
    save_config(RoostConfig(), layout)
    ours = Path("/dev/shm") / segment_name("local", str(layout.run))
    anothers = Path("/dev/shm") / segment_name("local", str(tmp_path / "another"))
    try:
        for segment in (ours, anothers):
            segment.write_bytes(b"left")
        stop_mesh(layout)
        assert (ours.exists(), anothers.exists()) == (False, True)
    finally:
        ours.unlink(missing_ok=True)
        anothers.unlink()


def test_a_recycled_pid_is_left_alone(tmp_path: Path) -> None:
    stranger, identity = sleeper()
    recorded = Identity(pid=identity.pid, started=identity.started - 1, boot=identity.boot)
    other_boot = Identity(pid=identity.pid, started=identity.started, boot="another")
    assert end(recorded, grace_s=1.0) is False
    assert end(other_boot, grace_s=1.0) is False
    assert identity.alive
    stranger.kill()
    stranger.wait()


def test_leftovers_of_a_killed_supervisor_are_ended_before_a_new_start(tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path))
    layout.make()
    left, identity = sleeper()
    reap_in_background(left)
    supervisor = Identity(pid=1, started=0, boot="another")
    write_state(
        layout.state_file,
        MeshState(Phase.READY, supervisor, "", processes=(ProcessState("gateway", Phase.READY, identity),)),
    )
    end_leftovers(layout)
    assert not identity.alive


def reap_in_background(process: subprocess.Popen[bytes]) -> None:
    threading.Thread(target=process.wait, daemon=True).start()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


class FullDisk:
    """Takes states to tell until it is full."""

    def __init__(self) -> None:
        self.full = False
        self.told: list[MeshState] = []
        self.refused = 0

    def __call__(self, state: MeshState) -> None:
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.told.append(state)


async def test_a_full_disk_neither_ends_the_mesh_nor_keeps_it_from_stopping(tmp_path: Path) -> None:
    disk = FullDisk()
    run = Run(fake(tmp_path, "first"), fake(tmp_path, "second"), publish=disk)
    await run.until(lambda state: state.phase is Phase.READY)
    before = pid_of(run.states[-1], "first")
    disk.full = True
    os.kill(before, signal.SIGKILL)
    state = await run.until(
        lambda state: process(state, "first").restarts == 1 and process(state, "first").phase is Phase.READY
    )
    assert disk.refused > 0
    assert process(disk.told[-1], "first").restarts == 0
    disk.full = False
    told = len(disk.told)
    await run.until(lambda _: len(disk.told) > told)
    assert process(disk.told[-1], "first").restarts == 1, "it is told once there is room"
    disk.full = True
    await run.stop()
    assert [Identity.of(pid_of(state, name)) for name in ("first", "second")] == [None, None]


async def test_a_host_that_can_start_nothing_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(fake(tmp_path, "first"))
    await run.until(lambda state: state.phase is Phase.READY)
    genuine, attempts = asyncio.create_subprocess_exec, 0

    async def spawn(*arguments: object, **options: object) -> object:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await genuine(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    os.kill(pid_of(run.states[-1], "first"), signal.SIGKILL)
    await run.until(lambda state: (process(state, "first").restarts, process(state, "first").phase) == (1, Phase.READY))
    assert attempts == 3
    await run.stop()


@pytest.mark.parametrize(
    ("codes", "last", "lives"),
    [([0], 0, 1), ([NEVER_READY], NEVER_READY, 1), ([BROKE_LATER, NEVER_READY, -9, 0], 0, 4), ([-9, 1, 0], 0, 3)],
)
def test_the_keeper_brings_back_what_ran_once(tmp_path: Path, codes: list[int], last: int, lives: int) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        f"done, codes = Path({str(tmp_path / 'lives')!r}), {codes}\n"
        "count = len(done.read_text()) if done.exists() else 0\n"
        "done.write_text('x' * (count + 1))\n"
        "os.kill(os.getpid(), -codes[count]) if codes[count] < 0 else sys.exit(codes[count])\n"
    )
    keeper = Keeper((sys.executable, "-c", script), Backoff(first_s=0.01, max_s=0.01))
    assert keeper.run() == last
    assert len((tmp_path / "lives").read_text()) == lives


@pytest.mark.parametrize(("phase", "lives"), [(Phase.READY, 1), (Phase.STOPPED, 0), (Phase.FAILED, 0)])
def test_a_keeper_takes_over_a_supervisor_and_brings_back_a_killed_one(
    tmp_path: Path, phase: Phase, lives: int
) -> None:
    running, identity = sleeper()
    reap_in_background(running)
    write_state(tmp_path / "state.json", MeshState(phase, identity, ""))
    adopted = Adopted(running.pid, tmp_path / "state.json")
    count = f"import pathlib; file = pathlib.Path({str(tmp_path / 'lives')!r}); file.open('a').write('x')"
    keeper = Keeper((sys.executable, "-c", count), Backoff(first_s=0.01, max_s=0.01))
    threading.Timer(0.2, adopted.send_signal, (signal.SIGKILL,)).start()
    assert keeper.run(adopted) == 0
    assert not identity.alive
    assert (len((tmp_path / "lives").read_text()) if lives else 0) == lives


def test_what_could_not_be_written_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "state.json"
    write_private(target, b"before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_private(target, b"after")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("state.json", b"before")]
