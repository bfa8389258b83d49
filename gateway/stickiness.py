"""What a request is dealt to the arms of a split by: its session, its user, or else itself."""

from __future__ import annotations

import msgspec

from .http import Headers

SESSION_HEADER = b"x-roost-session"
# OpenAI's names for who asks, the present one before the former; a cache key comes last, for it may be of many users
USER_FIELDS = ("safety_identifier", "user", "prompt_cache_key")


def selector(headers: Headers, fields: dict[str, msgspec.Raw], request_id: bytes) -> bytes:
    """The session that the client names, else the user, else the request's own id, which makes each request a draw.

    A field that holds no text counts as absent here; whether it may be so is the engine's to say. Text is taken as it
    was written: the same client writes it the same way.
    """
    session = headers.get(SESSION_HEADER)
    if session:
        return session
    for name in USER_FIELDS:
        raw = fields.get(name)
        text = b"" if raw is None else bytes(raw)
        if text.startswith(b'"') and len(text) > 2:
            return text[1:-1]
    return request_id
