"""What a policy, a revision, a channel and a base may be called. Anything else is refused, never normalised."""

from __future__ import annotations

import re

import msgspec

from wire.outcomes import InvalidRequest

_PART = r"[a-z0-9][a-z0-9._-]{0,62}"
_PART_RE = re.compile(_PART, re.ASCII)
_POLICY_RE = re.compile(f"{_PART}/{_PART}", re.ASCII)
_BASE_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", re.ASCII)
_REFERENCE_RE = re.compile(rf"({_PART}/{_PART})(?:@([1-9][0-9]{{0,9}})|:({_PART}))?", re.ASCII)
# the longest reference there can be: two parts, the slash, and a channel
MAX_REFERENCE_LENGTH = 63 + 1 + 63 + 1 + 63

STABLE = "stable"
LATEST = "latest"


class Reference(msgspec.Struct, frozen=True):
    """A parsed ``tenant/name``, ``tenant/name@7`` or ``tenant/name:channel``. ``revision`` 0 means: by channel."""

    policy: str
    revision: int = 0
    channel: str = STABLE

    @property
    def tenant(self) -> str:
        return self.policy.partition("/")[0]


def shown(text: str) -> str:
    """``text`` as it may stand in an error message: printable ASCII, shortened."""
    clean = ascii(text[:80])
    return clean if len(text) <= 80 else f"{clean}... ({len(text)} characters)"


def parse_reference(text: str) -> Reference:
    """Parse what a request names. Raises InvalidRequest that says what is wrong with it."""
    match = _REFERENCE_RE.fullmatch(text) if len(text) <= MAX_REFERENCE_LENGTH else None
    if match is None:
        raise InvalidRequest(
            f"{shown(text)} names no policy: expected tenant/name, tenant/name@REVISION or tenant/name:CHANNEL, "
            f"each part matching {_PART}",
            field="model",
        )
    policy, revision, channel = match.groups()
    return Reference(policy, int(revision or 0), channel or STABLE)


def check_policy(text: str, field: str = "policy") -> str:
    """``text`` if it is a bare ``tenant/name``. Raises InvalidRequest."""
    if _POLICY_RE.fullmatch(text) is None:
        raise InvalidRequest(
            f"{shown(text)} is not a policy name: expected tenant/name, each part {_PART}", field=field
        )
    return text


def check_part(text: str, field: str) -> str:
    """``text`` if it may stand as a tenant, a policy's name or a channel. Raises InvalidRequest."""
    if _PART_RE.fullmatch(text) is None:
        raise InvalidRequest(f"{field} {shown(text)} does not match {_PART}", field=field)
    return text


def check_base(text: str, field: str = "base") -> str:
    """``text`` if it may name a base model (no slash). Raises InvalidRequest."""
    if _BASE_RE.fullmatch(text) is None:
        raise InvalidRequest(f"{field} {shown(text)} does not match {_BASE_RE.pattern}", field=field)
    return text


def adapter_name(tenant: str, digest: str) -> str:
    """What an engine calls a revision: tenant and content, so that no cache of it mixes tenants or revisions."""
    return f"{tenant}@{digest}"


def split_adapter_name(name: str) -> tuple[str, str] | None:
    """(tenant, digest) of a name made by ``adapter_name``; None for a name that is not ours."""
    tenant, at, digest = name.partition("@")
    if not at or _PART_RE.fullmatch(tenant) is None or re.fullmatch(r"[0-9a-f]{64}", digest) is None:
        return None
    return tenant, digest
