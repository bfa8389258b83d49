"""Runs and checkpoints are looked through and removed, with the unmodified SDKs' RestClient."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fleet_states import BASE

from .rig import Rig, secret_of
from .sdks import environment

CLIENT = Path(__file__).parent / "sdk" / "rest.py"
VERSIONS = ("tinker==0.38.0", "tinker==0.22.0")


async def client(rig: Rig, requirement: str) -> dict[str, Any]:
    """What it saw."""
    interpreter = await asyncio.to_thread(environment, requirement)
    keys = [secret_of(rig.mesh.key(tenant)) for tenant in ("acme", "other")]
    process = await asyncio.create_subprocess_exec(
        str(interpreter), str(CLIENT), rig.url, *keys, BASE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("requirement", VERSIONS)
async def test_a_rest_client_lists_and_removes_what_is_its_tenant_s(requirement: str, tmp_path: Path) -> None:
    async with Rig(tmp_path, anonymous=False) as rig:
        seen = await client(rig, requirement)
        assert seen["runs"] == [8, 4]
        assert seen["cursor"] == [0, 20, 2]
        assert (seen["page"], seen["past the end"]) == ([[4], 2], 0)
        metadata = {"policy": "acme/taught", "note": "mine"}
        assert seen["run"] == [BASE, "acme", True, False, metadata]
        assert seen["last"] == [True, True]
        assert 0 <= seen["age"] < 60
        assert seen["checkpoints"] == [
            ["sampler", "sampler_weights/three", False],
            ["training", "weights/two", False],
            ["training", "weights/one", False],
        ]
        assert seen["expire"] == [False, True, False]
        assert seen["expire now"] == [False, False, True]
        assert seen["mine"] == [0, 2, 3]
        assert seen["info"] == [4, 4]
        assert seen["sessions"] == [True, 1, 2]
        assert seen["sampler"]

        assert seen["other"] == [0, 0, False]
        assert {name: status for name, status in seen.items() if name.startswith("other's")} == {
            f"other's {name}": 404 for name in ("run", "checkpoints", "info", "session", "delete", "ttl")
        }

        assert seen["loaded"][0] == 400 and "is in use" in seen["loaded"][1]
        assert seen["sampled from"][0] == 400 and ":sample:0 samples from it" in seen["sampled from"][1]
        assert seen["left"] == ["sampler_weights/three"]
        assert seen["again"] == [200, ""]
        assert seen["load"] == 404
        assert seen["the name again"]
        assert seen["samples"] == 2
        kept = [each.record.uri.split("/")[-1] for each in rig.mesh.catalog.view.retained("acme/taught")]
        assert "one" in kept and "two" not in kept
        folders = [folder.name for folder in (rig.folder / "training" / "checkpoints").glob("*/*")]
        assert folders == ["one"]
        assert_refusals(seen)


def assert_refusals(seen: dict[str, Any]) -> None:
    for name, status, reason in (
        ("no run", 404, "there is no run 'nothing:train:0'"),
        ("no session", 404, "there is no session 'nothing'"),
        ("no checkpoint", 404, "there is no checkpoint tinker://"),
        ("no kind", 400, "checkpoint 'one' is not weights/NAME or sampler_weights/NAME"),
        ("limit 0", 400, "limit is '0': expected 1 to 1000"),
        ("limit 1001", 400, "limit is '1001': expected 1 to 1000"),
        ("offset -1", 400, "offset is '-1': expected 0 to 2147483647"),
        ("ttl 0", 400, "ttl_seconds is 0: expected 1 to"),
        ("publish", 400, "there is no public here"),
        ("unpublish", 400, "there is no public here"),
        ("project", 400, "there are no projects here"),
        ("archive", 400, "there are no download addresses here"),
        ("trace", 400, "sessions are not traced here"),
        ("in a project", 400, "there are no projects here"),
    ):
        if seen[name] is not None:
            assert seen[name][0] == status and reason in seen[name][1], (name, seen[name])
