"""The command: how it ends, and what it asks of a gateway about policies and keys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.cli.output import exit_code
from wire.outcomes import ArtifactUnavailable

from .command import COMMITTED, POLICY, Roost, running_here
from .stub_gateway import error, stub_gateway


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
    for line in (
        "labels: team=search",
        "former names: acme/help",
        "written by: training run 5e55:train:0",
        "keeps: the last 5",
    ):
        assert line in done.stdout.splitlines()


def test_history_tells_who_did_what(roost: Roost, tmp_path: Path) -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"t": "PolicyCreated", "policy": "a/b", "base": "smol"}, "created over smol"),
        ({"t": "ChannelMoved", "channel": "x", "target": [{"revision": 1, "weight": 9}], "seed": 4}, "seed 4"),
        ({"t": "PolicyRenamed", "policy": "a/b", "to": "a/c"}, "renamed from a/b to a/c"),
        ({"t": "ForwardDropped", "policy": "a/c", "name": "a/b"}, "freed the name a/b"),
        ({"t": "LabelsChanged", "labels": {"k": "v"}, "removed": ["w"]}, "labelled k=v, without w"),
        ({"t": "WriterChanged", "writer": "s:train:0"}, "is written by s:train:0"),
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
