"""How many tokens an answer cost, read off it on its way to the client."""

from __future__ import annotations

import re

import msgspec

_END_OF_EVENT = b"\n\n"
# in generated text the quotes would be escaped, and a token that is told by itself has no object behind it
_USAGE = b'"usage"'
_USAGE_RE = re.compile(rb'"usage"\s*:\s*\{(?:[^{}]|\{[^{}]*\})*?"total_tokens"\s*:\s*([0-9]{1,12})')
_NO_CHOICES_RE = re.compile(rb'"choices"\s*:\s*\[\s*\]')
# an event longer than this is passed on in parts
_MAX_EVENT_BYTES = 1 << 20
# of an answer that comes in parts this much is kept, to find what stands in two of them
_TAIL_BYTES = 1024

_Fields = dict[str, msgspec.Raw]
_options_decoder = msgspec.json.Decoder(_Fields)
_WITH_USAGE = msgspec.Raw(b'{"include_usage":true}')


def ask_for_usage(fields: _Fields) -> bool:
    """Have a streamed answer end with its usage. True where the client did not ask for that event, nor shall get it.

    Options that can't be understood are left for the engine to refuse.
    """
    raw = fields.get("stream_options")
    if raw is None or bytes(raw) == b"null":
        fields["stream_options"] = _WITH_USAGE
        return True
    try:
        options = _options_decoder.decode(raw)
    except msgspec.DecodeError:
        return False
    if bytes(options.get("include_usage", b"")) == b"true":
        return False
    options["include_usage"] = msgspec.Raw(b"true")
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    return True


class UsageMeter:
    """Reads one answer piece by piece. ``tokens`` is what its usage says, None until it does; ``events`` counts those
    of a stream, each a token or more; ``begun`` is for who passes the answer on to say. ``hides``: the event that only
    tells the usage is left out.
    """

    def __init__(self, *, stream: bool, hides: bool) -> None:
        self.tokens: int | None = None
        self.events = 0
        self.begun = False
        self._stream = stream
        self._hides = hides
        self._held = b""

    def feed(self, piece: bytes, last: bool) -> bytes:
        """What is passed on of ``piece``: whole events of a stream, and all of anything else."""
        return self._feed_stream(piece, last) if self._stream else self._feed_document(piece)

    def _feed_document(self, piece: bytes) -> bytes:
        data = self._held + piece
        self._note(data)
        self._held = data[-_TAIL_BYTES:]
        return piece

    def _feed_stream(self, piece: bytes, last: bool) -> bytes:
        data = self._held + piece
        end = len(data) if last else data.rfind(_END_OF_EVENT) + len(_END_OF_EVENT)
        if end < len(_END_OF_EVENT):
            if len(data) <= _MAX_EVENT_BYTES:
                self._held = data
                return b""
            end = len(data)
        self._held, data = data[end:], data[:end]
        self.events += data.count(_END_OF_EVENT)
        if _USAGE not in data:
            return data
        self._note(data)
        if not self._hides or _NO_CHOICES_RE.search(data) is None:
            return data
        events = data.split(_END_OF_EVENT)
        return _END_OF_EVENT.join([event for event in events if not _only_usage(event)])

    def _note(self, data: bytes) -> None:
        at = data.rfind(_USAGE)
        while at >= 0:
            found = _USAGE_RE.match(data, at)
            if found is not None:
                self.tokens = int(found[1])
                return
            at = data.rfind(_USAGE, 0, at)


def _only_usage(event: bytes) -> bool:
    return _USAGE_RE.search(event) is not None and _NO_CHOICES_RE.search(event) is not None
