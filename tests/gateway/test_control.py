"""The control plane: who may do what, and what it answers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from catalog.view import CatalogView
from gateway.app import Gateway
from gateway.settings import GatewaySettings
from wire.events import Scope
from wire.node import Health
from wire.outcomes import InvalidRequest, JournalUnavailable

from .admin import ADMIN, DIGEST
from .fleet_states import BASE, FINGERPRINT
from .mesh import CONFIG, Mesh, until


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


async def test_without_a_registrar_nothing_is_published_and_everything_is_served(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.stop_registrar()
        told = await mesh.ask("POST", f"{ADMIN}/policies", json={"policy": "acme/new", "base": BASE})
        assert (told.status, told.error["type"]) == (503, "journal_unavailable")
        assert (await mesh.chat("acme/bot")).status == 200
