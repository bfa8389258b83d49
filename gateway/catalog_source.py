"""The catalog's view, opened once the registrar has made it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from catalog.view import CatalogView
from wire.outcomes import JournalUnavailable

_RETRY_S = 0.5


class CatalogSource:
    """Opens the catalog at the first use that finds it there; a gateway may start before its registrar.

    ``open_view`` raises JournalUnavailable while there is none.
    """

    def __init__(
        self,
        directory: Path,
        *,
        open_view: Callable[[Path], CatalogView] = CatalogView.open,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._open_view = open_view
        self._clock = clock
        self._view: CatalogView | None = None
        self._failure = JournalUnavailable("the catalog was not opened yet")
        self._retry_at = 0.0

    def view(self) -> CatalogView:
        """The view. Raises JournalUnavailable while there is none; looks again twice a second at most."""
        return self._view or self._open()

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def _open(self) -> CatalogView:
        if self._clock() >= self._retry_at:
            try:
                self._view = self._open_view(self._directory)
            except JournalUnavailable as error:
                self._retry_at = self._clock() + _RETRY_S
                self._failure = JournalUnavailable(error.message, retry_after_s=1.0)
            else:
                return self._view
        raise self._failure
