"""Where a revision's bytes can be had nearer than in the store."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from catalog.artifacts import ArtifactSource

from .extents import Extent


class Source(Protocol):
    """The host's own disk, say, or another node. Called on the threads of fetches, several at a time.

    It is never trusted: what it gives is verified like anything else, and what it can't give the store can.
    """

    @property
    def name(self) -> str:
        """For logs and counters."""

    def open(self, digest: str) -> AbstractContextManager[ArtifactSource | None]:
        """The bytes, to be read into memory; None where they are not to be had. Raises ArtifactUnavailable."""

    def distrust(self, digest: str) -> None:
        """What it gave under ``digest`` was something else."""

    def arrived(self, digest: str, extent: Extent) -> None:
        """The bytes came from elsewhere and lie in the arena, for as long as they are not evicted. Returns at once."""

    def close(self) -> None:
        """Let go of everything. No other method is called afterwards."""
