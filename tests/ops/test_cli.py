from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import pytest
from safetensors.numpy import load_file

from ops.cli import main
from ops.layout import Layout, write_private
from ops.supervise.state import Identity, MeshState, Phase, ProcessState, SupervisorLock, write_state

from ..models import make_adapter, make_tiny_base
from .stub_gateway import StubGateway, error, stub_gateway

POLICY = {
    "policy": "acme/support",
    "base": "smol",
    "latest": 2,
    "version": 3,
    "channels": {
        "stable": [{"revision": 1, "weight": 1}],
        "canary": [{"revision": 1, "weight": 9}, {"revision": 2, "weight": 1}],
    },
    "retired": False,
    "created_ms": 0,
}
COMMITTED = {"seq": 9, "changed": True, "policy": "acme/support", "revision": 2, "digest": "00", "version": 3}


class Done(NamedTuple):
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Roost(Protocol):
    """Runs the command as a person would, in a folder of their own."""

    def __call__(self, *arguments: str, cwd: Path, url: str = "", stdin: str = "", **environment: str) -> Done: ...


@pytest.fixture
def roost(capsys: pytest.CaptureFixture[str]) -> Roost:
    def run(*arguments: str, cwd: Path, url: str = "", stdin: str = "", **environment: str) -> Done:
        code = 0
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("ROOST_")]:
                patch.delenv(name)
            for name, value in (environment | ({"ROOST_URL": url} if url else {})).items():
                patch.setenv(name, value)
            patch.chdir(cwd)
            patch.setattr(sys, "argv", ["roost", *arguments])
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
        return Done(code, *capsys.readouterr())

    return run


