"""Whether a server that says nothing is at work: by the CPU time that it uses.

A server may be silent for a minute over one large answer; to kill it then would end everybody's requests.
"""

from __future__ import annotations

# an idle server stays far below
WORKING_SHARE = 0.25
# what is judged: long enough for the share to mean something
SPAN_S = 2.0


class Pulse:
    """Told times and CPU seconds used so far while the server is silent. ``worked_at``: when it was last at work."""

    def __init__(self, now: float, cpu_s: float) -> None:
        self.worked_at: float | None = None
        self._since = now
        self._cpu_s = cpu_s

    def feel(self, now: float, cpu_s: float) -> None:
        """Judge the span since the last one, once it is long enough. ``now`` in monotonic seconds."""
        span = now - self._since
        if span < SPAN_S:
            return
        if cpu_s - self._cpu_s >= WORKING_SHARE * span:
            self.worked_at = now
        self._since, self._cpu_s = now, cpu_s
