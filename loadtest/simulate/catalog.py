"""A catalog in memory: what a gateway needs to resolve a name, and nothing durable."""

from __future__ import annotations

import hashlib

from catalog.names import Reference
from catalog.records import BaseRecord
from catalog.view import CatalogView, Resolution
from wire.outcomes import NotFound

BASE = "model"
FINGERPRINT = "f" * 64


def digest_of(policy: str, revision: int) -> str:
    """The digest that a modelled revision has."""
    return hashlib.blake2b(f"{policy}@{revision}".encode(), digest_size=32).hexdigest()


class OpenCatalog:
    """As ``gateway.catalog_source.CatalogSource``, for a view that is open already, and closed by whoever opened it."""

    def __init__(self, view: CatalogView) -> None:
        self._view = view

    def view(self) -> CatalogView:
        return self._view

    def close(self) -> None:
        """Not ours to close."""


class MemoryCatalog:
    """As ``gateway.catalog_source.CatalogSource`` and the view that it opens. Policies exist once published."""

    def __init__(self, size: int, rank: int = 1) -> None:
        self._size = size
        self._rank = rank
        self._latest: dict[str, int] = {}

    def publish(self, policy: str) -> int:
        """The policy's next revision, which ``latest`` and ``stable`` name from now on."""
        revision = self._latest[policy] = self._latest.get(policy, 0) + 1
        return revision

    def latest(self, policy: str) -> int:
        return self._latest[policy]

    def view(self) -> MemoryCatalog:
        return self

    def close(self) -> None:
        """Nothing is open."""

    def resolve(self, ref: Reference, *, selector: bytes = b"") -> Resolution:
        """Raises NotFound."""
        latest = self._latest.get(ref.policy, 0)
        revision = ref.revision or latest
        if not 0 < revision <= latest:
            raise NotFound(f"there is no policy {ref.policy}", field="model")
        digest = digest_of(ref.policy, revision)
        return Resolution(ref.policy, ref.tenant, revision, digest, self._size, self._rank, BASE, FINGERPRINT, ())

    def base(self, name: str) -> BaseRecord | None:
        return BaseRecord(name, FINGERPRINT, "", b"{}", "", 0) if name == BASE else None

    def key(self, key_hash: str) -> None:
        """Nobody has a key: the gateways of a simulation take anonymous requests."""