def test_the_installed_command_runs(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("roost")
    done = subprocess.run(
        [command, "policy", "list", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "List policies" in done.stdout


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "invalid_request", 2),
        (401, "unauthenticated", 4),
        (403, "forbidden", 4),
        (404, "not_found", 5),
        (409, "unfit", 6),
        (412, "version_conflict", 6),
        (429, "quota", 7),
        (503, "journal_unavailable", 7),
        (507, "storage_full", 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    roost: Roost, tmp_path: Path, status: int, code: str, expected: int
) -> None:
    with stub_gateway({"GET /roost/v1/policies/acme/support": (status, error(code, "that went wrong"))}) as gateway:
        done = roost("policy", "show", "acme/support", cwd=tmp_path, url=gateway.url)
    retry = " (try again in 7 s)" if status in {429, 503} else ""
    assert (done.returncode, done.stdout, done.stderr) == (expected, "", f"error: that went wrong{retry}\n")


def test_an_absent_mesh_is_told_with_what_to_do(roost: Roost, tmp_path: Path) -> None:
    done = roost("policy", "list", cwd=tmp_path, url="http://127.0.0.1:9")
    assert done.returncode == 3
    assert done.stderr.startswith("error: http://127.0.0.1:9 does not answer (connection refused)")
    assert "roost up" in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_kind_of_server_is_told(roost: Roost, tmp_path: Path) -> None:
    with stub_gateway({"GET /roost/v1/policies": (200, b"<html>hello</html>")}) as gateway:
        done = roost("policy", "list", cwd=tmp_path, url=gateway.url)
    assert done.returncode == 3
    assert "no Roost gateway" in done.stderr


@pytest.mark.parametrize("name", ["acme", "acme/..", "acme/a/b", "Acme/x", "acme/" + "x" * 10_000, "acme/\N{SNOWMAN}"])
def test_a_name_that_is_none_is_refused_before_anything_is_sent(roost: Roost, tmp_path: Path, name: str) -> None:
    with stub_gateway({}) as gateway:
        done = roost("policy", "show", name, cwd=tmp_path, url=gateway.url)
    assert done.returncode == 2
    assert "is not a policy name" in done.stderr
    assert gateway.asked == []


def test_lists_are_tables_for_people_and_json_for_scripts(roost: Roost, tmp_path: Path) -> None:
    answer = {"policies": [POLICY], "has_more": True}
    with stub_gateway({"GET /roost/v1/policies": (200, answer)}) as gateway:
        table = roost("policy", "list", "--prefix", "acme/", cwd=tmp_path, url=gateway.url)
        script = roost("policy", "list", "--json", cwd=tmp_path, url=gateway.url)
    assert "prefix=acme%2F" in gateway.asked[0].path
    assert "acme/support" in table.stdout
    assert "stable=1 canary=1:9,2:1" in table.stdout
    assert "--after acme/support" in table.stdout
    assert json.loads(script.stdout) == answer


@pytest.mark.parametrize(
    ("arguments", "request_line", "body"),
    [
        (
            ["create", "acme/support", "--base", "smol"], "POST /roost/v1/policies",
            {"policy": "acme/support", "base": "smol"},
        ),
        (
            ["rollback", "acme/support", "--to", "1"], "POST /roost/v1/policies/acme/support/rollback",
            {"channel": "stable", "to": 1, "expected_version": None},
        ),
        (
            ["retire", "acme/support", "--expect", "3"], "POST /roost/v1/policies/acme/support/retire",
            {"expected_version": 3},
        ),
        (
            ["move", "acme/support", "1:95", "2:5", "--channel", "canary"],
            "PUT /roost/v1/policies/acme/support/channels/canary",
            {"target": [{"revision": 1, "weight": 95}, {"revision": 2, "weight": 5}], "expected_version": None},
        ),
    ],
)  # fmt: skip
def test_changes_are_sent_as_asked(
    roost: Roost, tmp_path: Path, arguments: list[str], request_line: str, body: dict[str, Any]
) -> None:
    with stub_gateway({request_line: (200, COMMITTED)}) as gateway:
        told = roost("policy", *arguments, cwd=tmp_path, url=gateway.url)
        script = roost("policy", *arguments, "--json", cwd=tmp_path, url=gateway.url)
    assert (told.returncode, script.returncode) == (0, 0), told.stderr
    assert gateway.asked[0].json == body
    assert "acme/support" in told.stdout
    assert json.loads(script.stdout) == COMMITTED


def test_where_names_store_nodes_and_slots(roost: Roost, tmp_path: Path) -> None:
    nodes = [{"node": "local", "residency": "serving", "engines": ["smol"]}]
    revision = {"revision": 1, "digest": "ab" * 32, "size": 2048, "in_store": True, "nodes": nodes}
    answer = {"policy": "acme/support", "channels": {}, "revisions": [revision], "has_more": False}
    with stub_gateway({"GET /roost/v1/policies/acme/support/where": (200, answer)}) as gateway:
        done = roost("policy", "where", "acme/support", cwd=tmp_path, url=gateway.url)
    assert "acme/support@1" in done.stdout
    assert "2.0 KiB" in done.stdout
    assert "local: serving" in done.stdout
    assert "smol" in done.stdout


def test_a_new_key_is_shown_once(roost: Roost, tmp_path: Path) -> None:
    key = {"key_id": "abc", "secret": "tml-secret", "tenant": "acme", "scopes": ["publish"], "label": ""}
    with stub_gateway({"POST /roost/v1/keys": (201, key)}) as gateway:
        done = roost("keys", "create", "acme", "--scope", "publish", cwd=tmp_path, url=gateway.url)
    assert gateway.asked[0].json == {"tenant": "acme", "scopes": ["publish"], "label": ""}
    assert done.stdout.splitlines()[-1] == "tml-secret"


def running_here(folder: Path, url: str) -> Layout:
    """A state folder as a running mesh leaves it, with an admin key."""
    layout = Layout.of(str(folder / ".roost"))
    layout.make()
    identity = Identity.of(os.getpid())
    assert identity is not None
    process = ProcessState("gateway", Phase.READY, identity)
    write_state(layout.state_file, MeshState(Phase.READY, identity, url, processes=(process,)))
    write_private(layout.admin_key, b"tml-local\n")
    return layout


def test_the_folders_own_mesh_is_found_with_its_admin_key(roost: Roost, tmp_path: Path) -> None:
    with stub_gateway({"GET /roost/v1/policies": (200, {"policies": [], "has_more": False})}) as gateway:
        running_here(tmp_path, gateway.url)
        done = roost("policy", "list", cwd=tmp_path)
    assert done.returncode == 0
    assert gateway.asked[0].headers["Authorization"] == "Bearer tml-local"


def test_the_admin_key_is_sent_to_no_other_gateway(roost: Roost, tmp_path: Path) -> None:
    with stub_gateway({"GET /roost/v1/policies": (200, {"policies": [], "has_more": False})}) as gateway:
        running_here(tmp_path, "http://127.0.0.1:1")
        roost("policy", "list", cwd=tmp_path, url=gateway.url)
        roost("policy", "list", cwd=tmp_path, url=gateway.url, ROOST_API_KEY="tml-mine")
    assert "Authorization" not in gateway.asked[0].headers
    assert gateway.asked[1].headers["Authorization"] == "Bearer tml-mine"


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def chatting(stream: bytes) -> Any:
    return stub_gateway({"POST /v1/chat/completions": (200, stream)})


def test_chat_streams_an_answer(roost: Roost, tmp_path: Path) -> None:
    with chatting(chunk("Hello, ") + chunk("world") + b"data: [DONE]\n\n") as gateway:
        done = roost("chat", "acme/support:canary", "Hi", "--system", "Be brief", cwd=tmp_path, url=gateway.url)
    assert done.stdout == "Hello, world\n"
    body = gateway.asked[0].json
    assert body["model"] == "acme/support:canary"
    assert body["stream"] is True
    assert body["messages"] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]


def test_a_conversation_remembers_what_was_said(roost: Roost, tmp_path: Path) -> None:
    with chatting(chunk("Yes") + b"data: [DONE]\n\n") as gateway:
        roost("chat", "acme/support", cwd=tmp_path, url=gateway.url, stdin="One?\n\nTwo?\n")
    assert [message["content"] for message in gateway.asked[1].json["messages"]] == ["One?", "Yes", "Two?"]


def test_an_error_in_the_middle_of_a_stream_is_told(roost: Roost, tmp_path: Path) -> None:
    broken = chunk("Hel") + b"data: " + json.dumps(error("engine_failed", "the engine died")).encode() + b"\n\n"
    with chatting(broken) as gateway:
        done = roost("chat", "acme/support", "Hi", cwd=tmp_path, url=gateway.url)
    assert done.returncode == 1
    assert done.stderr == "error: the engine died\n"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base in ``base`` and a PEFT adapter over it in ``adapter``."""
    folder = tmp_path_factory.mktemp("adapter")
    make_tiny_base(folder / "base", "llama")
    make_adapter(folder / "adapter", folder / "base")
    return folder


def publishing(folder: Path, known: bool) -> dict[str, tuple[int, Any]]:
    config = base64.b64encode((folder / "base/config.json").read_bytes()).decode()
    answers: dict[str, tuple[int, Any]] = {
        "GET /roost/v1/bases/smol": (200, {"name": "smol", "config": config}),
        "POST /roost/v1/policies/acme/support/revisions": (200, COMMITTED),
    }
    if known:
        answers["GET /roost/v1/policies/acme/support"] = (200, POLICY)
    return answers


def publish(roost: Roost, folder: Path, gateway: StubGateway, *options: str) -> Done:
    packed = roost("pack", "adapter", "--base-config", "base/config.json", "-o", "r.safetensors", "--json", cwd=folder)
    digest = json.loads(packed.stdout)["digest"]
    gateway.answers[f"PUT /roost/v1/artifacts/{digest}"] = (201, {"digest": digest, "size": 1})
    return roost("publish", "acme/support", "adapter", *options, cwd=folder, url=gateway.url)


def test_publish_packs_uploads_and_names(roost: Roost, adapter: Path) -> None:
    with stub_gateway(publishing(adapter, known=True)) as gateway:
        done = publish(roost, adapter, gateway, "--expect", "3", "--note", "tuned")
    assert done.returncode == 0, done.stderr
    assert "Published acme/support@2" in done.stdout
    upload, named = gateway.asked[-2:]
    assert upload.body == (adapter / "r.safetensors").read_bytes()
    assert upload.path.endswith(named.json["digest"])
    assert named.json["expected_version"] == 3
    assert named.json["provenance"]["note"] == "tuned"


def test_publishing_to_a_new_policy_needs_its_base(roost: Roost, adapter: Path) -> None:
    with stub_gateway(publishing(adapter, known=False)) as gateway:
        refused = publish(roost, adapter, gateway)
        done = publish(roost, adapter, gateway, "--create-over", "smol")
    assert refused.returncode == 5
    assert "--create-over" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert gateway.asked[-1].json["create_over"] == "smol"


def test_an_adapter_that_does_not_fit_is_not_uploaded(roost: Roost, adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in (adapter / "adapter").iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[:200])
    with stub_gateway(publishing(adapter, known=True)) as gateway:
        done = roost("publish", "acme/support", str(folder), cwd=tmp_path, url=gateway.url)
    assert done.returncode in {2, 6}
    assert done.stderr.count("\n") == 1
    assert all(asked.method == "GET" for asked in gateway.asked)


def test_what_was_packed_comes_back_bit_for_bit(roost: Roost, adapter: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.safetensors"
    config = str(adapter / "base/config.json")
    assert (
        roost("pack", str(adapter / "adapter"), "--base-config", config, "-o", str(file), cwd=tmp_path).returncode == 0
    )
    assert roost("unpack", str(file), "back", cwd=tmp_path).returncode == 0
    before, after = (
        load_file(folder / "adapter_model.safetensors") for folder in (adapter / "adapter", tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    told = json.loads(roost("inspect", str(file), "--json", cwd=tmp_path).stdout)
    assert told["rank"] == told["manifest"]["rank"]


def test_an_adapter_is_explained_before_it_is_packed(roost: Roost, adapter: Path, tmp_path: Path) -> None:
    folder, config = str(adapter / "adapter"), str(adapter / "base/config.json")
    told = roost("pack", folder, "--inspect", "--base-config", config, cwd=tmp_path).stdout
    assert "PEFT folder" in told
    assert "Would be taken" in told
    assert json.loads(roost("pack", folder, "--inspect", "--json", cwd=tmp_path).stdout)["refusal"] == ""
    (tmp_path / "broken").mkdir()
    assert "Would be refused" in roost("pack", "broken", "--inspect", cwd=tmp_path).stdout
    assert "packing needs --base-config" in roost("pack", folder, cwd=tmp_path).stderr
    assert "packing needs --output" in roost("pack", folder, "--base-config", config, cwd=tmp_path).stderr


def test_status_as_json_tells_processes_and_fleet(roost: Roost, tmp_path: Path) -> None:
    fleet = {"gateway": "gateway", "catalog": {"position": 4}, "nodes": []}
    with stub_gateway({"GET /roost/v1/status": (200, fleet)}) as gateway:
        running_here(tmp_path, gateway.url)
        done = roost("status", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["fleet"] == fleet
    assert told["supervisor"]["alive"] is True
    assert told["supervisor"]["processes"][0]["name"] == "gateway"


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
    assert (done.returncode, json.loads(done.stdout)) == (0, {"ended": []})


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
    checked = roost("config", "check", cwd=tmp_path)
    assert checked.returncode == 0
    assert "engine smol: smol, 4 slots" in checked.stdout
    shown = roost("config", "show", "--json", cwd=tmp_path, ROOST_GATEWAY__PORT="9000")
    assert json.loads(shown.stdout)["gateway"]["port"] == 9000
    (tmp_path / "roost.toml").write_text("[node]\nengines = 3\n")
    refused = roost("config", "check", cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "error: node.engines: expected array, got int\n")


def test_doctor_tells_a_port_that_is_taken(roost: Roost, tmp_path: Path) -> None:
    with stub_gateway({}) as gateway:
        port = gateway.url.rpartition(":")[2]
        done = roost("doctor", "--json", cwd=tmp_path, ROOST_GATEWAY__PORT=port)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["port"]["grade"] == "fail"
    assert "--port" in found["port"]["advice"]
    assert found["python"]["grade"] == "ok"


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
