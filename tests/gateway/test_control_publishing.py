"""From the bytes of a revision to its channels, through the control plane."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from gateway.control.threads import in_thread
from wire.node import Residency

from .admin import ADMIN, DIGEST, publish, upload
from .fleet_states import BASE
from .mesh import Mesh, until
from .revisions import digest_of, revision_bytes


async def test_a_revision_goes_from_its_bytes_to_an_answer(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        content = revision_bytes(1)
        digest = digest_of(content)
        assert (await mesh.ask("HEAD", f"{ADMIN}/artifacts/{digest}")).status == 404
        first = await upload(mesh, content)
        assert (first.status, first.json) == (201, {"digest": digest, "size": len(content)})
        assert (await upload(mesh, content)).status == 200
        assert (await mesh.ask("HEAD", f"{ADMIN}/artifacts/{digest}")).status == 200
        told = await publish(mesh, "acme/bot", content, provenance={"source": "test", "step": 3})
        assert told.status == 200
        assert {name: told.json[name] for name in ("policy", "revision", "digest", "changed")} == {
            "policy": "acme/bot", "revision": 1, "digest": digest, "changed": True,
        }  # fmt: skip
        again = await publish(mesh, "acme/bot", content)
        assert (again.json["revision"], again.json["changed"]) == (1, False)
        assert (await mesh.chat("acme/bot")).json["model"] == "acme/bot@1"
        assert mesh.sidecar.acquired[0].rank == 4
        shown = (await mesh.ask("GET", f"{ADMIN}/policies/acme/bot")).json
        assert shown["base"] == BASE
        assert shown["revisions"][0]["targets"] == ["q", "v"]
        assert shown["revisions"][0]["provenance"] == {"source": "test", "step": 3}


async def test_a_publish_says_what_requests_will_not_get(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        contents = [revision_bytes(1), revision_bytes(2), revision_bytes(3)]
        assert (await publish(mesh, "acme/bot", contents[0])).json["warnings"] == []
        assert (await publish(mesh, "acme/bot", contents[1])).json["warnings"] == []
        await mesh.ask("POST", f"{ADMIN}/policies/acme/bot/rollback", json={"to": 1})
        (warning,) = (await publish(mesh, "acme/bot", contents[2])).json["warnings"]
        assert "acme/bot:stable stays at 1" in warning
        wide = revision_bytes(4, rank=mesh.sidecar.max_rank + 1)
        (warning,) = (await publish(mesh, "acme/wide", wide)).json["warnings"]
        assert f"rank {mesh.sidecar.max_rank + 1} is above vllm's {mesh.sidecar.max_rank}" in warning


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (revision_bytes(inputs=32), 409, "layers.0.q"),
        (revision_bytes(value=float("nan")), 400, "layers.0.q.A"),
        (revision_bytes()[:-4], 400, ""),
        (revision_bytes() + b"x", 400, ""),
        (b"", 400, "empty"),
        (b"\xff" * 100, 400, ""),
        ((1 << 60).to_bytes(8, "little") + b"{}", 400, ""),
    ],
    ids=["other base", "not finite", "truncated", "too long", "empty", "noise", "lying header"],
)
async def test_a_file_that_cannot_serve_is_not_published(
    tmp_path: Path, content: bytes, status: int, reason: str
) -> None:
    async with Mesh(tmp_path) as mesh:
        told = await publish(mesh, "acme/bot", content)
        assert told.status == status
        assert reason in told.error["message"]
        assert (await mesh.chat("acme/bot")).status == 404
        assert (await publish(mesh, "acme/bot", revision_bytes(7))).status == 200
        assert (await mesh.chat("acme/bot")).status == 200


async def test_bytes_of_another_digest_leave_nothing(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        content = revision_bytes()
        told = await mesh.ask("PUT", f"{ADMIN}/artifacts/{DIGEST}", data=content)
        assert (told.status, told.error["param"]) == (400, "digest")
        assert (await mesh.ask("PUT", f"{ADMIN}/artifacts/..%2F..%2Fx", data=content)).status in (400, 404)
        stored = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        assert stored == []
        told = await mesh.ask("POST", f"{ADMIN}/policies/acme/bot/revisions", json={"digest": DIGEST})
        assert (told.status, told.error["param"]) == (400, "digest")


async def test_an_artifact_is_bounded(tmp_path: Path) -> None:
    async with Mesh(tmp_path, max_artifact_bytes=1000) as mesh:
        told = await mesh.ask("PUT", f"{ADMIN}/artifacts/{DIGEST}", data=b"x" * 1001)
        assert (told.status, told.error["type"]) == (413, "too_large")
        assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


async def test_a_file_that_rotted_in_the_store_is_not_published(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        content = revision_bytes()
        await upload(mesh, content)
        path = mesh.catalog.store.path(digest_of(content))
        path.chmod(0o600)
        path.write_bytes(revision_bytes(5))
        body = {"digest": digest_of(content), "create_over": BASE}
        told = await mesh.ask("POST", f"{ADMIN}/policies/acme/bot/revisions", json=body)
        assert (told.status, told.error["type"]) == (502, "artifact_unavailable")


async def test_channels_move_split_roll_back_and_go(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for seed in (1, 2):
            await publish(mesh, "acme/bot", revision_bytes(seed))
        policy = f"{ADMIN}/policies/acme/bot"

        async def served(model: str) -> str:
            return (await mesh.chat(model)).json["model"]  # type: ignore[no-any-return]

        assert (await mesh.ask("POST", f"{policy}/rollback")).status == 200
        assert await served("acme/bot") == "acme/bot@1"
        assert await served("acme/bot:latest") == "acme/bot@2"
        body: dict[str, Any] = {"target": [{"revision": 1}, {"revision": 2, "weight": 3}]}
        assert (await mesh.ask("PUT", f"{policy}/channels/canary", json=body)).status == 200
        shown = {await served("acme/bot:canary") for _ in range(40)}
        assert shown == {"acme/bot@1", "acme/bot@2"}
        moved = await mesh.ask("PUT", f"{policy}/channels/stable", json={"target": []})
        assert await served("acme/bot") == "acme/bot@2"
        stale = {"target": [{"revision": 1}], "expected_version": moved.json["version"] - 1}
        told = await mesh.ask("PUT", f"{policy}/channels/stable", json=stale)
        assert (told.status, told.error["type"]) == (412, "version_conflict")
        assert (await mesh.ask("DELETE", f"{policy}/channels/canary")).status == 200
        assert (await mesh.chat("acme/bot:canary")).status == 404
        kinds = [event["body"]["t"] for event in (await mesh.ask("GET", f"{policy}/history")).json["events"]]
        assert kinds[-1] == "PolicyCreated"
        assert kinds[0] == "ChannelRemoved"


async def test_where_shows_every_copy(tmp_path: Path) -> None:
    async with Mesh(tmp_path, nodes=2) as mesh:
        content = revision_bytes(1)
        digest = digest_of(content)
        await publish(mesh, "acme/bot", content)
        told = await mesh.ask("GET", f"{ADMIN}/policies/acme/bot/where")
        assert told.json["revisions"] == [
            {"revision": 1, "digest": digest, "size": len(content), "in_store": True, "nodes": []}
        ]
        one, other = mesh.sidecars
        one.resident[digest] = Residency.SERVING
        one.serving.add(f"acme@{digest}")
        other.resident[digest] = Residency.FETCHING
        one.announce()
        other.announce()
        nodes = mesh.gateways[0].nodes
        await until(lambda: all(digest in node.resident for node in nodes))
        told = await mesh.ask("GET", f"{ADMIN}/policies/acme/bot/where")
        assert told.json["revisions"][0]["nodes"] == [
            {"node": "n0", "residency": "serving", "engines": ["n0e0"]},
            {"node": "n1", "residency": "fetching", "engines": []},
        ]
        status = (await mesh.ask("GET", f"{ADMIN}/status")).json
        assert status["catalog"]["position"] == mesh.catalog.view.position()
        assert [node["node"] for node in status["nodes"]] == ["n0", "n1"]
        engine = status["nodes"][0]["engines"][0]
        assert (engine["health"], engine["slots"], engine["slots_used"]) == ("ready", 4, 1)
        assert engine["serving"] == [
            {"adapter": f"acme@{digest}", "tenant": "acme", "digest": digest, "references": ["acme/bot@1"]}
        ]
        rival = (await mesh.ask("GET", f"{ADMIN}/status", headers=mesh.key("rival"))).json
        assert rival["nodes"][0]["engines"][0]["serving"] == []
        assert digest not in json.dumps(rival)


async def test_an_upload_that_is_cancelled_leaves_its_file_to_the_thread_that_writes_it(tmp_path: Path) -> None:
    writing, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def write() -> bool:
        writing.set()
        go_on.wait(60.0)
        return closed.is_set()

    async def upload() -> None:
        try:
            await in_thread(write)
        finally:
            closed.set()

    task = asyncio.ensure_future(upload())
    await asyncio.to_thread(writing.wait, 20.0)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.02)
    assert not closed.is_set()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()


async def test_orphans_are_collected(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        content = revision_bytes(3)
        await upload(mesh, content)
        await publish(mesh, "acme/bot", revision_bytes(4))
        await asyncio.sleep(0.05)
        told = await mesh.ask("POST", f"{ADMIN}/orphans/collect", json={"older_than_s": 0.01})
        assert told.json == {"removed": 1, "bytes": len(content)}
        assert (await mesh.chat("acme/bot")).status == 200
