from __future__ import annotations

import json
import os
import stat
import sys
import time
from pathlib import Path

import msgspec
import pytest

from backends.process import Command, EngineProcess, free_port, stop_recorded
from backends.procfs import read_stat, session_members
from wire.outcomes import EngineFailed

# stands for an engine: forks a child, as vLLM does, and ignores what it can
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("serving", sys.argv[1:], os.environ.get("COLOUR"), flush=True)
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "60"])
time.sleep(60)
"""
SLEEPER = Command((sys.executable, "-c", "import time; time.sleep(60)"), {})


def make(tmp_path: Path, name: str = "e") -> EngineProcess:
    return EngineProcess(name, run_dir=tmp_path / "run", log_dir=tmp_path / "log")


def wait_for(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)


def test_an_engine_runs_in_a_session_of_its_own_with_its_port_environment_and_log(tmp_path: Path) -> None:
    engine = make(tmp_path)
    record = engine.spawn(Command((sys.executable, "-c", STUBBORN), {"COLOUR": "red"}), host="127.0.0.1", port=0)
    stat = read_stat(record.pid)
    assert stat is not None
    assert stat.session == record.pid != os.getsid(0)
    wait_for(lambda: "serving" in engine.log_tail())
    assert f"['--host', '127.0.0.1', '--port', '{record.port}'] red" in engine.log_tail()
    engine.stop(grace_s=0)


def test_stopping_ends_the_stubborn_and_what_they_forked(tmp_path: Path) -> None:
    engine = make(tmp_path)
    record = engine.spawn(Command((sys.executable, "-c", STUBBORN), {}), host="127.0.0.1", port=0)
    wait_for(lambda: len(session_members(record.pid)) == 2)
    engine.stop(grace_s=0.3)
    assert session_members(record.pid) == []
    assert not engine.alive
    assert list((tmp_path / "run" / "engines").iterdir()) == []


def test_a_forked_survivor_of_a_dead_engine_is_ended_too(tmp_path: Path) -> None:
    engine = make(tmp_path)
    record = engine.spawn(Command((sys.executable, "-c", STUBBORN), {}), host="127.0.0.1", port=0)
    wait_for(lambda: len(session_members(record.pid)) == 2)
    os.kill(record.pid, 9)
    wait_for(lambda: not engine.alive)
    assert len(session_members(record.pid)) == 1
    engine.stop(grace_s=5)
    assert session_members(record.pid) == []


def test_the_same_command_is_adopted_and_another_is_not(tmp_path: Path) -> None:
    first = make(tmp_path)
    record = first.spawn(SLEEPER, host="127.0.0.1", port=0)
    second = make(tmp_path)
    assert second.adopt(SLEEPER)
    assert second.record == record
    assert not second.adopt(Command((*SLEEPER.argv, "--more"), {}))
    assert not second.adopt(Command(SLEEPER.argv, {"COLOUR": "red"}))
    replaced = second.spawn(Command(SLEEPER.argv, {"COLOUR": "red"}), host="127.0.0.1", port=0)
    wait_for(lambda: not first.alive)
    assert replaced.pid != record.pid
    second.stop(grace_s=1)


def test_a_stranger_with_the_recorded_pid_is_neither_adopted_nor_harmed(tmp_path: Path) -> None:
    stranger = make(tmp_path, "stranger")
    record = stranger.spawn(SLEEPER, host="127.0.0.1", port=0)
    for forged in (
        msgspec.structs.replace(record, name="e", started=record.started - 1),
        msgspec.structs.replace(record, name="e", boot="an earlier one"),
    ):
        (tmp_path / "run" / "engines" / "e.json").write_bytes(msgspec.json.encode(forged))
        engine = make(tmp_path)
        assert not engine.alive
        assert not engine.adopt(SLEEPER)
        engine.stop(grace_s=0)
        assert stranger.alive
    stranger.stop(grace_s=1)


def test_every_recorded_engine_can_be_ended_by_somebody_else(tmp_path: Path) -> None:
    engines = [make(tmp_path, name) for name in ("one", "two")]
    for engine in engines:
        engine.spawn(SLEEPER, host="127.0.0.1", port=0)
    (tmp_path / "run" / "engines" / "garbage.json").write_text("{")
    assert stop_recorded(tmp_path / "run", grace_s=2) == ["one", "two"]
    assert not any(engine.alive for engine in engines)
    assert stop_recorded(tmp_path / "run") == []
    assert stop_recorded(tmp_path / "never") == []


def test_a_command_that_does_not_exist_is_an_engine_failure(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="engine e can't be started"):
        make(tmp_path).spawn(Command((str(tmp_path / "nothing"),), {}), host="127.0.0.1", port=0)


def test_the_log_of_the_life_before_is_kept(tmp_path: Path) -> None:
    engine = make(tmp_path)
    for word in ("first", "second"):
        engine.spawn(Command((sys.executable, "-c", f"print('{word}')"), {}), host="127.0.0.1", port=0)
        wait_for(lambda: not engine.alive)
    assert engine.log_tail() == "second"
    assert engine.log.with_suffix(".log.1").read_text() == "first\n"


def test_each_engine_gets_a_token_that_only_its_owner_can_read(tmp_path: Path) -> None:
    show = "import os, time; print(os.environ['TOKEN'], flush=True); time.sleep(60)"
    command = Command((sys.executable, "-c", show), {}, token_in="TOKEN")
    tokens = set()
    for _ in range(2):
        engine = make(tmp_path)
        record = engine.spawn(command, host="127.0.0.1", port=0)
        wait_for(engine.log_tail)
        assert engine.log_tail() == record.token
        assert len(record.token) >= 32
        path = tmp_path / "run" / "engines" / "e.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert record.token not in Path(f"/proc/{record.pid}/cmdline").read_text()
        assert make(tmp_path).record == record, "whoever adopts it has its token"
        tokens.add(record.token)
        engine.stop(grace_s=0)
    assert len(tokens) == 2


def test_an_engine_of_before_tokens_is_not_adopted(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.spawn(SLEEPER, host="127.0.0.1", port=0)
    assert not make(tmp_path).adopt(msgspec.structs.replace(SLEEPER, token_in="TOKEN"))
    engine.stop(grace_s=0)


def test_an_environment_variable_can_be_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "blue")
    engine = make(tmp_path)
    show = "import json, os; print(json.dumps(os.environ.get('COLOUR')))"
    engine.spawn(Command((sys.executable, "-c", show), {"COLOUR": None}), host="127.0.0.1", port=0)
    wait_for(lambda: not engine.alive)
    assert json.loads(engine.log_tail()) is None


def test_a_free_port_can_be_bound() -> None:
    assert 0 < free_port("127.0.0.1") < 65536
