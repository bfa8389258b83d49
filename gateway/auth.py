"""Who asks: an API key becomes a caller with a tenant and scopes."""

from __future__ import annotations

from typing import Protocol

import msgspec

from catalog.inputs import ALL_TENANTS as ALL_TENANTS
from catalog.keys import SECRET_PREFIX, hash_secret
from wire.events import Scope
from wire.hosts import is_loopback
from wire.outcomes import Forbidden, InvalidRequest, Unauthenticated

_SECRET_PREFIX = SECRET_PREFIX.encode()
_MAX_KEY_LENGTH = 256


class KeyFacts(Protocol):
    """What is needed of a key's record."""

    @property
    def key_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def scopes(self) -> tuple[Scope, ...]: ...
    @property
    def revoked(self) -> bool: ...


class KeyLookup(Protocol):
    """Where keys are looked up by the hash of their secret."""

    def key(self, key_hash: str) -> KeyFacts | None: ...


class Caller(msgspec.Struct, frozen=True):
    """Who a request comes from. ``tenant`` ``*`` reaches all tenants; the scope ``admin`` includes the others."""

    key_id: str
    tenant: str
    scopes: frozenset[Scope]

    @property
    def operates(self) -> bool:
        """Whether this caller runs the fleet, and may see what is no tenant's: hosts, paths, logs."""
        return self.tenant == ALL_TENANTS and Scope.ADMIN in self.scopes

    def reaches(self, tenant: str) -> bool:
        """Whether ``tenant``'s policies are this caller's to name."""
        return self.tenant in (tenant, ALL_TENANTS)

    def require(self, scope: Scope, tenant: str = "") -> None:
        """Raise Forbidden unless the caller has ``scope`` and, where a tenant is given, reaches it.

        It is asked before anything is looked up, so that the answer doesn't tell whether a policy exists.
        """
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            raise Forbidden(f"this key lacks the scope {scope.value}")
        if tenant:
            self.require_tenant(tenant)

    def require_key(self) -> None:
        """Raise Forbidden for a caller without a key: what it may do must end with anonymous access."""
        if self is ANONYMOUS:
            raise Forbidden("this needs an API key: anonymous requests may not do it")

    def require_tenant(self, tenant: str) -> None:
        """Raise Forbidden unless the caller reaches ``tenant``, whatever its scopes."""
        if not self.reaches(tenant):
            raise Forbidden(f"this key belongs to tenant {self.tenant} and does not reach {tenant}")


ANONYMOUS = Caller("anonymous", ALL_TENANTS, frozenset(Scope))


def presented_key(authorization: bytes | None, api_key: bytes | None) -> bytes | None:
    """The secret of ``Authorization: Bearer`` or ``X-API-Key``, or None. Raises Unauthenticated on another scheme."""
    if authorization is not None:
        scheme, _, secret = authorization.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthenticated("expected Authorization: Bearer KEY, or X-API-Key", field="authorization")
        return secret.strip()
    return api_key.strip() if api_key is not None else None


class Authenticator:
    """Keys are looked up at each request, so that a revocation holds from the next one on."""

    def __init__(self, *, anonymous: bool) -> None:
        self._anonymous = anonymous

    def caller(
        self,
        keys: KeyLookup,
        authorization: bytes | None,
        api_key: bytes | None,
        host: bytes | None,
        origin: bytes | None,
    ) -> Caller:
        """Who presents these headers. Raises Unauthenticated.

        Where anonymous requests are let in, a secret that can't be a key of ours counts as none, because OpenAI's
        clients insist on sending one.
        """
        secret = presented_key(authorization, api_key)
        if self._anonymous and (not secret or not secret.startswith(_SECRET_PREFIX)):
            _refuse_foreign_pages(host, origin)
            return ANONYMOUS
        if not secret:
            raise Unauthenticated("no API key: send Authorization: Bearer KEY, or X-API-Key", field="authorization")
        # our secrets are ASCII: any other byte makes it a text that is none of them
        text = secret.decode("latin-1")
        record = keys.key(hash_secret(text)) if len(text) <= _MAX_KEY_LENGTH else None
        if record is None or record.revoked:
            raise Unauthenticated("unknown or revoked API key", field="authorization")
        return Caller(record.key_id, record.tenant, frozenset(record.scopes))


def _refuse_foreign_pages(host: bytes | None, origin: bytes | None) -> None:
    # a page of any site can post to the loopback address, or rebind its own name to it
    if host is not None and not is_loopback(_host_part(host)):
        raise Unauthenticated("requests without a key must be sent to the loopback address", field="host")
    if origin is not None and not is_loopback(_host_part(origin.partition(b"://")[2])):
        raise Unauthenticated("requests without a key may not come from another site's page", field="origin")


def _host_part(authority: bytes) -> str:
    text = authority.decode("latin-1")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def check_exposure(host: str, *, anonymous: bool) -> None:
    """Raise InvalidRequest where a gateway would let anybody in from outside of this machine."""
    if anonymous and not is_loopback(host):
        raise InvalidRequest(
            f"anonymous access is for a loopback address only, not for {host}: listen on 127.0.0.1 or use keys",
            field="anonymous",
        )
