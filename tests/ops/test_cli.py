from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import pytest
from safetensors.numpy import load_file

from catalog.artifacts import registrar_store
from catalog.ledger import Ledger
from catalog.migrations import open_to_write
from ops.cli import main
from ops.cli.output import exit_code
from ops.cli.up import _Picture
from ops.config import RoostConfig, check
from ops.layout import Layout, write_private
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
from wire.outcomes import ArtifactUnavailable
from wire.registrar import AddBase

from ..models import make_adapter, make_tiny_base
from ..object_storage import SECRET, ObjectServer
from .stub_gateway import StubGateway, error, stub_gateway
from .stub_hub import COMMIT, stub_hub

POLICY = {
    "policy": "acme/support",
    "base": "smol",
    "latest": 2,
    "version": 3,
    "channels": {
        "stable": [{"revision": 1, "weight": 1}],
        "canary": [{"revision": 1, "weight": 9}, {"revision": 2, "weight": 1}],
    },
    "seeds": {},
    "labels": {"team": "search"},
    "former": ["acme/help"],
    "retention": {"keep_last": 5},
    "retired": False,
    "created_ms": 0,
}
COMMITTED = {
    "seq": 9, "changed": True, "policy": "acme/support", "revision": 2, "digest": "00", "version": 3, "count": 4,
}  # fmt: skip


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


def test_an_object_store_that_does_not_answer_is_a_reason_to_try_again() -> None:
    assert exit_code(ArtifactUnavailable("it does not answer", retry_after_s=3.0)) == 7
    assert exit_code(ArtifactUnavailable("it has no such object")) == 1


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
    answer = {"policies": [POLICY], "has_more": True, "after": "acme/support"}
    with stub_gateway({"GET /roost/v1/policies": (200, answer)}) as gateway:
        table = roost("policy", "list", "--prefix", "acme/", "--label", "team=search", "--label", "stage=live",
                      "--base", "smol", cwd=tmp_path, url=gateway.url)  # fmt: skip
        script = roost("policy", "list", "--json", cwd=tmp_path, url=gateway.url)
    assert "prefix=acme%2F&label=team%3Dsearch&label=stage%3Dlive&base=smol" in gateway.asked[0].path
    assert "label" not in gateway.asked[1].path
    assert "team=search" in table.stdout
    assert "acme/support" in table.stdout
    assert "stable=1 canary=1:9,2:1" in table.stdout
    assert "--after acme/support" in table.stdout
    assert json.loads(script.stdout) == answer


