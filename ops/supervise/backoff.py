"""When a process that died is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Delays that double from ``first_s`` to ``max_s``, and start over after a life of ``forget_after_s``."""

    first_s: float = 0.1
    max_s: float = 4.0
    forget_after_s: float = 30.0
    _next_s: float = 0.0

    def after_exit(self, lived_s: float) -> float:
        """Seconds to wait before the next start of a process that lived for ``lived_s``."""
        if self._next_s == 0.0 or lived_s >= self.forget_after_s:
            self._next_s = self.first_s
        delay = self._next_s
        self._next_s = min(self.max_s, delay * 2)
        return delay
