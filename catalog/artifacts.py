"""The artifact store, whatever keeps the bytes: a folder by default, or an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import unquote, urlsplit

import msgspec

from wire.outcomes import InvalidRequest

from .blobs import BlobStore, Orphans, Stored, Swept

FILE = "file"


class StoreLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where artifacts lie: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix`` or
    ``file:///folder``; an empty ``url`` means the deployment's own folder.

    ``endpoint`` is for stores that speak S3 (or another's language) at an address of their own. Credentials are never
    part of this: the environment holds them.
    """

    url: str = ""
    endpoint: str = ""
    region: str = ""

    @property
    def remote(self) -> bool:
        """Whether the bytes lie in an object store, and not in a folder."""
        return bool(self.url) and not self.url.startswith(f"{FILE}:")


OWN_FOLDER = StoreLocation()


class ArtifactWriter(Protocol):
    """One upload. Nothing of it can be named unless ``commit`` returned."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Raises StorageFull, ArtifactUnavailable."""

    def commit(self, expected_digest: str | None = None) -> Stored:
        """Make the bytes an artifact. Raises ArtifactUnavailable, with the field ``digest`` where they are not of the
        expected (or announced) digest; InvalidRequest; StorageFull."""

    def abort(self) -> None:
        """Drop what was written, if it was not committed. May be called again."""


class ArtifactSource(Protocol):
    """An artifact that is there."""

    @property
    def size(self) -> int:
        """In bytes."""

    def fill(self, view: memoryview, given_up: Callable[[], bool]) -> str | None:
        """Fill ``view`` (``size`` bytes); the digest of what is in it then, or None if ``given_up`` said so.

        However it ends, nothing is written to ``view`` afterwards. Raises ArtifactUnavailable.
        """


class ArtifactStore(Protocol):
    """Immutable artifacts by digest. Every call may block for a disk or a network: not for event loops."""

    def writer(self, announced: str | None = None) -> ArtifactWriter:
        """A new upload, a context manager; ``announced`` is its digest, where that is known already."""

    def size(self, digest: str) -> int | None:
        """Bytes of a complete artifact; None where it is not in the store."""

    def open(self, digest: str) -> AbstractContextManager[ArtifactSource]:
        """An artifact to be read into memory. Raises ArtifactUnavailable."""

    def as_file(self, digest: str) -> AbstractContextManager[Path]:
        """An artifact as a file that can be mapped, not to be written. Raises ArtifactUnavailable, StorageFull."""

    def verify(self, digest: str) -> None:
        """Read all of it. Raises ArtifactUnavailable where it is missing, unreadable or not of its digest."""


class RegistrarStore(Protocol):
    """What the ledger needs of the store, on its own thread: answers within moments.

    ``look``, where there is one, is called with the digest before a command that names it: on any thread, for the time
    that a network takes.
    """

    @property
    def look(self) -> Callable[[str], object] | None: ...

    def size(self, digest: str) -> int | None:
        """Bytes of a complete artifact; None where it is not in the store. Raises ArtifactUnavailable."""

    def removing(self, digest: str) -> bool:
        """Whether a sweep is removing it at this moment: no event may name it."""

    def missed(self) -> frozenset[str]:
        """What ``size`` could not tell because nobody had looked for it."""

    def forget(self, digests: Iterable[str]) -> None:
        """Believe nothing that was seen of them before this moment: another's sweep has removed them."""

    def sweep_by_folder(self, orphans: Orphans, older_than_s: float) -> Iterator[Swept]:
        """Remove ``orphans`` and what nobody writes, past an age in seconds, in short steps."""


def open_store(folder: Path, location: StoreLocation = OWN_FOLDER) -> ArtifactStore:
    """The store at ``location``; in ``folder`` where that names none. Raises InvalidRequest, StorageFull and
    ArtifactUnavailable for a folder that can't be made."""
    if location.remote:
        # the client of object stores is loaded where one is used
        from .objects.store import ObjectStore

        return ObjectStore(location.url, endpoint=location.endpoint, region=location.region)
    return BlobStore(_folder(location.url) if location.url else folder)


def registrar_store(folder: Path, location: StoreLocation = OWN_FOLDER, *, shared: bool = False) -> RegistrarStore:
    """The same store as the registrar's ledger needs it; ``shared`` where several of them write one journal.

    Raises what ``open_store`` does.
    """
    if location.remote:
        from .objects.presence import Presence
        from .objects.store import ObjectStore

        store = ObjectStore(location.url, endpoint=location.endpoint, region=location.region)
        return Presence(store, shared=shared)
    return BlobStore(_folder(location.url) if location.url else folder)


def check_location(location: StoreLocation, field: str = "store") -> StoreLocation:
    """``location`` if it can be one. Nothing is asked of a store. Raises InvalidRequest that names ``field``."""
    if not location.url:
        if location.endpoint or location.region:
            raise InvalidRequest(f"{field}: an endpoint and a region are for object stores: name one", field=field)
    elif location.remote:
        from .objects.location import STORE_SCHEMES, check_url

        if urlsplit(check_url(location.url, field)).scheme not in STORE_SCHEMES:
            raise InvalidRequest(f"{field}: expected s3://, gs://, az:// or file://, got {location.url!r}", field=field)
    else:
        _folder(location.url)
    if location.endpoint and not location.endpoint.startswith(("http://", "https://")):
        raise InvalidRequest(f"{field}_endpoint: expected https://host:port, got {location.endpoint!r}", field=field)
    return location


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute():
        raise InvalidRequest(f"store: expected file:///folder, got {url!r}", field="store")
    return path
