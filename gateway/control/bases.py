"""Base models: registered by whoever runs the fleet, seen by everyone with a key."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from catalog.names import check_base
from gateway.auth import ALL_TENANTS
from wire.events import Scope
from wire.outcomes import NotFound
from wire.registrar import AddBase

from .requests import answer, caller, commit, read_body, require
from .services import services

routes = web.RouteTableDef()


class NewBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``config`` is the bytes of config.json, in JSON as base64; ``path`` is where engines load the base from."""

    name: str
    path: str
    fingerprint: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    config: bytes
    group: str = ""


@routes.get("/roost/v1/bases")
async def list_bases(request: web.Request) -> web.Response:
    caller(request)
    fields = ("name", "fingerprint", "path", "group", "created_ms")
    bases = services(request).view.bases()
    return answer({"bases": [{name: getattr(base, name) for name in fields} for base in bases]})


@routes.get("/roost/v1/bases/{name}")
async def show_base(request: web.Request) -> web.Response:
    """One base with its ``config``: what a client needs to pack an adapter for it."""
    caller(request)
    name = check_base(request.match_info["name"], "name")
    record = services(request).view.base(name)
    if record is None:
        raise NotFound(f"there is no base {name}", field="name")
    return answer({field: getattr(record, field) for field in record.__struct_fields__})


@routes.post("/roost/v1/bases")
async def add_base(request: web.Request) -> web.Response:
    asker = require(request, Scope.ADMIN, ALL_TENANTS)
    new = await read_body(request, NewBase)
    command = AddBase(
        actor=asker.key_id,
        name=check_base(new.name, "name"),
        fingerprint=new.fingerprint,
        path=new.path,
        config=new.config,
        group=new.group,
    )
    return await commit(request, command)
