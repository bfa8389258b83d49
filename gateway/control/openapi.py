"""The OpenAPI 3.1 document, made of the routes themselves: what is served is what is told."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from wire.outcomes import Outcome

from .described import Description, Query, described, description_of
from .documents import ErrorDocument

routes = web.RouteTableDef()

PATH = "/roost/v1/openapi.json"
# /{name} and /{name:.+}
_PLACE_RE = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_REF = "#/components/schemas/{name}"

# the document as it is served: routes don't change
ENCODED = web.AppKey("openapi", bytes)

Json = dict[str, Any]


@routes.get(PATH)
@described(Description(Json, public=True))
async def show(request: web.Request) -> web.Response:
    """This document."""
    return web.Response(body=request.app[ENCODED], content_type="application/json")


def document(app: web.Application) -> Json:
    """The routes of ``app`` as OpenAPI 3.1. Raises LookupError for a route that nothing describes."""
    described_routes = list(_routes(app))
    kinds = list({kind for *_, about in described_routes for kind in (about.answer, about.body) if _is_struct(kind)})
    kinds.append(ErrorDocument)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Json] = {}
    for method, path, handler, about in described_routes:
        paths.setdefault(path, {})[method.lower()] = _operation(path, handler, about, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Roost", "version": "1", "summary": "Policies, and what is served beside the data routes."},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}],
    }


def _routes(app: web.Application) -> Iterator[tuple[str, str, Handler, Description]]:
    """Method, path as OpenAPI writes it, handler and description. aiohttp's own HEAD beside a GET is no other route.

    Nor is one for every method: that only says which methods there are.
    """
    for route in app.router.routes():
        resource = route.resource
        if resource is None or route.method == hdrs.METH_ANY:
            continue
        about = description_of(route.handler)
        if about is None:
            raise LookupError(f"nothing describes {route.method} {resource.canonical}")
        if route.method != "HEAD" or _is_head_alone(resource):
            yield route.method, _PLACE_RE.sub(r"{\1}", resource.canonical), route.handler, about


def _is_head_alone(resource: Iterable[web.AbstractRoute]) -> bool:
    handlers = {route.method: route.handler for route in resource}
    return handlers.get("GET") is not handlers["HEAD"]


def _operation(path: str, handler: Handler, about: Description, schemas: dict[Any, Json]) -> Json:
    operation: Json = {
        "operationId": handler.__name__,
        "summary": inspect.cleandoc(handler.__doc__ or "").partition("\n")[0],
        "parameters": [_path_parameter(name) for name in _PLACE_RE.findall(path)]
        + [_query_parameter(query) for query in about.query],
        "responses": _responses(about, schemas),
    }
    if about.scope is not None:
        operation["x-roost-scope"] = about.scope.value
        operation["x-roost-tenants"] = "all" if about.fleet else "own"
    if about.public:
        operation["security"] = []
    if about.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(about.body, schemas)}
    return operation


def _responses(about: Description, schemas: dict[Any, Json]) -> Json:
    outcomes: dict[int, list[str]] = {}
    for outcome in Outcome:
        outcomes.setdefault(outcome.http_status, []).append(outcome.value.replace("_", " "))
    done: Json = {"description": "Done."}
    if about.answer is not None:
        done["content"] = _content(about.answer, schemas)
    errors = {
        str(status): {"description": ", ".join(names), "content": _content(ErrorDocument, schemas)}
        for status, names in sorted(outcomes.items())
        if status >= 400
    }
    return {str(about.status): done} | errors


def _content(kind: Any, schemas: dict[Any, Json]) -> Json:
    if isinstance(kind, str):
        return {kind: {}}
    return {"application/json": {"schema": schemas.get(kind, {"type": "object"})}}


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameter(query: Query) -> Json:
    schema: Json = {"type": "integer", "minimum": 0} if query.numeric else {"type": "string"}
    if query.repeated:
        schema = {"type": "array", "items": schema}
    return {"name": query.name, "in": "query", "description": query.meaning, "schema": schema}


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
