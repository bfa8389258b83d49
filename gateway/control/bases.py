"""Base models: registered by whoever runs the fleet, seen by everyone with a key."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from catalog.names import check_base
from catalog.records import BaseRecord
from gateway.auth import ALL_TENANTS, Caller
from wire.events import Scope
from wire.outcomes import NotFound
from wire.registrar import AddBase

from .described import Description, described
from .documents import BaseDocument, BaseList, BaseWithConfig, CommittedDocument
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
@described(Description(BaseList))
async def list_bases(request: web.Request) -> web.Response:
    """List the bases."""
    asker = caller(request)
    shared = services(request)
    bases = await shared.scans.run(shared.view.bases)
    return answer(BaseList([BaseDocument.of(_shown_to(asker, base)) for base in bases]))


@routes.get("/roost/v1/bases/{name}")
@described(Description(BaseWithConfig))
async def show_base(request: web.Request) -> web.Response:
    """Show a base with its config.json, which is what an adapter is packed against."""
    asker = caller(request)
    name = check_base(request.match_info["name"], "name")
    base = services(request).view.base(name)
    if base is None:
        raise NotFound(f"there is no base {name}", field="base")
    return answer(BaseWithConfig.of(_shown_to(asker, base)))


@routes.post("/roost/v1/bases")
@described(Description(CommittedDocument, body=NewBase, scope=Scope.ADMIN, fleet=True))
async def add_base(request: web.Request) -> web.Response:
    """Register a base, or tell where its files moved."""
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


def _shown_to(asker: Caller, base: BaseRecord) -> BaseRecord:
    """Where a base lies on the hosts is for those who run them: others get an empty path."""
    return base if asker.operates else msgspec.structs.replace(base, path="")