@pytest.mark.parametrize(("revision", "told"), [(3, "revision 3 now"), (0, "split as it was before")])
def test_a_rollback_says_where_it_went(roost: Roost, tmp_path: Path, revision: int, told: str) -> None:
    answer = {**COMMITTED, "revision": revision}
    with stub_gateway({"POST /roost/v1/policies/acme/support/rollback": (200, answer)}) as gateway:
        found = roost("policy", "rollback", "acme/support", cwd=tmp_path, url=gateway.url)
    assert told in " ".join(found.stdout.split())


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
            {
                "target": [{"revision": 1, "weight": 95}, {"revision": 2, "weight": 5}], "seed": None,
                "expected_version": None,
            },
        ),
        (
            ["move", "acme/support", "1", "2", "--seed", "7"], "PUT /roost/v1/policies/acme/support/channels/stable",
            {
                "target": [{"revision": 1, "weight": 1}, {"revision": 2, "weight": 1}], "seed": 7,
                "expected_version": None,
            },
        ),
        (
            ["promote", "acme/support", "--from", "canary"], "POST /roost/v1/policies/acme/support/promote",
            {"channel": "stable", "source": "canary", "revision": 0, "expected_version": None},
        ),
        (
            ["promote", "acme/support", "--revision", "3", "--channel", "next", "--expect", "2"],
            "POST /roost/v1/policies/acme/support/promote",
            {"channel": "next", "source": "", "revision": 3, "expected_version": 2},
        ),
        (
            ["restore", "acme/support"], "POST /roost/v1/policies/acme/support/restore", {"expected_version": None},
        ),
        (
            ["rename", "acme/support", "acme/help"], "POST /roost/v1/policies/acme/support/rename",
            {"to": "acme/help", "expected_version": None},
        ),
        (
            ["label", "acme/support", "team=search", "stage-", "empty="], "POST /roost/v1/policies/acme/support/labels",
            {"labels": {"team": "search", "empty": ""}, "remove": ["stage"], "expected_version": None},
        ),
        (
            ["retention", "acme/support", "--keep-last", "5", "--keep-days", "7"],
            "PUT /roost/v1/policies/acme/support/retention",
            {"retention": {"keep_last": 5, "keep_days": 7.0}, "expected_version": None},
        ),
        (
            ["retention", "acme/support"], "PUT /roost/v1/policies/acme/support/retention",
            {"retention": None, "expected_version": None},
        ),
        (
            ["prune", "acme/support"], "POST /roost/v1/policies/acme/support/prune", {"expected_version": None},
        ),
        (
            ["retire-revision", "acme/support", "2"], "POST /roost/v1/policies/acme/support/revisions/2/retire",
            {"expected_version": None},
        ),
        (
            ["restore-revision", "acme/support", "2"], "POST /roost/v1/policies/acme/support/revisions/2/restore",
            {"expected_version": None},
        ),
        (
            ["retain", "acme/support", "checkpoint", "s3://runs/7", "--step", "40", "--revision", "2"],
            "POST /roost/v1/policies/acme/support/training",
            {
                "kind": "checkpoint", "uri": "s3://runs/7", "digest": "", "step": 40, "revision": 2,
                "expected_version": None,
            },
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


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["free-name", "acme/support", "acme/help"], "/forwards/help"),
        (["free-name", "acme/support", "acme/help", "--expect", "3"], "/forwards/help?expected_version=3"),
        (["release", "acme/support", "rollout", "s3://a?b"], "/training/rollout?uri=s3%3A%2F%2Fa%3Fb"),
    ],
)
def test_what_goes_is_named_in_the_path(roost: Roost, tmp_path: Path, arguments: list[str], asked: str) -> None:
    path = f"/roost/v1/policies/acme/support{asked}"
    with stub_gateway({f"DELETE {path.partition('?')[0]}": (200, COMMITTED)}) as gateway:
        done = roost("policy", *arguments, cwd=tmp_path, url=gateway.url)
    assert (done.returncode, gateway.asked[0].path) == (0, path), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["label", "acme/support", "team"],
        ["promote", "acme/support"],
        ["promote", "acme/support", "--from", "canary", "--revision", "2"],
        ["retention", "acme/support", "--keep-days", "3"],
        ["retention", "acme/support", "--keep-last", "3", "--keep-days", "inf"],
        ["retention", "acme/support", "--keep-last", "3", "--keep-days", "nan"],
        ["retain", "acme/support", "other", "s3://x"],
        ["rename", "acme/support", "help"],
        ["retire-revision", "acme/support", "0"],
    ],
)
def test_what_makes_no_sense_is_not_sent(roost: Roost, tmp_path: Path, arguments: list[str]) -> None:
    with stub_gateway({}) as gateway:
        done = roost("policy", *arguments, cwd=tmp_path, url=gateway.url)
    assert done.returncode == 2
    assert gateway.asked == []


def test_where_answers_the_four_questions(roost: Roost, tmp_path: Path) -> None:
    nodes = [{"node": "local", "residency": "serving", "engines": ["smol"]}]
    revision = {"revision": 1, "digest": "ab" * 32, "size": 2048, "in_store": True, "nodes": nodes}
    engine = {"node": "local", "engine": "e0", "backend": "vllm", "health": "ready", "max_rank": 8, "unfit": [2]}
    record = {"kind": "checkpoint", "uri": "s3://runs/7", "digest": "", "step": 40, "revision": 1, "actor": "k"}
    answer = {
        "policy": "acme/support",
        "base": {"name": "smol", "fingerprint": "f" * 64, "group": "", "deployments": [engine]},
        "checkpoint": record | {"retained_ms": 0},
        "channels": {
            "stable": [{"revision": 1, "digest": "ab", "weight": 1}],
            "canary": [{"revision": 1, "digest": "ab", "weight": 9}, {"revision": 2, "digest": "cd", "weight": 1}],
        },
        "rollouts": [record | {"kind": "rollout", "uri": "s3://rollouts/1", "retained_ms": 0}],
        "revisions": [revision],
        "has_more": False,
    }
    with stub_gateway({"GET /roost/v1/policies/acme/support/where": (200, answer)}) as gateway:
        done = roost("policy", "where", "acme/support", cwd=tmp_path, url=gateway.url)
    assert done.stdout.splitlines()[:4] == [
        f"runs on: smol {'f' * 12}: e0 on local (ready, not for @2)",
        "a trainer restores: s3://runs/7 (step 40, revision 1)",
        "channels use: stable=@1 canary=@1:9,@2:1",
        "rollout: s3://rollouts/1 (step 40, revision 1)",
    ]
    for told in ("acme/support@1", "2.0 KiB", "local: serving", "smol"):
        assert told in done.stdout


