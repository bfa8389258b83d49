"""A run's operations in the order of their seq, however they arrive. Pure."""

from __future__ import annotations


class Line:
    """What waits of one run. ``next_seq`` is the only one that may run."""

    def __init__(self, next_seq: int) -> None:
        self.next_seq = next_seq
        self._waiting: dict[int, str] = {}

    def add(self, seq: int, request_id: str) -> None:
        """An operation that has arrived; one that is past is left alone."""
        if seq >= self.next_seq:
            self._waiting[seq] = request_id

    def first(self) -> str | None:
        """The operation whose turn it is; None where it has not arrived."""
        return self._waiting.get(self.next_seq)

    @property
    def more(self) -> bool:
        """Whether the operation after that has arrived too."""
        return self.next_seq + 1 in self._waiting

    def passed(self) -> None:
        """The operation whose turn it was has its result."""
        del self._waiting[self.next_seq]
        self.next_seq += 1

    @property
    def gapped(self) -> bool:
        """Whether something waits for an operation that has not arrived."""
        return bool(self._waiting) and self.next_seq not in self._waiting

    def go_past(self, seq: int) -> None:
        """Whatever there was up to ``seq`` has its result; the line goes on behind it."""
        self.next_seq = seq + 1
        self._waiting = {place: request_id for place, request_id in self._waiting.items() if place > seq}
