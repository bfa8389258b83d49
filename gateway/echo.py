"""The model's name in an answer: the engine's name for an adapter becomes the revision that the client can name."""

from __future__ import annotations

import re


class ModelEcho:
    """Replaces the value of ``"model"`` in a body that comes in pieces.

    Only a JSON key matches: in generated text the quotes are escaped. At most the beginning of a match is held back
    between two pieces, so that a token never waits for the next one.
    """

    def __init__(self, adapter: str, shown: str) -> None:
        quoted = re.escape(adapter.encode())
        self._needles = tuple(b'"model":' + gap + b'"' + adapter.encode() + b'"' for gap in (b"", b" "))
        self._pattern = re.compile(b'"model":( ?)"' + quoted + b'"')
        self._replacement = b'"model":"' + shown.encode() + b'"'
        self._longest = len(self._needles[1])
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What can be sent of ``piece`` and of what was held back before it."""
        if self._held:
            piece = self._held + piece
            self._held = b""
        # first the whole matches: the quote that closes one could also begin the next
        if self._needles[0] in piece or self._needles[1] in piece:
            piece = self._pattern.sub(lambda _: self._replacement, piece)
        held = self._partial_match(piece)
        if held:
            self._held = piece[-held:]
            piece = piece[:-held]
        return piece

    def rest(self) -> bytes:
        """What is still held back when the body ends."""
        held, self._held = self._held, b""
        return held

    def _partial_match(self, piece: bytes) -> int:
        """Length of the longest end of ``piece`` that begins a match."""
        if piece.endswith(b"\n"):
            return 0
        tail = piece[-(self._longest - 1) :]
        at = tail.find(b'"')
        while at >= 0:
            end = tail[at:]
            if self._needles[0].startswith(end) or self._needles[1].startswith(end):
                return len(end)
            at = tail.find(b'"', at + 1)
        return 0