def test_show_tells_labels_former_names_and_what_is_kept(roost: Roost, tmp_path: Path) -> None:
    checkpoint = {"uri": "tinker://s:train:0/weights/a", "step": 40, "retained_ms": 0}
    answer = POLICY | {"revisions": [], "has_more": False, "checkpoints": [checkpoint]}
    with stub_gateway({"GET /roost/v1/policies/acme/support": (200, answer)}) as gateway:
        done = roost("policy", "show", "acme/support", cwd=tmp_path, url=gateway.url)
    assert "checkpoint tinker://s:train:0/weights/a  step 40" in done.stdout
    for line in ("labels: team=search", "former names: acme/help", "keeps: the last 5"):
        assert line in done.stdout.splitlines()


def test_history_tells_who_did_what(roost: Roost, tmp_path: Path) -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"t": "PolicyCreated", "policy": "a/b", "base": "smol"}, "created over smol"),
        ({"t": "ChannelMoved", "channel": "x", "target": [{"revision": 1, "weight": 9}], "seed": 4}, "seed 4"),
        ({"t": "PolicyRenamed", "policy": "a/b", "to": "a/c"}, "renamed from a/b to a/c"),
        ({"t": "ForwardDropped", "policy": "a/c", "name": "a/b"}, "freed the name a/b"),
        ({"t": "LabelsChanged", "labels": {"k": "v"}, "removed": ["w"]}, "labelled k=v, without w"),
        ({"t": "RetentionChanged", "retention": {"keep_last": 3, "keep_days": 2.5}}, "younger than 2.5 days"),
        ({"t": "RetentionChanged"}, "keeps every revision"),
        ({"t": "RevisionsRetired", "revisions": [1, 2]}, "retired revision 1, 2"),
        ({"t": "RevisionRestored", "revision": 2}, "restored revision 2"),
        ({"t": "RecordRetained", "record": {"kind": "rollout", "uri": "s3://x"}}, "keeps rollout s3://x"),
        ({"t": "RecordReleased", "kind": "rollout", "uri": "s3://x"}, "released rollout s3://x"),
        ({"t": "PolicyRestored"}, "restored"),
        ({"t": "OfALaterRelease"}, "OfALaterRelease"),
    ]
    events = [{"seq": seq, "at_ms": 0, "actor": "ann", "body": body} for seq, (body, _) in enumerate(bodies, start=1)]
    with stub_gateway(
        {"GET /roost/v1/policies/acme/support/history": (200, {"events": events[::-1], "has_more": False, "after": 0})}
    ) as gateway:
        done = roost("policy", "history", "acme/support", cwd=tmp_path, url=gateway.url)
    for _, told in bodies:
        assert told in " ".join(done.stdout.split())
    assert done.stdout.count("ann") == len(bodies)
    assert done.stdout.index("created over smol") < done.stdout.index("OfALaterRelease")


@pytest.mark.parametrize(
    ("command", "path", "items"),
    [
        ("policy history acme/support", "policies/acme/support/history", "events"),
        ("policy show acme/support", "policies/acme/support", "revisions"),
        ("policy where acme/support", "policies/acme/support/where", "revisions"),
        ("keys list", "keys", "keys"),
    ],
)
def test_lists_are_followed_to_their_ends(roost: Roost, tmp_path: Path, command: str, path: str, items: str) -> None:
    pages = {
        "": {items: [3], "has_more": True, "after": 3},
        "after=3&limit=1000": {items: [], "has_more": True, "after": 7},
        "after=7&limit=1000": {items: [9], "has_more": False, "after": 0},
    }
    answers = {f"GET /roost/v1/{path}?{query}".rstrip("?"): (200, page) for query, page in pages.items()}
    with stub_gateway(answers) as gateway:
        done = roost(*command.split(), "--json", cwd=tmp_path, url=gateway.url)
    told = json.loads(done.stdout)
    assert (sorted(told[items]), told["has_more"]) == ([3, 9], False)


