"""Which object store an URL means, and how patient its client is. Credentials come from the environment alone."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from wire.outcomes import InvalidRequest

from .faults import environment_advice

Handle = S3Store | GCSStore | AzureStore | HTTPStore

STORE_SCHEMES = frozenset({"s3", "gs", "az"})
_KINDS: dict[str, type[Handle]] = {
    "s3": S3Store,
    "gs": GCSStore,
    "az": AzureStore,
    "https": HTTPStore,
    "http": HTTPStore,
}
_FIRST_BACKOFF = datetime.timedelta(milliseconds=100)
_LONGEST_BACKOFF = datetime.timedelta(seconds=5)


@dataclass(frozen=True)
class Patience:
    """Seconds: for one request, and for all its repetitions together."""

    request_s: float
    total_s: float


# for bytes: a part of an upload or a piece of a download in each request
PATIENT = Patience(request_s=30.0, total_s=60.0)
# for the first word of a read, which can't be given up midway
STEADY = Patience(request_s=3.0, total_s=8.0)
# for a question that somebody waits for
BRISK = Patience(request_s=1.5, total_s=2.0)


def check_url(url: str, field: str) -> str:
    """``url`` if it names a place in an object store and no secret. Raises InvalidRequest."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidRequest(f"{field}: expected s3://bucket/prefix, gs:// or az://", field=field) from None
    # the URL itself is not repeated: it may hold what must not be seen
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest(
            f"{field}: credentials and options have no place in the URL: they are taken from the environment",
            field=field,
        )
    if parts.scheme not in _KINDS or not parts.netloc:
        raise InvalidRequest(f"{field}: expected s3://bucket/prefix, gs:// or az://, got {url!r}", field=field)
    if any(segment in {".", ".."} for segment in parts.path.split("/")):
        raise InvalidRequest(f"{field}: {url!r} has a segment that is no name", field=field)
    return url


def connect(url: str, patience: Patience, *, endpoint: str = "", region: str = "", field: str = "store") -> Handle:
    """A client of the store at ``url``. Nothing is asked of the store yet. Raises InvalidRequest."""
    scheme = urlsplit(check_url(url, field)).scheme
    allow_http = scheme == "http" or endpoint.startswith("http://")
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": allow_http,
            "connect_timeout": _seconds(min(5.0, patience.request_s)),
            "timeout": _seconds(patience.request_s),
        },
        "retry_config": {
            "max_retries": 8,
            "retry_timeout": _seconds(patience.total_s),
            "backoff": {"init_backoff": _FIRST_BACKOFF, "max_backoff": _LONGEST_BACKOFF, "base": 2},
        },
    }
    if endpoint and scheme in STORE_SCHEMES:
        options["base_url" if scheme == "gs" else "endpoint"] = endpoint
    if region and scheme == "s3":
        options["region"] = region
    try:
        return _KINDS[scheme].from_url(url, **options)
    except (BaseError, ValueError) as error:
        advice = environment_advice(str(error)) or "the object store's client does not take it"
        raise InvalidRequest(f"{field}: {url}: {advice}", field=field) from None


def _seconds(count: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=count)
