"""API keys: how a secret is made, named and recognised. Only its hash is ever stored."""

from __future__ import annotations

import hashlib
import secrets

SECRET_PREFIX = "tml-"  # noqa: S105 - public: what tells a key of ours from others
_SECRET_BYTES = 32
_ID_CHARACTERS = 12


def make_secret() -> str:
    """A new secret: ``tml-`` and 43 URL-safe characters (256 random bits). Shown once, to whoever asked for the key."""
    return SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hash_secret(secret: str) -> str:
    """sha256 (hex) of the secret: what the catalog stores and finds a key by.

    A plain hash is enough for 256 random bits: there is nothing to guess, so nothing to slow down.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def key_id(secret: str) -> str:
    """The short public name of a key, the start of its hash: stands in lists, in histories and in logs."""
    return hash_secret(secret)[:_ID_CHARACTERS]
