"""The control plane: who may do what, and what it answers."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from catalog.view import CatalogView
from gateway.app import Gateway
from gateway.control.threads import in_thread
from gateway.settings import GatewaySettings
from wire.events import Scope
from wire.node import Health, Residency
from wire.outcomes import InvalidRequest, JournalUnavailable

from .fleet_states import BASE, FINGERPRINT
from .mesh import CONFIG, Mesh, Told, until
from .revisions import digest_of, revision_bytes

ADMIN = "/roost/v1"


async def upload(mesh: Mesh, content: bytes, **arguments: Any) -> Told:
    return await mesh.ask("PUT", f"{ADMIN}/artifacts/{digest_of(content)}", data=content, **arguments)


async def publish(mesh: Mesh, policy: str, content: bytes, **fields: Any) -> Told:
    """Upload and publish over the tiny base."""
    assert (await upload(mesh, content)).status in (200, 201)
    body = {"digest": digest_of(content), "create_over": BASE, **fields}
    return await mesh.ask("POST", f"{ADMIN}/policies/{policy}/revisions", json=body)


async def test_health_needs_nothing_and_readiness_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = GatewaySettings(
        name="g",
        port=0,
        catalog_dir=str(tmp_path / "none"),
        store_dir=str(tmp_path / "store"),
        registrar_endpoint=f"ipc://{tmp_path}/registrar",
        nodes=(),
        access_log=False,
    )
    gateway = await Gateway.start(settings)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            async with http.get("/healthz") as response:
                assert (response.status, await response.json()) == (200, {"ok": True})
            async with http.get("/readyz") as response:
                document = await response.json()
                assert response.status == 503
                assert not document["ready"]
                assert document["missing"][0] == "the catalog is not available now"
                assert str(tmp_path) not in json.dumps(document)
                assert "no node" in document["missing"][1]
            async with http.get("/v1/models", headers={"x-api-key": "tml-x"}) as response:
                assert (response.status, response.headers["retry-after"]) == (503, "1")
                error = (await response.json())["error"]
                assert error["type"] == "journal_unavailable"
                assert str(tmp_path) not in error["message"]
            async with http.post("/v1/chat/completions", json={"model": "a/b"}) as response:
                assert (response.status, response.headers["x-roost-outcome"]) == (503, "journal_unavailable")
                assert str(tmp_path) not in await response.text()
            # who runs the fleet has its log too: there it says why
            assert str(tmp_path) in caplog.text
    finally:
        await gateway.stop(drain_s=0.0)


async def test_where_the_journal_lies_is_told_to_operators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Mesh(tmp_path, anonymous=False) as mesh:
        operator, tenant = mesh.key("*"), mesh.key("acme")
        address = "10.1.2.3:5432"

        async def run(*arguments: object, **options: object) -> None:
            raise JournalUnavailable(f"PostgreSQL can't be written: no answer from {address}")

        monkeypatch.setattr(mesh.gateways[0]._registrar, "run", run)
        body = {"policy": "acme/bot", "base": BASE}
        for headers, shown in ((tenant, False), (operator, True)):
            told = await mesh.ask("POST", f"{ADMIN}/policies", json=body, headers=headers)
            assert (told.status, address in told.error["message"]) == (503, shown)
        assert address in caplog.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_data_routes_take_post_alone(tmp_path: Path, path: str) -> None:
    async with Mesh(tmp_path) as mesh:
        for method in ("GET", "PUT", "DELETE"):
            told = await mesh.ask(method, path)
            assert (told.status, told.headers["allow"]) == (405, "POST")
            assert told.error["type"] == "invalid_request"


async def test_ready_once_an_engine_is(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        assert (await mesh.ask("GET", "/readyz")).json == {"ready": True, "missing": []}
        mesh.sidecar.health = Health.DEAD
        mesh.sidecar.announce()
        await until(lambda: mesh.gateways[0].nodes.ready_engines() == 0)
        told = await mesh.ask("GET", "/readyz")
        assert (told.status, told.json["missing"]) == (503, ["no node has a ready engine"])


async def test_anonymous_off_the_loopback_does_not_start(tmp_path: Path) -> None:
    settings = GatewaySettings(
        name="g", host="0.0.0.0", port=0, catalog_dir="c", store_dir="s", registrar_endpoint="ipc://r", nodes=(),
        anonymous=True,
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="anonymous"):
        await Gateway.start(settings)


async def test_models_come_in_pages_bases_first(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        names = sorted(f"acme/bot{number}" for number in range(25))
        for name in names:
            mesh.publish(name)
        mesh.publish("rival/bot")
        seen: list[str] = []
        after = ""
        while True:
            page = (await mesh.ask("GET", f"/v1/models?limit=10&after={after}")).json
            assert page["object"] == "list"
            assert len(page["data"]) <= 10
            seen += [model["id"] for model in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert seen == [BASE, *names, "rival/bot"]
        own = (await mesh.ask("GET", "/v1/models", headers=mesh.key("rival"))).json
        assert [model["id"] for model in own["data"]] == [BASE, "rival/bot"]
        assert own["data"][1] == {
            "id": "rival/bot", "object": "model", "created": own["data"][1]["created"], "owned_by": "rival",
            "parent": BASE,
        }  # fmt: skip


async def test_a_page_is_bounded(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for limit in ("0", "1001", "x", "-1", "9" * 40, "1e3"):
            told = await mesh.ask("GET", f"/v1/models?limit={limit}")
            assert (told.status, told.error["param"]) == (400, "limit")
        for number in range(105):
            mesh.publish(f"acme/bot{number}")
        page = (await mesh.ask("GET", "/v1/models")).json
        assert (len(page["data"]), page["has_more"]) == (100, True)
        assert (await mesh.ask("GET", f"/v1/models?after={page['last_id']}")).json["has_more"] is False


async def test_retired_policies_are_not_listed(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for name in ("acme/a", "acme/b", "acme/c"):
            mesh.publish(name)
        await mesh.ask("POST", f"{ADMIN}/policies/acme/b/retire")
        page = (await mesh.ask("GET", "/v1/models?limit=2")).json
        assert ([model["id"] for model in page["data"]], page["has_more"]) == ([BASE, "acme/a"], True)
        page = (await mesh.ask("GET", "/v1/models?limit=2&after=acme/a")).json
        assert ([model["id"] for model in page["data"]], page["has_more"]) == (["acme/c"], False)


async def test_a_page_of_models_looks_at_a_bounded_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catalog.search._MOST_LOOKED_AT", 3)
    async with Mesh(tmp_path) as mesh:
        for name in ("acme/a", "acme/b", "acme/c", "acme/d", "acme/e"):
            mesh.publish(name)
            if name < "acme/e":
                await mesh.ask("POST", f"{ADMIN}/policies/{name}/retire")
        pages: list[dict[str, Any]] = []
        after = ""
        while not pages or pages[-1]["has_more"]:
            pages.append((await mesh.ask("GET", f"/v1/models?after={after}")).json)
            after = pages[-1]["last_id"]
        assert [[model["id"] for model in page["data"]] for page in pages] == [[BASE], ["acme/e"]]


async def test_a_page_that_ends_with_the_bases_says_whether_policies_follow(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        assert (await mesh.ask("GET", "/v1/models?limit=1")).json["has_more"] is False
        mesh.publish("acme/bot")
        page = (await mesh.ask("GET", "/v1/models?limit=1")).json
        assert (page["last_id"], page["has_more"]) == (BASE, True)
        page = (await mesh.ask("GET", f"/v1/models?limit=1&after={BASE}")).json
        assert (page["last_id"], page["has_more"]) == ("acme/bot", False)


async def test_every_model_that_is_listed_is_found(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        await mesh.ask("POST", f"{ADMIN}/policies", json={"policy": "acme/new", "base": BASE})
        listed = (await mesh.ask("GET", "/v1/models")).json["data"]
        assert [model["id"] for model in listed] == [BASE, "acme/bot", "acme/new"]
        for model in listed:
            found = await mesh.ask("GET", f"/v1/models/{model['id']}")
            assert (found.status, found.json["id"]) == (200, model["id"])
        assert (await mesh.ask("GET", "/v1/models/acme/new@1")).status == 404


async def test_a_policys_history_comes_in_pages_from_the_newest_on(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for content in (b"one", b"two", b"three"):
            mesh.publish("acme/bot", content)
        mesh.publish("rival/bot")
        path = f"{ADMIN}/policies/acme/bot/history"
        whole = (await mesh.ask("GET", path)).json
        assert (whole["has_more"], whole["after"]) == (False, 0)
        seqs = [event["seq"] for event in whole["events"]]
        assert seqs == sorted(seqs, reverse=True)
        paged: list[dict[str, Any]] = []
        page = {"has_more": True, "after": 0}
        while page["has_more"]:
            page = (await mesh.ask("GET", f"{path}?limit=2&after={page['after']}")).json
            assert len(page["events"]) <= 2
            paged += page["events"]
        assert paged == whole["events"]
        for query, field in (
            ("limit=0", "limit"),
            ("after=x", "after"),
            (f"after={mesh.catalog.view.position()}", "after"),
        ):
            told = await mesh.ask("GET", f"{path}?{query}")
            assert (told.status, told.error["param"]) == (400, field)


async def test_keys_come_in_pages(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        for _ in range(5):
            mesh.key("acme")
            mesh.key("rival")
        told: list[dict[str, Any]] = []
        page = {"has_more": True, "after": ""}
        while page["has_more"]:
            page = (await mesh.ask("GET", f"{ADMIN}/keys?tenant=acme&limit=2&after={page['after']}")).json
            told += page["keys"]
        assert len({key["key_id"] for key in told}) == len(told) == 5
        assert {key["tenant"] for key in told} == {"acme"}
        refused = await mesh.ask("GET", f"{ADMIN}/keys?limit=x")
        assert (refused.status, refused.error["param"]) == (400, "limit")


async def test_a_request_is_served_while_scans_take_their_time(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        scans = mesh.gateways[0]._scans
        go_on = threading.Event()
        busy = [asyncio.ensure_future(scans.run(go_on.wait)) for _ in range(2)]
        waiting = [
            asyncio.ensure_future(mesh.ask("GET", path))
            for path in ("/v1/models", *(f"{ADMIN}/{path}" for path in (
                "bases", "keys", "policies", "policies/acme/bot", "policies/acme/bot/history",
                "policies/acme/bot/where", "policies/acme/bot/training",
            )))
        ]  # fmt: skip
        try:
            assert (await mesh.chat("acme/bot")).status == 200
            assert not any(one.done() for one in waiting)
        finally:
            go_on.set()
        assert [told.status for told in await asyncio.gather(*waiting)] == [200] * len(waiting)
        await asyncio.gather(*busy)


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("acme/bot", "acme/bot@2"),
        ("acme/bot@1", "acme/bot@1"),
        ("acme/bot:stable", "acme/bot@2"),
        ("acme%2Fbot%401", "acme/bot@1"),
    ],
)
async def test_any_model_is_found_by_its_name(tmp_path: Path, name: str, root: str) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot", b"one")
        mesh.publish("acme/bot", b"two")
        told = await mesh.ask("GET", f"/v1/models/{name}")
        assert (told.status, told.json["root"], told.json["parent"]) == (200, root, BASE)
        assert (await mesh.ask("GET", f"/v1/models/{BASE}")).json["id"] == BASE


@pytest.mark.parametrize(
    ("name", "status"),
    [("acme/none", 404), ("nobase", 404), ("acme/bot@7", 404), ("acme/bot/x", 400), ("%C3%A9", 400), ("ACME/x", 400)],
)
async def test_a_model_that_is_not_there(tmp_path: Path, name: str, status: int) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.ask("GET", f"/v1/models/{name}")
        assert (told.status, told.error["param"]) == (status, "model")


DIGEST = "0" * 64
POLICY_CHANGES = [
    ("POST", "restore"),
    ("POST", "promote"),
    ("POST", "rename"),
    ("DELETE", "forwards/former"),
    ("POST", "labels"),
    ("PUT", "retention"),
    ("POST", "prune"),
    ("POST", "revisions/1/retire"),
    ("POST", "revisions/1/restore"),
    ("POST", "training"),
    ("DELETE", "training/rollout"),
]
ROUTES: list[tuple[str, str, Scope]] = [
    ("GET", "/v1/models", Scope.INVOKE),
    ("GET", "/v1/models/acme/bot", Scope.INVOKE),
    ("POST", "/v1/chat/completions", Scope.INVOKE),
    ("POST", f"{ADMIN}/policies", Scope.PUBLISH),
    ("PUT", f"{ADMIN}/artifacts/{DIGEST}", Scope.PUBLISH),
    ("POST", f"{ADMIN}/policies/acme/bot/revisions", Scope.PUBLISH),
    ("PUT", f"{ADMIN}/policies/acme/bot/channels/x", Scope.PUBLISH),
    ("DELETE", f"{ADMIN}/policies/acme/bot/channels/x", Scope.PUBLISH),
    ("POST", f"{ADMIN}/policies/acme/bot/rollback", Scope.PUBLISH),
    ("POST", f"{ADMIN}/policies/acme/bot/retire", Scope.PUBLISH),
    *((method, f"{ADMIN}/policies/acme/bot/{path}", Scope.PUBLISH) for method, path in POLICY_CHANGES),
    ("GET", f"{ADMIN}/status", Scope.ADMIN),
    ("POST", f"{ADMIN}/bases", Scope.ADMIN),
    ("POST", f"{ADMIN}/keys", Scope.ADMIN),
    ("GET", f"{ADMIN}/keys", Scope.ADMIN),
    ("DELETE", f"{ADMIN}/keys/x", Scope.ADMIN),
    ("POST", f"{ADMIN}/orphans/collect", Scope.ADMIN),
    ("POST", f"{ADMIN}/artifacts/collect", Scope.ADMIN),
]


async def test_every_route_asks_for_a_key_and_its_scope(tmp_path: Path) -> None:
    async with Mesh(tmp_path, anonymous=False) as mesh:
        mesh.publish("acme/bot")
        for method, path in [*((method, path) for method, path, _ in ROUTES), ("GET", f"{ADMIN}/bases")]:
            told = await mesh.ask(method, path, json={})
            assert (told.status, told.error["type"]) == (401, "unauthenticated"), path
        lacking = {scope: mesh.key("acme", *(set(Scope) - {scope, Scope.ADMIN})) for scope in Scope}
        for method, path, scope in ROUTES:
            told = await mesh.ask(method, path, json={"model": "acme/bot"}, headers=lacking[scope])
            assert (told.status, told.error["type"]) == (403, "forbidden"), path
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await mesh.ask("GET", path)).status == 200


async def test_another_tenants_policies_are_out_of_reach_whether_they_exist_or_not(tmp_path: Path) -> None:
    async with Mesh(tmp_path, anonymous=False) as mesh:
        mesh.publish("acme/bot")
        rival = mesh.key("rival")
        for name in ("acme/bot", "acme/none"):
            for method, path in (
                ("GET", f"/v1/models/{name}"),
                ("GET", f"{ADMIN}/policies/{name}"),
                ("GET", f"{ADMIN}/policies/{name}/where"),
                ("GET", f"{ADMIN}/policies/{name}/history"),
                ("POST", f"{ADMIN}/policies/{name}/revisions"),
                ("PUT", f"{ADMIN}/policies/{name}/channels/x"),
                ("DELETE", f"{ADMIN}/policies/{name}/channels/x"),
                ("POST", f"{ADMIN}/policies/{name}/rollback"),
                ("POST", f"{ADMIN}/policies/{name}/retire"),
                ("GET", f"{ADMIN}/policies/{name}/training"),
                *((method, f"{ADMIN}/policies/{name}/{path}") for method, path in POLICY_CHANGES),
            ):
                assert (await mesh.ask(method, path, headers=rival)).status == 403, path
            assert (await mesh.chat(name, headers=rival)).status == 403
        body = {"policy": "acme/new", "base": BASE}
        assert (await mesh.ask("POST", f"{ADMIN}/policies", json=body, headers=rival)).status == 403
        listed = (await mesh.ask("GET", f"{ADMIN}/policies?prefix=acme/", headers=rival)).json
        assert listed == {"policies": [], "has_more": False, "after": ""}
        # fleet-wide things are for a key of all tenants
        for method, path in [("POST", f"{ADMIN}/{path}") for path in ("bases", "orphans/collect", "artifacts/collect")]:
            assert (await mesh.ask(method, path, headers=rival)).status == 403


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
        assert f"more than {mesh.sidecar.max_rank}" in warning


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


async def test_keys_are_made_shown_once_and_revoked(tmp_path: Path) -> None:
    async with Mesh(tmp_path, anonymous=False) as mesh:
        mesh.publish("acme/bot")
        admin = mesh.key("acme", Scope.ADMIN)
        body = {"tenant": "acme", "scopes": ["invoke"], "label": "ci"}
        made = await mesh.ask("POST", f"{ADMIN}/keys", json=body, headers=admin)
        assert made.status == 201
        secret = made.json["secret"]
        headers = {"x-api-key": secret}
        assert (await mesh.chat("acme/bot", headers=headers)).status == 200
        listed = await mesh.ask("GET", f"{ADMIN}/keys", headers=admin)
        assert made.json["key_id"] in [key["key_id"] for key in listed.json["keys"]]
        assert secret not in listed.body.decode()
        rival = mesh.key("rival", Scope.ADMIN)
        path = f"{ADMIN}/keys/{made.json['key_id']}"
        assert (await mesh.ask("DELETE", path, headers=rival)).status == 404
        assert (await mesh.ask("GET", f"{ADMIN}/keys?tenant=acme", headers=rival)).status == 403
        assert len((await mesh.ask("GET", f"{ADMIN}/keys", headers=rival)).json["keys"]) == 1
        assert (await mesh.ask("DELETE", path, headers=admin)).status == 200
        assert (await mesh.chat("acme/bot", headers=headers)).status == 401
        for bad in ({"tenant": "rival", "scopes": ["invoke"]}, {"tenant": "*", "scopes": ["invoke"]}):
            assert (await mesh.ask("POST", f"{ADMIN}/keys", json=bad, headers=admin)).status == 403
        told = await mesh.ask("POST", f"{ADMIN}/keys", json={"tenant": "acme", "scopes": ["all"]}, headers=admin)
        assert (told.status, told.error["param"]) == (400, "scopes")


async def test_anonymous_callers_make_no_keys(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        body = {"tenant": "*", "scopes": ["admin"]}
        told = await mesh.ask("POST", f"{ADMIN}/keys", json=body)
        assert (told.status, told.error["type"]) == (403, "forbidden")
        assert (await mesh.ask("GET", f"{ADMIN}/keys")).json["keys"] == []
        assert (await mesh.ask("POST", f"{ADMIN}/keys", json=body, headers=mesh.key("*"))).status == 201


async def test_what_is_the_operators_is_told_to_operators_only(tmp_path: Path) -> None:
    async with Mesh(tmp_path, anonymous=False) as mesh:
        mesh.sidecar.health = Health.DEAD
        mesh.sidecar.detail = (
            "no model at /srv/models/tiny: nobody is at 10.0.0.7:8000\nlog of acme@abc in /var/log/engine"
        )
        mesh.sidecar.announce()
        await until(lambda: mesh.gateways[0].nodes.ready_engines() == 0)
        operator, tenant = mesh.key("*", Scope.ADMIN), mesh.key("rival", Scope.ADMIN)
        shown = [(await mesh.ask("GET", f"{ADMIN}/status", headers=key)).json for key in (operator, tenant)]
        details = [status["nodes"][0]["engines"][0]["detail"] for status in shown]
        assert details == [mesh.sidecar.detail, "no model at ... nobody is at ..."]
        for path in ("bases", f"bases/{BASE}"):
            seen = await mesh.ask("GET", f"{ADMIN}/{path}", headers=operator)
            hidden = await mesh.ask("GET", f"{ADMIN}/{path}", headers=tenant)
            assert "/models/tiny" in seen.body.decode()
            assert "/models/tiny" not in hidden.body.decode()
            assert FINGERPRINT in hidden.body.decode()


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


async def test_bases_are_added_and_listed(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        config = base64.b64encode(json.dumps(CONFIG).encode()).decode()
        body = {"name": "Other-7B", "path": "/models/other", "fingerprint": "a" * 64, "config": config}
        assert (await mesh.ask("POST", f"{ADMIN}/bases", json=body)).json["changed"]
        assert not (await mesh.ask("POST", f"{ADMIN}/bases", json=body)).json["changed"]
        told = await mesh.ask("POST", f"{ADMIN}/bases", json=body | {"fingerprint": "b" * 64})
        assert told.status == 412
        listed = (await mesh.ask("GET", f"{ADMIN}/bases")).json["bases"]
        assert [(base["name"], base["fingerprint"]) for base in listed] == [("Other-7B", "a" * 64), (BASE, FINGERPRINT)]
        shown = (await mesh.ask("GET", f"{ADMIN}/bases/Other-7B")).json
        assert json.loads(base64.b64decode(shown["config"])) == CONFIG
        assert shown["path"] == "/models/other"
        assert (await mesh.ask("GET", f"{ADMIN}/bases/none")).status == 404


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("policies", b"{", "body"),
        ("policies", b"[]", "body"),
        ("policies", b'{"policy": "acme/new"}', "base"),
        ("policies", b'{"policy": "acme/new", "base": "tiny", "extra": 1}', "extra"),
        ("policies", b'{"policy": 3, "base": "tiny"}', "policy"),
        ("policies", b'{"policy": "acme/../x", "base": "tiny"}', "policy"),
        ("policies", b'{"policy": "acme/x/y", "base": "tiny"}', "policy"),
        ("policies", b'{"policy": "acme/new", "base": "a/b"}', "base"),
        ("policies/acme/bot/revisions", b'{"digest": "xyz"}', "digest"),
        ("policies/acme/bot/revisions", b'{"digest": "", "expected_version": "1"}', "expected_version"),
        ("policies/acme/bot/rollback", b'{"channel": "no/channel"}', "channel"),
        ("policies/acme/bot/rollback", b'{"to": 18446744073709551616}', "to"),
        ("policies/acme/bot/promote", b'{"revision": -9223372036854775809}', "revision"),
        ("policies/acme/bot/retire", b'{"expected_version": 18446744073709551616}', "expected_version"),
        ("policies/acme/bot/revisions", b'{"digest": "", "provenance": {"step": 18446744073709551616}}', "step"),
        ("policies/acme/bot/training", b'{"kind": "rollout", "uri": "u", "step": 18446744073709551616}', "step"),
        ("policies/ACME/bot/retire", b"{}", "policy"),
        ("bases", b'{"name": "x", "path": "p", "fingerprint": "short", "config": "e30="}', "fingerprint"),
        ("bases", b'{"name": "x/y", "path": "p", "fingerprint": "' + b"0" * 64 + b'", "config": "e30="}', "name"),
        ("bases", b'{"name": "x", "path": "p", "fingerprint": "' + b"0" * 64 + b'", "config": "?"}', "config"),
        ("orphans/collect", b'{"older_than_s": "now"}', "older_than_s"),
        ("keys", b'{"tenant": "A", "scopes": ["invoke"]}', "tenant"),
        ("keys", b'{"tenant": "acme", "scopes": []}', "scopes"),
    ],
)
async def test_a_bad_field_is_named(tmp_path: Path, path: str, body: bytes, field: str) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.ask("POST", f"{ADMIN}/{path}", data=body, headers=mesh.key("*"))
        assert (told.status, told.error["param"]) == (400, field)


async def test_a_number_of_over_64_bits_is_refused_by_name(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        much = 1 << 64
        policy = f"{ADMIN}/policies/acme/bot"
        arms = [{"revision": 1}, {"revision": 2}]
        for path, body, field in (
            ("channels/canary", {"target": arms, "seed": much}, "seed"),
            ("retention", {"retention": {"keep_last": much}}, "keep_last"),
        ):
            told = await mesh.ask("PUT", f"{policy}/{path}", json=body, headers=mesh.key("*"))
            assert (told.status, told.error["param"]) == (400, field)


async def test_what_nobody_expected_is_told_in_the_same_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    async with Mesh(tmp_path) as mesh:
        monkeypatch.setattr(CatalogView, "policy", broken)
        told = await mesh.ask("GET", f"{ADMIN}/policies/acme/bot", headers=mesh.key("*"))
        assert (told.status, told.error["type"]) == (500, "internal_error")


async def test_what_is_not_served_is_told_in_the_same_form(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        told = await mesh.ask("GET", "/nothing/here")
        assert (told.status, told.error["type"]) == (404, "not_found")
        told = await mesh.ask("PATCH", f"{ADMIN}/policies")
        assert (told.status, told.error["type"]) == (405, "invalid_request")


async def test_orphans_are_collected(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        content = revision_bytes(3)
        await upload(mesh, content)
        await publish(mesh, "acme/bot", revision_bytes(4))
        await asyncio.sleep(0.05)
        told = await mesh.ask("POST", f"{ADMIN}/orphans/collect", json={"older_than_s": 0.01})
        assert told.json == {"removed": 1, "bytes": len(content)}
        assert (await mesh.chat("acme/bot")).status == 200


async def test_without_a_registrar_nothing_is_published_and_everything_is_served(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.stop_registrar()
        told = await mesh.ask("POST", f"{ADMIN}/policies", json={"policy": "acme/new", "base": BASE})
        assert (told.status, told.error["type"]) == (503, "journal_unavailable")
        assert (await mesh.chat("acme/bot")).status == 200
