"""An adapter from an object store, or from any web server with a folder-like address."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import obstore

from catalog.objects.faults import told
from catalog.objects.location import PATIENT, Handle, check_url, connect
from wire.hosts import is_loopback
from wire.outcomes import InvalidRequest, NotFound, TooLarge

from .source import FILES, Bars

_CHUNK_BYTES = 4 << 20
# where the environment says that a store has an address of its own
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def fetch_from_url(url: str, folder: Path, bars: Bars) -> str:
    """Fetch the adapter at ``url`` into ``folder``; where it came from. Credentials are the environment's.

    Raises InvalidRequest, NotFound where a file is missing, TooLarge, ArtifactUnavailable, StorageFull.
    """
    # first, for nothing of an URL that holds a secret may be shown
    parts = urlsplit(check_url(url, "source"))
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise InvalidRequest(f"{url}: over plain http anybody could change it on the way: use https", field="source")
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    store = connect(url, PATIENT, endpoint=endpoint if parts.scheme == "s3" else "", field="source")
    for name, most in FILES.items():
        with bars(f"Fetching {name}") as progress:
            _fetch(store, url, name, folder / name, most, progress)
    return url.rstrip("/")


def _fetch(store: Handle, url: str, name: str, file: Path, most: int, progress: Callable[[int, int], None]) -> None:
    with told(f"fetch {name} from {url}"):
        try:
            found = obstore.get(store, name)
        except FileNotFoundError:
            raise NotFound(f"there is no {name} at {url}", field="source") from None
        size = found.meta["size"]
        if size > most:
            raise TooLarge(f"{name} at {url} has {size} bytes; at most {most}", field="source")
        done = 0
        with file.open("xb") as out:
            for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
                done += len(chunk)
                if done > size:
                    raise TooLarge(f"{name} at {url} is larger than it was said to be", field="source")
                out.write(chunk)
                progress(done, size)