def test_training_records_are_listed(roost: Roost, tmp_path: Path) -> None:
    record = {"kind": "rollout", "uri": "s3://x", "digest": "", "step": 7, "revision": 0, "actor": "", "retained_ms": 0}
    with stub_gateway({"GET /roost/v1/policies/acme/support/training": (200, {"records": [record]})}) as gateway:
        done = roost("policy", "training", "acme/support", cwd=tmp_path, url=gateway.url)
    assert "s3://x" in done.stdout


def test_gc_tells_what_went(roost: Roost, tmp_path: Path) -> None:
    answer = {"condemned": 3, "forgotten": 1, "removed": 2, "bytes": 2048}
    with stub_gateway({"POST /roost/v1/artifacts/collect": (200, answer)}) as gateway:
        done = roost("gc", "--grace", "60", cwd=tmp_path, url=gateway.url)
    assert gateway.asked[0].json == {"grace_s": 60.0, "ignore_silent": False}
    assert "Condemned 3 artifacts; removed 2 files, 2.0 KiB" in done.stdout


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


def test_a_terminal_obeys_no_model(roost: Roost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = "a\x1b[2J\x1b]0;title\x07b\r\x9bc\td\n\u00e9"
    with chatting(chunk(written) + b"data: [DONE]\n\n") as gateway:
        piped = roost("chat", "acme/support", "Hi", cwd=tmp_path, url=gateway.url).stdout
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        shown = roost("chat", "acme/support", "Hi", cwd=tmp_path, url=gateway.url).stdout
    assert piped == f"{written}\n"
    assert shown == "a[2J]0;titlebc\td\n\u00e9\n"


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


def test_what_was_published_is_told_though_another_host_does_not_have_it_yet(roost: Roost, adapter: Path) -> None:
    late = {"GET /roost/v1/catalog/position": (504, error("deadline", "the view is not there yet"))}
    with stub_gateway(publishing(adapter, known=True) | late) as gateway:
        done = publish(roost, adapter, gateway, "--wait", gateway.url)
    assert done.stdout.startswith("Published acme/support@2")
    assert (done.returncode, "not there yet" in done.stderr) == (7, True)


def test_publish_takes_an_adapter_of_the_hub(roost: Roost, adapter: Path) -> None:
    files = {("acme/lora", file.name): file.read_bytes() for file in (adapter / "adapter").iterdir()}
    with stub_gateway(publishing(adapter, known=True)) as gateway, stub_hub(files) as hub:
        folder = publish(roost, adapter, gateway)
        done = roost("publish", "acme/support", "hf:acme/lora@v1", cwd=adapter, url=gateway.url, HF_ENDPOINT=hub.url)
    assert (folder.returncode, done.returncode) == (0, 0), done.stderr
    first, second = (asked.json for asked in gateway.asked if asked.method == "POST")
    assert first["digest"] == second["digest"]
    assert second["provenance"]["source"].endswith(f": hf:acme/lora@{COMMIT}")


def test_publish_uploads_again_where_the_store_asks_for_a_moment(
    roost: Roost, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("ops.cli.publish.time.sleep", waited.append)
    with stub_gateway(publishing(adapter, known=True)) as gateway:
        assert publish(roost, adapter, gateway).returncode == 0
        upload = next(name for name in gateway.answers if name.startswith("PUT"))
        gateway.answers[upload] = (503, error("artifact_unavailable", "the object store is too busy"))
        busy = roost("publish", "acme/support", "adapter", cwd=adapter, url=gateway.url)
        gateway.answers[upload] = (502, error("artifact_unavailable", "the object store refuses us"))
        refused = roost("publish", "acme/support", "adapter", cwd=adapter, url=gateway.url)
    assert (busy.returncode, refused.returncode) == (7, 1)
    assert "too busy" in busy.stderr
    assert waited == [7.0, 7.0]
    assert sum(asked.method == "PUT" for asked in gateway.asked) == 1 + 3 + 1


def test_a_publish_that_could_not_wait_says_what_it_published(roost: Roost, adapter: Path) -> None:
    with stub_gateway(publishing(adapter, known=True)) as gateway:
        nowhere = publish(roost, adapter, gateway, "--wait", "http://127.0.0.1:9")
        gateway.answers["GET /roost/v1/catalog/position"] = (401, error("unauthenticated", "no such key"))
        stranger = publish(roost, adapter, gateway, "--wait", gateway.url)
        sent = len(gateway.asked)
        wrong = publish(roost, adapter, gateway, "--wait", "host:80")
    assert nowhere.returncode == 3
    assert "error: published as acme/support@2; could not wait for http://127.0.0.1:9: " in nowhere.stderr
    assert stranger.returncode == 4
    assert f"published as acme/support@2; could not wait for {gateway.url}: no such key" in stranger.stderr
    assert (wrong.returncode, len(gateway.asked)) == (2, sent)


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


def test_inspect_shows_a_folder_and_the_revision_file_that_it_becomes(
    roost: Roost, adapter: Path, tmp_path: Path
) -> None:
    file = tmp_path / "r.safetensors"
    config = ("--base-config", str(adapter / "base/config.json"))
    roost("pack", str(adapter / "adapter"), *config, "-o", str(file), cwd=tmp_path)
    folder, packed = (
        json.loads(roost("inspect", str(path), *config, "--json", cwd=tmp_path).stdout)
        for path in (adapter / "adapter", file)
    )
    assert (folder["kind"], packed["kind"]) == ("PEFT folder", "revision file")
    assert folder["facts"] == packed["facts"]
    assert folder["modules"] == packed["modules"]
    done = roost("inspect", str(adapter / "adapter"), cwd=tmp_path)
    assert done.returncode == 0
    assert folder["facts"]["digest"] in done.stdout
    assert "--base-config" in done.stdout
    assert "Would be taken" in roost("inspect", str(file), *config, cwd=tmp_path).stdout


def test_inspect_says_why_an_adapter_would_be_refused(roost: Roost, adapter: Path, tmp_path: Path) -> None:
    other = make_tiny_base(tmp_path / "other", layers=1)
    done = roost("inspect", str(adapter / "adapter"), "--base-config", str(other / "config.json"), cwd=tmp_path)
    assert done.returncode == 6
    assert "Would be refused" in done.stdout
    assert "layers.1" in done.stdout
    assert roost("inspect", "nothing", cwd=tmp_path).returncode == 5


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


def test_an_adapter_is_explained_before_it_is_packed(roost: Roost, adapter: Path, tmp_path: Path) -> None:
    folder, config = str(adapter / "adapter"), str(adapter / "base/config.json")
    told = roost("pack", folder, "--inspect", "--base-config", config, cwd=tmp_path).stdout
    assert "PEFT folder" in told
    assert "Would be taken" in told
    assert json.loads(roost("pack", folder, "--inspect", "--json", cwd=tmp_path).stdout)["refusal"] == ""
    (tmp_path / "broken").mkdir()
    done = roost("pack", "broken", "--inspect", cwd=tmp_path)
    assert "Would be refused" in done.stdout
    assert done.returncode == 6
    assert roost("pack", "nothing", "--inspect", cwd=tmp_path).returncode == 5
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


def test_status_tells_engines_processes_and_the_keeper(roost: Roost, tmp_path: Path) -> None:
    layout = running_here(tmp_path, "http://127.0.0.1:1")
    state = read_state(layout.state_file)
    assert state is not None
    engine = EngineState("tiny", "base", "ready", "busy", pid=4242, since=time.time() - 60, restarts=3)
    gone = Identity(pid=99999999, started=1, boot="b")
    write_state(layout.state_file, msgspec.structs.replace(state, engines=(engine,), keeper=gone))
    lines = roost("status", cwd=tmp_path).stdout.splitlines()
    assert " ".join(next(line for line in lines if "tiny" in line).split()) == "engine tiny ready 4242 60 s 3 busy"
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


@pytest.mark.usefixtures("s3_keys")
def test_doctor_tries_the_object_store(roost: Roost, tmp_path: Path, s3: ObjectServer) -> None:
    def found(bucket: str) -> dict[str, str]:
        done = roost("doctor", "--json", cwd=tmp_path, ROOST_STORE=f"s3://{bucket}/p", ROOST_STORE_ENDPOINT=s3.endpoint)
        assert SECRET not in done.stdout + done.stderr
        return next(finding for finding in json.loads(done.stdout) if finding["check"] == "artifact store")

    assert found(s3.new_bucket())["grade"] == "ok"
    missing = found("no-such-bucket")
    assert (missing["grade"], "NoSuchBucket" in missing["detail"]) == ("fail", True)


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


NODE = {
    "node": "gpu-1", "state": "serving", "endpoint": "tcp://10.0.0.1:7001", "bases": ["smol"], "engines": 2,
    "engines_ready": 1, "slots": 8, "slots_used": 3, "leases": 4, "own_leases": 2, "loads_in_flight": 1,
    "loads_queued": 5, "loads_limit": 2, "queued_by_tenant": {"other": 1, "acme": 4}, "load_s": 0.2, "load_rate": 2.5,
    "resident": 9,
}  # fmt: skip


def test_nodes_are_listed_with_what_is_wrong_with_their_file(roost: Roost, tmp_path: Path) -> None:
    silent = NODE | {"node": "gpu-2", "state": "silent", "loads_queued": 0}
    listed = {"nodes": [NODE, silent], "trouble": "nodes.toml: [bold] is no TOML"}
    with stub_gateway({"GET /roost/v1/nodes": (200, listed)}) as gateway:
        done = roost("node", "list", cwd=tmp_path, url=gateway.url)
        told = roost("node", "list", "--json", cwd=tmp_path, url=gateway.url)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[1].startswith("gpu-1 serving 1 of 2 3 of 8 4 1 of 2 smol 5, 2.5/s: acme 4")
    assert any(line.startswith("gpu-2 silent 1 of 2 3 of 8 4 1 of 2 smol 0") for line in lines)
    assert "Not all that is listed is in force: nodes.toml: [bold] is no TOML" in " ".join(done.stderr.split())
    assert json.loads(told.stdout) == listed


@pytest.mark.parametrize(("command", "state"), [("cordon", "cordoned"), ("uncordon", "serving")])
def test_a_node_is_cordoned_and_put_back(roost: Roost, tmp_path: Path, command: str, state: str) -> None:
    answers = {f"POST /roost/v1/nodes/gpu-1/{command}": (200, NODE | {"state": state})}
    with stub_gateway(answers) as gateway:
        done = roost("node", command, "gpu-1", cwd=tmp_path, url=gateway.url)
        missing = roost("node", command, "../keys", cwd=tmp_path, url=gateway.url)
    assert done.stdout == f"Node gpu-1 is {state}, 4 request(s)\n"
    assert missing.returncode == 5
    assert gateway.asked[-1].path == f"/roost/v1/nodes/..%2Fkeys/{command}"


def test_a_drain_waits_and_tells_what_is_left_when_its_time_is_up(roost: Roost, tmp_path: Path) -> None:
    path = "POST /roost/v1/nodes/gpu-1/drain"
    with stub_gateway({path: (200, NODE | {"state": "drained", "leases": 0})}) as gateway:
        done = roost("node", "drain", "gpu-1", cwd=tmp_path, url=gateway.url)
        assert (done.returncode, done.stdout) == (0, "Node gpu-1 is drained, 0 request(s)\n")
        assert gateway.asked[0].json == {"wait_s": 20.0}
    cordoned = NODE | {"state": "cordoned"}
    with stub_gateway({path: (200, cordoned), "GET /roost/v1/nodes/gpu-1": (200, cordoned)}) as gateway:
        done = roost("node", "drain", "gpu-1", "--timeout", "0.05", cwd=tmp_path, url=gateway.url)
        assert done.returncode == 7
        assert "gets nothing new, but is cordoned with 4 request(s) there" in done.stderr
        assert gateway.asked[0].json["wait_s"] <= 0.05


def test_a_drain_cordons_once_and_ends_where_somebody_puts_the_node_back(roost: Roost, tmp_path: Path) -> None:
    answers = {
        "POST /roost/v1/nodes/gpu-1/drain": (200, NODE | {"state": "cordoned"}),
        "GET /roost/v1/nodes/gpu-1": (200, NODE),
    }
    with stub_gateway(answers) as gateway:
        done = roost("node", "drain", "gpu-1", cwd=tmp_path, url=gateway.url)
        assert [(asked.method, asked.path.rpartition("/")[2]) for asked in gateway.asked] == [
            ("POST", "drain"), ("GET", "gpu-1"),
        ]  # fmt: skip
    assert done.returncode != 0
    assert "node gpu-1 was put back into service meanwhile" in " ".join(done.stderr.split())
