from __future__ import annotations

import hashlib
import re

import pytest

from catalog.keys import hash_secret, key_id, make_secret
from tests.catalog.harness import Catalog
from wire.events import Scope
from wire.outcomes import InvalidRequest, NotFound, VersionConflict
from wire.registrar import CreateKey, RevokeKey


def create(secret: str, *, tenant: str = "acme", scopes: tuple[Scope, ...] = (Scope.INVOKE,)) -> CreateKey:
    return CreateKey(key_id=key_id(secret), key_hash=hash_secret(secret), tenant=tenant, scopes=scopes, label="ci")


def test_a_secret_is_long_random_and_url_safe() -> None:
    secrets = {make_secret() for _ in range(100)}
    assert len(secrets) == 100
    for secret in secrets:
        assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", secret)


def test_what_is_stored_tells_nothing_of_the_secret() -> None:
    secret = make_secret()
    assert hash_secret(secret) == hashlib.sha256(secret.encode()).hexdigest()
    assert len(key_id(secret)) == 12
    assert key_id(secret) not in secret


def test_a_key_is_found_by_its_secret_until_after_it_is_revoked(catalog: Catalog) -> None:
    secret = make_secret()
    catalog.run(create(secret, scopes=(Scope.INVOKE, Scope.PUBLISH)))
    record = catalog.view.key(hash_secret(secret))
    assert record is not None
    assert (record.tenant, record.scopes, record.label) == ("acme", (Scope.INVOKE, Scope.PUBLISH), "ci")
    assert not record.revoked
    assert catalog.view.key(hash_secret(make_secret())) is None

    assert catalog.run(RevokeKey(key_id=key_id(secret))).changed
    revoked = catalog.view.key(hash_secret(secret))
    assert revoked is not None
    assert revoked.revoked
    assert not catalog.run(RevokeKey(key_id=key_id(secret))).changed


def test_keys_are_listed_by_tenant(catalog: Catalog) -> None:
    ours, theirs = make_secret(), make_secret()
    catalog.run(create(ours))
    catalog.run(create(theirs, tenant="zeta"))
    assert [record.key_id for record in catalog.view.keys("acme").keys] == [key_id(ours)]
    assert {record.key_id for record in catalog.view.keys().keys} == {key_id(ours), key_id(theirs)}


def test_keys_come_in_pages(catalog: Catalog) -> None:
    secrets = [make_secret() for _ in range(5)]
    for number, secret in enumerate(secrets):
        catalog.run(create(secret, tenant="zeta" if number % 2 else "acme"))
    told: list[str] = []
    after = ""
    while True:
        page = catalog.view.keys("acme", after=after, limit=2)
        told += [record.key_id for record in page.keys]
        after = page.after
        if not after:
            break
    assert told == sorted(key_id(secret) for secret in secrets[::2])


def test_creating_a_key_twice_is_one_key_and_never_another_key(catalog: Catalog) -> None:
    secret = make_secret()
    assert catalog.run(create(secret)).changed
    assert not catalog.run(create(secret)).changed
    with pytest.raises(VersionConflict):
        catalog.run(create(secret, tenant="zeta"))
    catalog.run(RevokeKey(key_id=key_id(secret)))
    with pytest.raises(VersionConflict):
        catalog.run(create(secret))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"key_id": "../x"}, "key_id"),
        ({"key_id": ""}, "key_id"),
        ({"key_hash": "abc"}, "key_hash"),
        ({"tenant": "Acme"}, "tenant"),
        ({"tenant": "a/b"}, "tenant"),
        ({"scopes": ()}, "scopes"),
        ({"scopes": (Scope.INVOKE, Scope.INVOKE)}, "scopes"),
        ({"label": "x" * 2000}, "label"),
        ({"label": "a\nb"}, "label"),
    ],
)
def test_refuses_a_key_that_is_none(catalog: Catalog, changes: dict[str, object], field: str) -> None:
    valid: dict[str, object] = {"key_id": "k1", "key_hash": "0" * 64, "tenant": "*", "scopes": (Scope.ADMIN,)}
    with pytest.raises(InvalidRequest) as caught:
        catalog.run(CreateKey(**{**valid, **changes}))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert catalog.view.keys().keys == []


def test_an_unknown_key_cannot_be_revoked(catalog: Catalog) -> None:
    with pytest.raises(NotFound):
        catalog.run(RevokeKey(key_id="x" * 600))
