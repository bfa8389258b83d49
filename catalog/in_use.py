"""What gateways last said that nodes hold, so that retention keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable

from wire.registrar import ReportInUse

# a gateway that is gone may have leases out still, for as long as a lease may live; and none for ever
_BELIEVED_S = 3600.0


class InUse:
    """Each gateway's last report counts until its next, or for an hour. ``now`` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._reports: dict[str, tuple[float, tuple[str, ...]]] = {}

    def note(self, report: ReportInUse) -> None:
        self._reports[report.gateway] = self._now() + _BELIEVED_S, report.digests

    def digests(self) -> tuple[str, ...]:
        """All that may be in use, each once."""
        now = self._now()
        self._reports = {gateway: report for gateway, report in self._reports.items() if report[0] > now}
        return tuple(sorted({digest for _, digests in self._reports.values() for digest in digests}))
