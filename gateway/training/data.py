"""Training data as clients send it, in JSON or protobuf, into a trainer's batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from catalog.names import shown
from wire.outcomes import InvalidRequest
from wire.trainer import Batch, Datum, Loss

from . import schema
from .work import Train

Array = npt.NDArray[Any]

# the name of a loss's input on the wire: the field of ours, and its numbers
_INPUTS = {
    "target_tokens": ("targets", "<i8"),
    "weights": ("weights", "<f4"),
    "logprobs": ("logprobs", "<f4"),
    "advantages": ("advantages", "<f4"),
}
_MAX_ID = 1 << 31
_JSON_DTYPES = ("float32", "int64", "int32", "bfloat16")
_NUMPY = {schema.FLOAT32: "<f4", schema.INT64: "<i8", schema.INT32: "<i4"}


Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class TextChunk(msgspec.Struct, frozen=True):
    """A piece of a prompt or a sequence. ``type`` says what it is; only encoded text is taken."""

    type: str = "encoded_text"
    tokens: tuple[Token, ...] | None = None


class ModelInput(msgspec.Struct, frozen=True):
    chunks: tuple[TextChunk, ...]

    def tokens(self, field: str) -> list[int]:
        """Raises InvalidRequest for anything but text."""
        gathered: list[int] = []
        for chunk in self.chunks:
            if chunk.tokens is None:
                raise InvalidRequest(
                    f"{field} has a chunk of type {shown(chunk.type)}: only text is taken", field=field
                )
            gathered += chunk.tokens
        return gathered


class JsonTensor(msgspec.Struct, frozen=True):
    data: list[float]
    dtype: str = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None


class JsonDatum(msgspec.Struct, frozen=True):
    model_input: ModelInput
    loss_fn_inputs: dict[str, JsonTensor] = {}


class JsonInput(msgspec.Struct, frozen=True):
    """``forward_backward_input`` and ``forward_input`` of SDKs that send JSON."""

    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class Addressed(NamedTuple):
    """A protobuf request: whose operation it is, and the rest, which ``read_protobuf`` makes sense of."""

    model_id: str
    seq_id: int
    message: Any


def open_protobuf(body: bytes) -> Addressed:
    """Raises InvalidRequest for what is no such message."""
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's own DecodeError differs by implementation
        raise InvalidRequest(f"the body is not a forward_backward request: {error}", field="body") from None
    return Addressed(message.model_id, message.seq_id, message)


def read_protobuf(message: Any) -> Train:
    """Raises InvalidRequest that names the datum and the field."""
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("choice") == "text" else value.number
    data = tuple(_from_protobuf(place, datum) for place, datum in enumerate(message.data))
    return _train(data, message.loss_fn, config, forward_only=message.forward_only)


def read_json(given: JsonInput, *, forward_only: bool) -> Train:
    """Raises InvalidRequest that names the datum and the field."""
    data = tuple(_from_json(place, datum) for place, datum in enumerate(given.data))
    return _train(data, given.loss_fn, given.loss_fn_config or {}, forward_only=forward_only)


def _train(data: tuple[Datum, ...], kind: str, config: Mapping[str, float | str], *, forward_only: bool) -> Train:
    if not data:
        raise InvalidRequest("the batch has no data", field="data")
    numbers: dict[str, float] = {}
    for name, value in config.items():
        if isinstance(value, str):
            raise InvalidRequest(f"loss_fn_config: {shown(name)} must be a number", field="loss_fn_config")
        numbers[name] = value
    return Train(batch=Batch(data, (Loss(kind, numbers),)), forward_only=forward_only)


def _from_protobuf(place: int, datum: Any) -> Datum:
    pieces: list[Array] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("choice") != "encoded_text":
            raise InvalidRequest(f"datum {place}: model_input has a chunk that is not text", field="model_input")
        pieces.append(_numbers(place, "model_input", chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(pieces) if pieces else np.empty(0, "<i4")

    def inputs() -> Iterator[tuple[str, Array]]:
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor.WhichOneof("choice") != "dense":
                raise _sparse(place, name)
            kind = _NUMPY.get(tensor.dtype)
            if kind is None:
                raise InvalidRequest(f"datum {place}: {name} has dtype {tensor.dtype}", field=name)
            values = _numbers(place, name, tensor.dense, kind)
            _check_flat(place, name, list(tensor.shape), len(values))
            yield name, values

    return _datum(place, tokens, inputs())


def _from_json(place: int, datum: JsonDatum) -> Datum:
    tokens = np.asarray(datum.model_input.tokens("model_input"), "<i8")

    def inputs() -> Iterator[tuple[str, Array]]:
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor.sparse_crow_indices is not None:
                raise _sparse(place, name)
            if tensor.dtype not in _JSON_DTYPES:
                raise InvalidRequest(f"datum {place}: {name} has dtype {shown(tensor.dtype)}", field=name)
            _check_flat(place, name, tensor.shape or [], len(tensor.data))
            yield name, np.asarray(tensor.data)

    return _datum(place, tokens, inputs())


def _datum(place: int, tokens: Array, inputs: Iterator[tuple[str, Array]]) -> Datum:
    fields: dict[str, bytes] = {}
    for name, values in inputs:
        known = _INPUTS.get(name)
        if known is None:
            raise InvalidRequest(
                f"datum {place}: loss_fn_inputs has {shown(name)}; known are {', '.join(_INPUTS)}",
                field="loss_fn_inputs",
            )
        field, kind = known
        if len(values) != len(tokens):
            raise InvalidRequest(f"datum {place}: {name} has {len(values)} values for {len(tokens)} tokens", field=name)
        fields[field] = _ids(place, name, values) if kind == "<i8" else _floats(place, name, values)
    if "targets" not in fields:
        raise InvalidRequest(f"datum {place} lacks target_tokens", field="target_tokens")
    return msgspec.convert({"tokens": tokens.astype("<i8").tobytes(), **fields}, Datum)


def _numbers(place: int, name: str, raw: bytes, kind: str) -> Array:
    if len(raw) % np.dtype(kind).itemsize:
        raise InvalidRequest(f"datum {place}: {name} is {len(raw)} bytes, not whole numbers", field=name)
    return np.frombuffer(raw, kind)


def _ids(place: int, name: str, values: Array) -> bytes:
    """Token ids, which some clients send as floats, as int64 bytes."""
    if values.dtype.kind == "f" and not ((values == np.floor(values)) & (abs(values) < _MAX_ID)).all():
        raise InvalidRequest(f"datum {place}: {name} has a value that is no token id", field=name)
    return values.astype("<i8").tobytes()


def _floats(place: int, name: str, values: Array) -> bytes:
    with np.errstate(over="ignore"):
        held = values.astype("<f4")
    if (np.isinf(held) & np.isfinite(values)).any():
        raise InvalidRequest(f"datum {place}: {name} has a value that float32 can't hold", field=name)
    return held.tobytes()


def _check_flat(place: int, name: str, shape: list[int], count: int) -> None:
    """``shape``, where it is given, is of ``count`` values, one a position."""
    if len(shape) > 1 and math.prod(shape[1:]) != 1:
        raise InvalidRequest(f"datum {place}: {name} has shape {shape}: one value a position is taken", field=name)
    if shape and shape[0] != count:
        raise InvalidRequest(f"datum {place}: {name} has shape {shape} and {count} values", field=name)


def _sparse(place: int, name: str) -> InvalidRequest:
    return InvalidRequest(f"datum {place}: {name} is sparse: one value a position is taken", field=name)
