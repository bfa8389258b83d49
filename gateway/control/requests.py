"""What handlers have in common: who asks, what the body says, how an answer is written."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from catalog.checks import WriteCommand
from catalog.inputs import check_command_id
from catalog.names import check_policy
from catalog.records import PolicyRecord
from gateway.auth import Caller
from wire.events import Scope
from wire.outcomes import InvalidRequest, NotFound, TooLarge

from .described import Query
from .documents import CommittedDocument
from .services import services

T = TypeVar("T")

POLICY = "/roost/v1/policies/{tenant}/{name}"
EXPECTED_VERSION = Query("expected_version", "Act only if the policy has this version.", numeric=True)
MAX_BODY_BYTES = 8 << 20
MAX_PAGE = 1000
DEFAULT_PAGE = 100

_FIELD_RE = re.compile(r"field `([^`]*)`|at `\$\.([^`\[.]*)")


class Page(msgspec.Struct, frozen=True):
    """Which part of a list is asked for: at most ``limit`` items after the one called ``after``."""

    after: str
    limit: int


def caller(request: web.Request) -> Caller:
    """Who asks. Raises Unauthenticated."""
    headers = request.headers
    shared = services(request)

    def field(name: str) -> bytes | None:
        value = headers.get(name)
        return None if value is None else value.encode("utf-8", "surrogateescape")

    return shared.authenticator.caller(
        shared.view, field("Authorization"), field("X-API-Key"), field("Host"), field("Origin")
    )


def require(request: web.Request, scope: Scope, tenant: str = "") -> Caller:
    """Who asks, if it may. Raises Unauthenticated and Forbidden."""
    asker = caller(request)
    asker.require(scope, tenant)
    return asker


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The JSON body as ``kind``; no body is an empty object. Raises InvalidRequest that names the field."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"the body is above {MAX_BODY_BYTES} bytes", field="body")
    try:
        return msgspec.json.decode(bytes(body) or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), field=_field_of(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field="body") from None


def _field_of(message: str) -> str:
    match = _FIELD_RE.search(message)
    return (match.group(1) or match.group(2)) if match else "body"


def whole_number(request: web.Request, name: str, default: int, *, least: int = 0, most: int = 1 << 53) -> int:
    """A number of the query. Raises InvalidRequest."""
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 16 or not least <= int(text) <= most:
        raise InvalidRequest(f"{name} must be a whole number from {least} to {most}", field=name)
    return int(text)


def page(request: web.Request) -> Page:
    """``after`` and ``limit`` of the query. Raises InvalidRequest."""
    limit = whole_number(request, "limit", DEFAULT_PAGE, least=1, most=MAX_PAGE)
    return Page(request.query.get("after", ""), limit)


def answer(document: Any, status: int = 200) -> web.Response:
    """``document`` as JSON."""
    return web.Response(body=msgspec.json.encode(document), status=status, content_type="application/json")


async def commit(request: web.Request, command: WriteCommand) -> web.Response:
    """Have the registrar run ``command``, and tell what it committed. Raises what it refuses with."""
    return answer(await committed(request, command))


async def committed(request: web.Request, command: WriteCommand) -> CommittedDocument:
    """What the registrar committed for ``command``. Raises what it refuses with.

    Under an ``Idempotency-Key``, which is the asker's own, a request that is sent again, to whatever gateway, has its
    effect once: where the journal lies in PostgreSQL. Raises InvalidRequest for a key that is no word.
    """
    if key := request.headers.get("Idempotency-Key"):
        command_id = f"{command.actor or 'anonymous'}.{key}"
        # here already: what is no text has no place in a message to the registrar
        check_command_id(command_id)
        command = msgspec.structs.replace(command, command_id=command_id)
    return CommittedDocument.told(await services(request).registrar.run(command))


def policy_name(request: web.Request) -> str:
    """The policy that the path names. Raises InvalidRequest."""
    return check_policy(f"{request.match_info['tenant']}/{request.match_info['name']}")


def publisher_of(request: web.Request) -> tuple[str, Caller]:
    """The policy that the path names, and who wants to change it. Raises Unauthenticated and Forbidden."""
    policy = policy_name(request)
    return policy, require(request, Scope.PUBLISH, request.match_info["tenant"])


def own_policy(request: web.Request) -> PolicyRecord:
    """The policy that the path names, by its present or a former name, for any key of its tenant.

    Raises Unauthenticated, Forbidden and NotFound.
    """
    name = policy_name(request)
    caller(request).require_tenant(request.match_info["tenant"])
    record = services(request).view.policy(name)
    if record is None:
        raise NotFound(f"there is no policy {name}", field="policy")
    return record


def expected_version(request: web.Request) -> int | None:
    """What the query demands of the policy's version, for methods without a body. Raises InvalidRequest."""
    expected = whole_number(request, "expected_version", -1)
    return expected if expected >= 0 else None
