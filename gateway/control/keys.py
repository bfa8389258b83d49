"""API keys: an admin makes, lists and revokes those of the tenants it reaches. A secret is told once."""

from __future__ import annotations

import msgspec
from aiohttp import web

from catalog.keys import hash_secret, key_id, make_secret
from catalog.names import check_part
from gateway.auth import ALL_TENANTS
from wire.events import Scope
from wire.outcomes import InvalidRequest, NotFound
from wire.registrar import CollectOrphans, CreateKey, RevokeKey

from .requests import answer, commit, read_body, require
from .services import services

routes = web.RouteTableDef()


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: str
    scopes: tuple[Scope, ...]
    label: str = ""


class Orphans(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only what is older than this many seconds goes: younger files may be about to be named."""

    older_than_s: float = 3600.0


@routes.post("/roost/v1/keys")
async def create_key(request: web.Request) -> web.Response:
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
    shown = {"key_id": command.key_id, "secret": secret, "tenant": new.tenant, "scopes": new.scopes}
    return answer(shown | {"label": new.label}, status=201)


@routes.get("/roost/v1/keys")
async def list_keys(request: web.Request) -> web.Response:
    asker = require(request, Scope.ADMIN)
    tenant = request.query.get("tenant", "")
    if tenant:
        asker.require(Scope.ADMIN, tenant)
    fields = ("key_id", "tenant", "scopes", "label", "revoked", "created_ms")
    records = [record for record in services(request).view.keys(tenant) if asker.reaches(record.tenant)]
    return answer({"keys": [{name: getattr(record, name) for name in fields} for record in records]})


@routes.delete("/roost/v1/keys/{id}")
async def revoke_key(request: web.Request) -> web.Response:
    asker = require(request, Scope.ADMIN)
    wanted = request.match_info["id"]
    # a key that the asker doesn't reach is not told from one that isn't there
    records = services(request).view.keys("")
    if not any(record.key_id == wanted and asker.reaches(record.tenant) for record in records):
        raise NotFound(f"there is no key {wanted[:64]}", field="id")
    return await commit(request, RevokeKey(actor=asker.key_id, key_id=wanted))


@routes.post("/roost/v1/orphans/collect")
async def collect_orphans(request: web.Request) -> web.Response:
    """Remove artifacts and partial uploads that nothing names."""
    asker = require(request, Scope.ADMIN, ALL_TENANTS)
    body = await read_body(request, Orphans)
    command = CollectOrphans(actor=asker.key_id, older_than_s=body.older_than_s)
    collected = await services(request).registrar.run(command, timeout_s=600.0)
    return answer({"removed": collected.removed, "bytes": collected.bytes})
