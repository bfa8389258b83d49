"""What gateways last said that nodes hold, so that retention keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from wire.registrar import ReportInUse

# a gateway that is gone may have leases out still, for as long as a lease may live; and none for ever
_BELIEVED_S = 3600.0
# several times as long as gateways take between reports
_RECENT_S = 150.0


class _Report(NamedTuple):
    at: float
    digests: frozenset[str]


class InUse:
    """Each gateway's last whole report counts until its next, or for an hour. ``now`` is monotonic, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._reports: dict[str, _Report] = {}
        self._parts: dict[str, list[tuple[str, ...]]] = {}
        # when each gateway last said that it hears all of its nodes
        self._complete: dict[str, float] = {}

    def note(self, report: ReportInUse) -> None:
        """Take a report, or a part of one. Parts that don't follow each other make none."""
        parts = self._parts.pop(report.gateway, []) if report.part else []
        if len(parts) != report.part:
            return
        parts.append(report.digests)
        if len(parts) < report.parts:
            self._parts[report.gateway] = parts
            return
        now = self._now()
        self._reports[report.gateway] = _Report(now, frozenset().union(*parts))
        if report.complete:
            self._complete[report.gateway] = now

    def known(self) -> bool:
        """Whether some gateway said lately what all of its nodes hold. Until then anything may be in use."""
        return any(at + _RECENT_S > self._now() for at in self._complete.values())

    def digests(self) -> tuple[str, ...]:
        """All that may be in use, each once."""
        oldest = self._now() - _BELIEVED_S
        self._reports = {gateway: report for gateway, report in self._reports.items() if report.at > oldest}
        self._complete = {gateway: at for gateway, at in self._complete.items() if at > oldest}
        return tuple(sorted(frozenset().union(*(report.digests for report in self._reports.values()))))
