"""The commands about this host: what runs, its configuration, its keys and its catalog."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.process import Command, EngineProcess
from backends.vllm.terms import ENGINE_ROUTE
from catalog.artifacts import registrar_store
from catalog.ledger import Ledger
from catalog.migrations import open_to_write
from ops.cli.up import _Picture
from ops.config import RoostConfig, check
from ops.layout import Layout
from ops.supervise.run import save_config
from ops.supervise.state import (
    EngineState,
    Identity,
    MeshState,
    Phase,
    ProcessState,
    SupervisorLock,
    read_state,
    write_state,
)
from wire.registrar import AddBase

from ..object_storage import SECRET, ObjectServer
from .command import Done, Roost, running_here
from .stub_gateway import stub_gateway


def test_an_engine_that_does_not_start_is_told_once_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, layout = RoostConfig(), Layout.of(str(tmp_path))
    layout.make()
    log = layout.log_file("engine-tiny")
    log.write_text("INFO loading\nValueError: no room for the model\nRuntimeError: engine core failed\n")
    identity = Identity.of(os.getpid())
    assert identity is not None
    picture = _Picture(lambda _state, _note: None, config, layout)
    for health in ("starting", "dead", "starting", "dead", "dead", "ready", "dead"):
        engine = EngineState("tiny", "base", health, "its process ended\nand a long log")
        picture.show(MeshState(Phase.STARTING, identity, "http://127.0.0.1:1", engines=(engine,)))
    told = capsys.readouterr().out
    assert told.count("does not run") == 2, "once for each time that it ran before"
    assert "no room for the model" in told
    assert "a long log" not in told


def test_status_as_json_tells_processes_and_fleet(roost: Roost, tmp_path: Path) -> None:
    fleet = {"gateway": "gateway", "catalog": {"position": 4}, "nodes": []}
    with stub_gateway({"GET /roost/v1/status": (200, fleet)}) as gateway:
        running_here(tmp_path, gateway.url)
        done = roost("status", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["fleet"] == fleet
    assert told["supervisor"]["alive"] is True
    assert told["supervisor"]["processes"][0]["name"] == "gateway"


def test_status_tells_engines_processes_and_the_keeper(roost: Roost, tmp_path: Path) -> None:
    layout = running_here(tmp_path, "http://127.0.0.1:1")
    state = read_state(layout.state_file)
    assert state is not None
    engine = EngineState("tiny", "base", "ready", "busy", pid=4242, since=time.time() - 600, restarts=3)
    gone = Identity(pid=99999999, started=1, boot="b")
    write_state(layout.state_file, msgspec.structs.replace(state, engines=(engine,), keeper=gone))
    lines = roost("status", cwd=tmp_path).stdout.splitlines()
    assert " ".join(next(line for line in lines if "tiny" in line).split()) == "engine tiny ready 4242 10 min 3 busy"
    assert next(line for line in lines if "keeper" in line).split()[:3] == ["keeper", "dead", "99999999"]


def test_status_without_a_mesh_exits_with_3(roost: Roost, tmp_path: Path) -> None:
    done = roost("status", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "No mesh runs from this folder.\n")


def test_logs_of_one_process(roost: Roost, tmp_path: Path) -> None:
    layout = running_here(tmp_path, "http://127.0.0.1:1")
    layout.log_file("gateway").write_text("one\ntwo\nthree\n")
    layout.log_file("engine-smol").write_text("loading\n")
    assert roost("logs", "gateway", "-n", "2", cwd=tmp_path).stdout == "two\nthree\n"
    assert roost("logs", "smol", cwd=tmp_path).stdout == "loading\n"
    unknown = roost("logs", "nobody", cwd=tmp_path)
    assert unknown.returncode == 5
    assert "logs there: engine-smol, gateway" in unknown.stderr


def test_down_with_nothing_running(roost: Roost, tmp_path: Path) -> None:
    done = roost("down", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"ended": [], "kept": []})


def test_engines_that_are_left_running_are_told_until_they_are_ended(roost: Roost, tmp_path: Path) -> None:
    layout = Layout.of(str(tmp_path / ".roost"))
    layout.make()
    engine = EngineProcess("sg", run_dir=layout.run, log_dir=layout.logs)
    sleeping = Command((sys.executable, "-c", "import time; time.sleep(60)"), {})
    record = engine.spawn(sleeping, host="127.0.0.1", port=0)
    line = f"Engine sg runs on (pid {record.pid}): `roost up` adopts it, `roost down` ends it.\n"
    kept = [{"engine": "sg", "pid": record.pid}]
    try:
        assert roost("down", "--keep-engines", cwd=tmp_path).stdout.endswith(line)
        assert json.loads(roost("down", "--keep-engines", "--json", cwd=tmp_path).stdout)["kept"] == kept
        assert roost("status", cwd=tmp_path).stdout == f"No mesh runs from this folder.\n{line}"
        assert json.loads(roost("status", "--json", cwd=tmp_path).stdout)["kept"] == kept
        assert roost("down", cwd=tmp_path).stdout == "Stopped: engine sg.\n"
        assert not engine.alive
        assert "runs on" not in roost("status", cwd=tmp_path).stdout
    finally:
        engine.stop(grace_s=0.0)


def test_a_second_up_is_refused_while_the_first_lives(roost: Roost, tmp_path: Path) -> None:
    layout = running_here(tmp_path, "http://127.0.0.1:1")
    lock = SupervisorLock(layout.lock_file)
    for options in ([], ["--detach"]):
        done = roost("up", *options, cwd=tmp_path)
        assert done.returncode == 2
        assert "a supervisor runs on" in done.stderr
        assert done.stderr.count("\n") == 1
    lock.release()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--base", "smol"], "expected NAME=PATH"),
        (["--base", "smol=/nowhere"], "there is no folder /nowhere"),
        (["--host", "0.0.0.0", "--allow-anonymous"], "gateway.anonymous"),
        (["--port", "0"], "gateway.port"),
        (["--config", "absent.toml"], "absent.toml"),
    ],
)
def test_up_says_what_is_wrong_with_its_flags(roost: Roost, tmp_path: Path, options: list[str], told: str) -> None:
    done = roost("up", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_config_check_and_show(roost: Roost, tmp_path: Path) -> None:
    (tmp_path / "roost.toml").write_text('[[node.engines]]\nbase = "smol"\nmodel_path = "m"\nslots = 4\n')
    (tmp_path / "m").mkdir()
    checked = roost("config", "check", cwd=tmp_path)
    assert checked.returncode == 0
    assert "engine smol: smol, 4 slots" in checked.stdout
    shown = roost("config", "show", "--json", cwd=tmp_path, ROOST_GATEWAY__PORT="9000")
    assert json.loads(shown.stdout)["gateway"]["port"] == 9000
    (tmp_path / "roost.toml").write_text("[node]\nengines = 3\n")
    refused = roost("config", "check", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "error: node.engines: expected array, got int\n")


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ('model_path = "absent"', "node.engines[0].model_path: "),
        ('model_path = "m"\nmax_rank = 100000', "node.engines[0].max_rank: max_rank 100000 is not within 1 to 512"),
        ('model_path = "m"\nbackend = "SGLang"', "node.engines[0].backend: expected vllm or sglang, got 'SGLang'"),
        ('model_path = "m"\nextra_args = ["--api-key=x"]', "node.engines[0].extra_args: "),
    ],
)
def test_config_check_says_what_an_engine_would_not_start_with(
    roost: Roost, tmp_path: Path, setting: str, told: str
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "roost.toml").write_text(f'[[node.engines]]\nbase = "smol"\n{setting}\n')
    refused = roost("config", "check", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {told}")
    assert refused.stderr.count("\n") == 1


def test_doctor_tells_a_port_that_is_taken(roost: Roost, tmp_path: Path) -> None:
    with stub_gateway({}) as gateway:
        port = gateway.url.rpartition(":")[2]
        done = roost("doctor", "--json", cwd=tmp_path, ROOST_GATEWAY__PORT=port)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["port"]["grade"] == "fail"
    assert "--port" in found["port"]["advice"]
    assert found["python"]["grade"] == "ok"


@pytest.mark.usefixtures("s3_keys")
def test_doctor_tries_the_object_store(roost: Roost, tmp_path: Path, s3: ObjectServer) -> None:
    def found(bucket: str) -> dict[str, str]:
        done = roost("doctor", "--json", cwd=tmp_path, ROOST_STORE=f"s3://{bucket}/p", ROOST_STORE_ENDPOINT=s3.endpoint)
        assert SECRET not in done.stdout + done.stderr
        return next(finding for finding in json.loads(done.stdout) if finding["check"] == "artifact store")

    assert found(s3.new_bucket())["grade"] == "ok"
    missing = found("no-such-bucket")
    assert (missing["grade"], "NoSuchBucket" in missing["detail"]) == ("fail", True)


def attached(roost: Roost, folder: Path, address: str) -> dict[str, str]:
    """What doctor finds of a server to be attached to."""
    (folder / "roost.toml").write_text(f'[[node.engines]]\nbase = "smol"\nattach = "{address}"\n')
    done = roost("doctor", "--json", cwd=folder)
    return next(finding for finding in json.loads(done.stdout) if finding["check"] == "attached engines")


def test_doctor_asks_the_servers_that_a_node_is_attached_to(roost: Roost, tmp_path: Path) -> None:
    facts = {"plugin": 1, "slots": 6, "max_rank": 16, "dtype": "bfloat16", "targets": ["q"], "adapters": {}}
    answers: dict[str, tuple[int, Any]] = {
        "GET /health": (200, b""),
        "GET /v1/models": (200, {"data": [{"id": "smol"}]}),
        "GET /v1/load_lora_adapter": (405, b""),
        f"GET {ENGINE_ROUTE}": (200, facts | {"arena": True}),
    }
    with stub_gateway(answers) as server:
        address = server.url.removeprefix("http://")
        well = attached(roost, tmp_path, address)
        server.answers[f"GET {ENGINE_ROUTE}"] = (200, facts)
        slow = attached(roost, tmp_path, address)
        server.answers["GET /v1/models"] = (200, {"data": [{"id": "other"}]})
        other = attached(roost, tmp_path, address)
    gone = attached(roost, tmp_path, address)
    assert (well["grade"], "6 slots of rank 16" in well["detail"]) == ("ok", True)
    assert (slow["grade"], "folders" in slow["detail"]) == ("warn", True)
    assert (other["grade"], "serves other, not smol" in other["detail"]) == ("fail", True)
    assert (gone["grade"], "nobody answers" in gone["detail"]) == ("fail", True)
    assert all(asked.method == "GET" for asked in server.asked), "it is left as it is"


def test_doctor_checks_what_the_folders_mesh_was_started_with(roost: Roost, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/elsewhere"
    layout = Layout.of(str(tmp_path / "state"))
    layout.make()
    save_config(check({"store": store, "state_dir": str(tmp_path / "state")}), layout)
    done = roost("--state-dir", str(tmp_path / "state"), "doctor", "--json", cwd=tmp_path)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert store in found["artifact store"]["detail"]
    assert "last `up`" in found["configuration"]["detail"]


def test_an_import_names_the_folder_that_is_bad_and_counts_the_others(
    roost: Roost, adapter: Path, tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    layout = Layout.of(state)
    config = (adapter / "base/config.json").read_bytes()
    with contextlib.closing(open_to_write(layout.catalog, 1 << 26)) as environment:
        command = AddBase(name="smol", fingerprint="ab" * 32, path="/models/smol", config=config)
        Ledger(environment, registrar_store(layout.store)).run([command])
    source = tmp_path / "adapters"
    (source / "notes").mkdir(parents=True)
    shutil.copytree(adapter / "adapter", source / "good")

    def imported() -> Done:
        options = ("--tenant", "acme", "--base", "smol")
        return roost("--state-dir", state, "catalog", "import", str(source), *options, cwd=tmp_path)

    done = imported()
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 folders hold no adapter" in done.stdout
    shutil.copytree(adapter / "adapter", source / "worse")
    (source / "worse/adapter_config.json").write_bytes(b"{")
    assert f"error: {source / 'worse'}: " in imported().stderr


def test_a_check_shows_some_of_what_was_declared_and_never_brought(roost: Roost, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    layout = Layout.of(state)
    with contextlib.closing(open_to_write(layout.catalog, 1 << 26)) as environment:
        command = AddBase(name="smol", fingerprint="ab" * 32, path="/models/smol", config=b"{}")
        Ledger(environment, registrar_store(layout.store)).run([command])
    facts = {"size": 9, "rank": 8, "targets": ["q"], "dtype": "bf16", "tensors": 2, "parameters": 64}
    lines = [
        {"policy": f"acme/p{number}", "base": "smol", "artifact": {"digest": f"{number:064x}", **facts}}
        for number in range(25)
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = roost("--state-dir", state, "catalog", "import", str(file), "--external", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = roost("--state-dir", state, "catalog", "check", cwd=tmp_path)
    assert shown.returncode == 1
    assert shown.stdout.count("is not in the store\n") == 20
    assert "0 are damaged and 25 are not in the store." in shown.stdout
    assert "20 of these 25 shown: --json lists all." in shown.stdout
    told = json.loads(roost("--state-dir", state, "catalog", "check", "--json", cwd=tmp_path).stdout)["artifacts"]
    assert (told["missing"], len(told["problems"])) == (25, 25)


def test_up_tells_a_port_that_is_taken(roost: Roost, tmp_path: Path) -> None:
    with stub_gateway({}) as gateway:
        done = roost("up", "--port", gateway.url.rpartition(":")[2], cwd=tmp_path)
    assert done.returncode == 2
    assert "Address already in use; end what has it, or take another with --port" in done.stderr


def test_curve_keys_are_made_once(roost: Roost, tmp_path: Path) -> None:
    first = json.loads(roost("keys", "curve", "--json", cwd=tmp_path).stdout)
    again = json.loads(roost("keys", "curve", "--json", cwd=tmp_path).stdout)
    assert first == again
    assert set(first) == {"registrar", "sidecar", "gateway"}
    assert all(len(key) == 40 for key in first.values())


def test_messages_of_the_state_file_survive_a_round_trip() -> None:
    state = MeshState(Phase.READY, Identity(1, 2, "boot"), "http://x", processes=(ProcessState("a", Phase.READY),))
    assert msgspec.json.decode(msgspec.json.encode(state), type=MeshState) == state
