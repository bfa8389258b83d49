"""The OpenAPI document tells every route, and what it tells is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gateway.control.app import make_control
from gateway.control.described import description_of
from gateway.control.documents import ErrorDocument
from gateway.control.openapi import PATH, document
from wire.outcomes import Outcome

from .mesh import Mesh


@pytest.fixture(scope="module")
def app() -> web.Application:
    return make_control(None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def told(app: web.Application) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(document(app)))  # type: ignore[no-any-return]


def operations(told: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, about) for path, methods in told["paths"].items() for method, about in methods.items()]


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(references(value) for value in node))
    return set()


def test_every_route_is_told_and_no_other(app: web.Application, told: dict[str, Any]) -> None:
    served = {
        (route.method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None
    }
    listed = {(method.upper(), path) for method, path, _ in operations(told)}
    assert listed <= served
    # aiohttp answers HEAD wherever it answers GET
    assert {(method, path) for method, path in served - listed if ("GET", path) not in listed} == set()


def test_a_route_that_nothing_describes_is_refused() -> None:
    app = web.Application()

    async def handler(request: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/new", handler)
    with pytest.raises(LookupError, match="nothing describes"):
        document(app)


def test_what_it_refers_to_is_in_it(told: dict[str, Any]) -> None:
    assert told["openapi"].startswith("3.1.")
    schemas = {f"#/components/schemas/{name}" for name in told["components"]["schemas"]}
    assert references(told) <= schemas
    assert len({about["operationId"] for *_, about in operations(told)}) == len(operations(told))


def test_each_operation_says_what_it_takes_and_answers(told: dict[str, Any]) -> None:
    errors = {str(outcome.http_status) for outcome in Outcome if outcome is not Outcome.OK}
    for method, path, about in operations(told):
        assert about["summary"], path
        places = {parameter["name"] for parameter in about["parameters"] if parameter["in"] == "path"}
        assert places == set(re.findall(r"\{(\w+)\}", path)), path
        assert errors < set(about["responses"])
        if method in ("post", "put"):
            assert "requestBody" in about, path
    split = told["components"]["schemas"]["Target"]
    assert set(split["properties"]) == {"target", "seed", "expected_version"}
    assert split["required"] == ["target"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "policies", None),
        ("GET", "policies/acme/bot", None),
        ("GET", "policies/acme/bot/where", None),
        ("GET", "policies/acme/bot/history", None),
        ("GET", "policies/acme/bot/training", None),
        ("GET", "bases", None),
        ("GET", "bases/tiny", None),
        ("GET", "keys", None),
        ("GET", "nodes", None),
        ("GET", "nodes/n0", None),
        ("POST", "nodes/n0/cordon", {}),
        ("POST", "nodes/n0/uncordon", {}),
        ("POST", "nodes/n0/drain", {"wait_s": 1}),
        ("POST", "keys", {"tenant": "acme", "scopes": ["invoke"]}),
        ("POST", "policies/acme/bot/retire", {}),
        ("POST", "artifacts/collect", {}),
        ("POST", "orphans/collect", {}),
    ],
)
async def test_answers_are_what_is_told(
    tmp_path: Path, app: web.Application, method: str, path: str, body: dict[str, Any] | None
) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.ask(method, f"/roost/v1/{path}", json=body, headers=mesh.key("*"))
        match = re.compile(r"\{\w+\}")
        handler = next(
            route.handler
            for route in app.router.routes()
            if route.resource is not None
            and route.method == method
            and re.fullmatch(match.sub("[^/]+", route.resource.canonical), f"/roost/v1/{path}")
        )
        about = description_of(handler)
        assert about is not None
        assert told.status == about.status, told.body
        answer = msgspec.json.decode(told.body, type=about.answer)
        assert msgspec.json.decode(msgspec.json.encode(answer)) == told.json
        refused = await mesh.ask("GET", "/roost/v1/policies/acme/none")
        msgspec.json.decode(refused.body, type=ErrorDocument)


async def test_it_is_served_to_everyone_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Mesh(tmp_path, anonymous=False) as mesh:
        told = await mesh.ask("GET", PATH)
        assert (told.status, told.json["openapi"]) == (200, "3.1.0")
        with monkeypatch.context() as patch:
            patch.setattr("gateway.control.openapi.document", lambda app: {})
            assert (await mesh.ask("GET", PATH)).body == told.body
