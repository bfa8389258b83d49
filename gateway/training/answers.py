"""Results as clients read them: JSON, or protobuf where the SDK asks for it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from . import schema
from .work import (
    Alternatives,
    AnyResult,
    Created,
    Failed,
    Loaded,
    Sampled,
    Saved,
    SavedForSampler,
    Stepped,
    Trained,
)

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
# the log-probability of a cell of alternatives that holds nothing
EMPTY = -99999.0
# what every output of ours is called: a record of arrays
_OUTPUT_TYPE = "ArrayRecord"


def answer(result: AnyResult, *, protobuf: bool) -> tuple[str, bytes]:
    """Content type and body. Only what SDKs read as protobuf is ever written so."""
    if protobuf and isinstance(result, Trained):
        return PROTOBUF, _trained_protobuf(result)
    if protobuf and isinstance(result, Sampled):
        return PROTOBUF, _sampled_protobuf(result)
    return JSON, msgspec.json.encode(_document(result))


def _document(result: AnyResult) -> dict[str, Any]:
    match result:
        case Failed():
            return {"error": result.error, "category": result.category}
        case Created():
            return {"type": "create_model", "model_id": result.model_id}
        case Trained():
            return _trained_json(result)
        case Stepped():
            return {"type": "optim_step", "metrics": result.metrics}
        case Saved():
            return {"type": "save_weights", "path": result.path}
        case Loaded():
            return {"type": "load_weights", "path": result.path, "model_id": result.model_id}
        case SavedForSampler():
            return {
                "type": "save_weights_for_sampler",
                "path": result.path or None,
                "sampling_session_id": result.sampler or None,
            }
        case Sampled():
            return _sampled_json(result)


def _trained_json(result: Trained) -> dict[str, Any]:
    outputs = []
    for datum in result.data:
        logprobs = np.frombuffer(datum.logprobs, "<f4").tolist()
        outputs.append({"logprobs": {"data": logprobs, "dtype": "float32", "shape": [len(logprobs)]}})
    return {"loss_fn_output_type": _OUTPUT_TYPE, "loss_fn_outputs": outputs, "metrics": result.metrics}


def _trained_protobuf(result: Trained) -> bytes:
    message = schema.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE, metrics=result.metrics)
    record = message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE, num_datums=len(result.data))
    lengths = [len(datum.logprobs) for datum in result.data]
    field = record.fields["logprobs"]
    field.data = b"".join(datum.logprobs for datum in result.data)
    field.offsets = np.cumsum([0, *lengths], dtype="<i8").tobytes()
    field.dtype = schema.FLOAT32
    encoded: bytes = message.SerializeToString()
    return encoded


def _sampled_json(result: Sampled) -> dict[str, Any]:
    sequences = [
        {
            "stop_reason": "stop" if sequence.stopped else "length",
            "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
            "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
        }
        for sequence in result.sequences
    ]
    document: dict[str, Any] = {"type": "sample", "sequences": sequences}
    if result.prompt_logprobs:
        numbers = np.frombuffer(result.prompt_logprobs, "<f4").tolist()
        document["prompt_logprobs"] = [None if math.isnan(number) else number for number in numbers]
    if result.topk_prompt is not None:
        document["topk_prompt_logprobs"] = _rows(result.topk_prompt)
    return document


def _rows(given: Alternatives) -> list[list[tuple[int, float]] | None]:
    tokens = np.frombuffer(given.tokens, "<i4").reshape(-1, given.k).tolist()
    logprobs = np.frombuffer(given.logprobs, "<f4").reshape(-1, given.k).tolist()
    rows = [
        [pair for pair in zip(ids, numbers, strict=True) if pair[1] > EMPTY]
        for ids, numbers in zip(tokens, logprobs, strict=True)
    ]
    return [row or None for row in rows]


def _sampled_protobuf(result: Sampled) -> bytes:
    message = schema.SampleResponse()
    for sequence in result.sequences:
        added = message.sequences.add(
            stop_reason=schema.STOP if sequence.stopped else schema.LENGTH,
            tokens=sequence.tokens,
            logprobs=sequence.logprobs,
        )
        _set_alternatives(added.topk_sampled_logprobs, sequence.topk)
    if result.prompt_logprobs:
        message.prompt_logprobs = result.prompt_logprobs
    _set_alternatives(message.topk_prompt_logprobs, result.topk_prompt)
    encoded: bytes = message.SerializeToString()
    return encoded


def _set_alternatives(field: Any, given: Alternatives | None) -> None:
    if given is not None:
        field.token_ids, field.logprobs = given.tokens, given.logprobs
        field.k, field.length = given.k, len(given.tokens) // (4 * given.k)
