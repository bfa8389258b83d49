"""API keys: an admin makes, lists and revokes those of the tenants it reaches. A secret is told once."""

from __future__ import annotations

import msgspec
from aiohttp import web

from catalog.keys import hash_secret, key_id, make_secret
from catalog.names import check_part
from gateway.auth import ALL_TENANTS
from wire.events import Scope
from wire.outcomes import InvalidRequest, NotFound
from wire.registrar import CreateKey, RevokeKey

from .described import AFTER, LIMIT, Description, Query, described
from .documents import CommittedDocument, KeyDocument, KeyPage, NewKeyDocument
from .requests import answer, commit, page, read_body, require
from .services import services

routes = web.RouteTableDef()


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str
    scopes: tuple[Scope, ...]
    label: str = ""


@routes.post("/roost/v1/keys")
@described(Description(NewKeyDocument, body=NewKey, scope=Scope.ADMIN, status=201))
async def create_key(request: web.Request) -> web.Response:
    """Make a key, whose secret is shown this once."""
    asker = require(request, Scope.ADMIN)
    asker.require_key()
    new = await read_body(request, NewKey)
    if new.tenant != ALL_TENANTS:
        check_part(new.tenant, "tenant")
    if not new.scopes:
        raise InvalidRequest("a key without scopes could do nothing", field="scopes")
    asker.require(Scope.ADMIN, new.tenant)
    secret = make_secret()
    command = CreateKey(
        actor=asker.key_id,
        key_id=key_id(secret),
        key_hash=hash_secret(secret),
        tenant=new.tenant,
        scopes=new.scopes,
        label=new.label,
    )
    await services(request).registrar.run(command)
    return answer(NewKeyDocument(command.key_id, secret, new.tenant, new.scopes, new.label), status=201)


@routes.get("/roost/v1/keys")
@described(Description(KeyPage, scope=Scope.ADMIN, query=(Query("tenant", "Only those of this tenant."), AFTER, LIMIT)))
async def list_keys(request: web.Request) -> web.Response:
    """List keys, without their secrets, a page at a time."""
    asker = require(request, Scope.ADMIN)
    tenant = request.query.get("tenant", "")
    if tenant:
        asker.require(Scope.ADMIN, tenant)
    elif asker.tenant != ALL_TENANTS:
        tenant = asker.tenant
    asked = page(request)
    shared = services(request)
    found = await shared.scans.run(shared.view.keys, tenant, after=asked.after, limit=asked.limit)
    return answer(KeyPage([KeyDocument.of(record) for record in found.keys], bool(found.after), found.after))


@routes.delete("/roost/v1/keys/{id}")
@described(Description(CommittedDocument, scope=Scope.ADMIN))
async def revoke_key(request: web.Request) -> web.Response:
    """Revoke a key, from the next request on."""
    asker = require(request, Scope.ADMIN)
    wanted = request.match_info["id"]
    # a key that the asker doesn't reach is not told from one that isn't there
    record = services(request).view.key_by_id(wanted)
    if record is None or not asker.reaches(record.tenant):
        raise NotFound(f"there is no key {wanted[:64]}", field="id")
    return await commit(request, RevokeKey(actor=asker.key_id, key_id=wanted))
