"""Messages to MessagePack and back, bounded in size both ways."""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from .drops import Drop
from .outcomes import InvalidRequest, TooLarge

T = TypeVar("T")

MAX_MESSAGE_BYTES = 16 << 20
"""Default bound of one encoded message. Artifacts never travel in one message."""


class MalformedMessage(InvalidRequest):
    """Bytes that are no message of the expected types. ``reason`` is the label that they are counted under."""

    def __init__(
        self,
        message: str,
        *,
        reason: Drop = Drop.UNDECODABLE,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), reason=self.reason), (self.message,)


class Codec(Generic[T]):
    """Encodes and decodes one union of tagged structs.

    ``types`` is a ``msgspec.Struct`` class or a union of them, each tagged in field ``t``.
    """

    def __init__(self, types: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(types)

    def encode(self, message: T) -> bytes:
        """The bytes of ``message``. Raises TooLarge past ``max_bytes``: what no peer would take is not sent.

        Raises InvalidRequest for a number that is no 64-bit integer, which a message can't carry.
        """
        try:
            data = self._encoder.encode(message)
        except OverflowError:
            raise InvalidRequest(f"a {type(message).__name__} has a whole number of over 64 bits") from None
        if len(data) > self.max_bytes:
            raise TooLarge(
                f"a {type(message).__name__} of {len(data)} bytes is over the wire's bound of {self.max_bytes}"
            )
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """The message in ``data``. Raises MalformedMessage, and nothing else, whatever the bytes are."""
        if len(data) > self.max_bytes:
            raise MalformedMessage(f"{len(data)} bytes, at most {self.max_bytes} are taken", reason=Drop.OVERSIZED)
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            detail = str(error)
            reason = Drop.UNKNOWN if detail.endswith("`$.t`") else Drop.INVALID
            raise MalformedMessage(detail, reason=reason) from None
        # the last one is what older versions of msgspec let out of a string that is not UTF-8
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise MalformedMessage(str(error)) from None
