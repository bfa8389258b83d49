"""The address of the journal's database, as a person writes it."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from wire.outcomes import InvalidRequest

SCHEMES = ("postgresql", "postgres")
# of the database, and of the key that a client's certificate goes with
_PASSWORDS = frozenset({"password", "sslpassword"})


def check_address(url: str, field: str) -> None:
    """Raises InvalidRequest for what is no address of PostgreSQL, and for one with a password, which many may read."""
    try:
        parts = urlsplit(url)
        password = parts.password or not _PASSWORDS.isdisjoint(parse_qs(parts.query, keep_blank_values=True))
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from None
    if parts.scheme not in SCHEMES:
        raise InvalidRequest(f"{field}: expected postgresql://user@host:port/database", field=field)
    if password:
        raise InvalidRequest(
            f"{field}: leave the password out, and give it in PGPASSWORD, in PGPASSFILE or in ~/.pgpass",
            field=field,
        )


def shown(url: str) -> str:
    """The address without what follows the database."""
    return url.partition("?")[0]
