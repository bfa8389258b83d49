from __future__ import annotations

import hashlib

import pytest

from catalog.records import KeyRecord
from gateway.auth import ANONYMOUS, Authenticator, Caller, check_exposure
from wire.events import Scope
from wire.outcomes import Forbidden, InvalidRequest, Unauthenticated

SECRET = "tml-abc"


class Keys:
    """One key of tenant acme."""

    def __init__(self, *, revoked: bool = False, scopes: tuple[Scope, ...] = (Scope.INVOKE,)) -> None:
        self._hash = hashlib.sha256(SECRET.encode()).hexdigest()
        self._record = KeyRecord("k1", self._hash, "acme", scopes, "", revoked, 0)

    def key(self, key_hash: str) -> KeyRecord | None:
        return self._record if key_hash == self._hash else None


def ask(keys: Keys, authorization: bytes | None = None, api_key: bytes | None = None, **context: bytes) -> Caller:
    authenticator = Authenticator(anonymous=False)
    return authenticator.caller(keys, authorization, api_key, context.get("host"), context.get("origin"))


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [(b"Bearer tml-abc", None), (b"bearer  tml-abc ", None), (None, b"tml-abc"), (b"Bearer tml-abc", b"other")],
)
def test_a_key_is_found_in_either_header(authorization: bytes | None, api_key: bytes | None) -> None:
    caller = ask(Keys(), authorization, api_key)
    assert (caller.key_id, caller.tenant, caller.scopes) == ("k1", "acme", {Scope.INVOKE})


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [
        (None, None),
        (b"Bearer ", None),
        (b"Bearer wrong", None),
        (b"Basic dG1sLWFiYw==", None),
        (b"tml-abc", None),
        (None, b""),
        (b"Bearer \xff\xfe", None),
        (b"Bearer " + b"x" * 100_000, None),
    ],
)
def test_anything_else_is_unauthenticated(authorization: bytes | None, api_key: bytes | None) -> None:
    with pytest.raises(Unauthenticated):
        ask(Keys(), authorization, api_key)


def test_a_revoked_key_is_unauthenticated() -> None:
    with pytest.raises(Unauthenticated):
        ask(Keys(revoked=True), b"Bearer tml-abc")


def test_a_key_reaches_its_own_tenant_only() -> None:
    caller = ask(Keys(), b"Bearer tml-abc")
    caller.require(Scope.INVOKE, "acme")
    with pytest.raises(Forbidden, match="does not reach other"):
        caller.require(Scope.INVOKE, "other")


def test_a_scope_is_asked_for_by_name_and_admin_has_all() -> None:
    with pytest.raises(Forbidden, match="publish"):
        ask(Keys(), b"Bearer tml-abc").require(Scope.PUBLISH, "acme")
    admin = ask(Keys(scopes=(Scope.ADMIN,)), b"Bearer tml-abc")
    for scope in Scope:
        admin.require(scope, "acme")
    with pytest.raises(Forbidden):
        admin.require(Scope.ADMIN, "*")


def test_the_tenant_star_reaches_all() -> None:
    caller = Caller("k", "*", frozenset({Scope.INVOKE}))
    caller.require(Scope.INVOKE, "acme")
    caller.require(Scope.INVOKE, "*")


def test_anonymous_lets_in_requests_without_a_key_of_ours() -> None:
    authenticator = Authenticator(anonymous=True)
    for authorization in (None, b"Bearer unused", b"Bearer "):
        assert authenticator.caller(Keys(), authorization, None, b"127.0.0.1:8080", None) is ANONYMOUS
    assert authenticator.caller(Keys(), b"Bearer tml-abc", None, b"localhost", None).tenant == "acme"
    with pytest.raises(Unauthenticated):
        authenticator.caller(Keys(revoked=True), b"Bearer tml-abc", None, b"localhost", None)


@pytest.mark.parametrize(
    ("host", "origin"),
    [(b"rebound.example:8080", None), (b"127.0.0.1", b"https://evil.example"), (b"localhost", b"null")],
)
def test_anonymous_refuses_what_a_foreign_page_would_send(host: bytes, origin: bytes | None) -> None:
    with pytest.raises(Unauthenticated):
        Authenticator(anonymous=True).caller(Keys(), None, None, host, origin)


def test_anonymous_takes_a_page_of_this_machine() -> None:
    origin = b"http://localhost:3000"
    assert Authenticator(anonymous=True).caller(Keys(), None, None, b"[::1]:8080", origin) is ANONYMOUS


def test_what_outlives_anonymous_access_needs_a_key() -> None:
    ask(Keys(), b"Bearer tml-abc").require_key()
    with pytest.raises(Forbidden, match="API key"):
        ANONYMOUS.require_key()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_anonymous_is_refused_off_the_loopback(host: str) -> None:
    with pytest.raises(InvalidRequest, match="anonymous"):
        check_exposure(host, anonymous=True)
    check_exposure(host, anonymous=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_anonymous_is_allowed_on_the_loopback(host: str) -> None:
    check_exposure(host, anonymous=True)
