"""Training data in both of its forms, and what is refused of it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.training import schema
from gateway.training.answers import answer
from gateway.training.data import JsonInput, open_protobuf, read_json, read_protobuf
from gateway.training.work import Alternatives, Sampled, Sequence, Trained
from wire.outcomes import InvalidRequest
from wire.trainer import DatumOutput

from .rig import datum

ids = st.lists(st.integers(0, 30000), min_size=1, max_size=20)


def as_protobuf(*data: dict[str, Any], loss: str = "cross_entropy", **config: float) -> bytes:
    message = schema.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn=loss, loss_fn_config=config)
    for given_datum in data:
        added = message.data.add()
        for chunk in given_datum["model_input"]["chunks"]:
            added.model_input.add().encoded_text.tokens = np.asarray(chunk["tokens"], "<i4").tobytes()
        for name, tensor in given_datum["loss_fn_inputs"].items():
            integral = tensor["dtype"] == "int64"
            field = added.loss_fn_inputs[name]
            field.dense = np.asarray(tensor["data"], "<i8" if integral else "<f4").tobytes()
            field.dtype = schema.INT64 if integral else schema.FLOAT32
            field.shape.extend(tensor["shape"])
    encoded: bytes = message.SerializeToString()
    return encoded


def from_json(*data: dict[str, Any], loss: str = "cross_entropy", **config: float) -> Any:
    body = msgspec.json.encode({"data": data, "loss_fn": loss, "loss_fn_config": config})
    return read_json(msgspec.json.decode(body, type=JsonInput), forward_only=False)


@given(ids, st.data())
def test_both_forms_are_the_same_work(tokens: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(-4, 4, width=32), min_size=len(tokens), max_size=len(tokens)))
    one = datum(tuple(tokens), tuple(tokens[::-1]), weights=weights)
    addressed = open_protobuf(as_protobuf(one, one, clip=0.5))
    assert (addressed.model_id, addressed.seq_id) == ("m", 3)
    assert read_protobuf(addressed.message) == from_json(one, one, clip=0.5)


def targets(values: list[float], shape: list[int] | None = None) -> dict[str, Any]:
    """A datum with these, floats where one of them is."""
    dtype = "float32" if any(isinstance(each, float) for each in values) else "int64"
    given_datum = datum()
    given_datum["loss_fn_inputs"]["target_tokens"] = {"data": values, "dtype": dtype, "shape": shape or [len(values)]}
    return given_datum


def test_token_ids_may_come_as_whole_floats() -> None:
    assert from_json(targets([2.0, 3.0, 4.0])) == from_json(targets([2, 3, 4]))


def test_a_number_beyond_float32_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="datum 0: weights has a value that float32 can't hold"):
        from_json(datum(weights=[1.0, 1e300, 0.0]))


def test_a_dtype_that_is_none_is_refused() -> None:
    given_datum = datum()
    given_datum["loss_fn_inputs"]["target_tokens"]["dtype"] = "float99"
    with pytest.raises(InvalidRequest, match="datum 0: target_tokens has dtype 'float99'"):
        from_json(given_datum)


@pytest.mark.parametrize(
    ("given_datum", "reason"),
    [
        (datum((1, 2), (2, 3, 4)), "datum 0: target_tokens has 3 values for 2 tokens"),
        (datum(weights=[1.0]), "datum 0: weights has 1 values for 3 tokens"),
        (datum(mask=[1.0, 1.0, 1.0]), "datum 0: loss_fn_inputs has 'mask'"),
        ({"model_input": {"chunks": []}, "loss_fn_inputs": {}}, "datum 0 lacks target_tokens"),
        (targets([2.0, 2.5, 3.0]), "datum 0: target_tokens has a value that is no token id"),
        (targets([2.0, 3.0, 1e18]), "datum 0: target_tokens has a value that is no token id"),
        (targets([2, 3, 4], shape=[400]), r"datum 0: target_tokens has shape \[400\] and 3 values"),
        (targets([2, 3, 4], shape=[-3]), r"datum 0: target_tokens has shape \[-3\] and 3 values"),
    ],
)
def test_a_datum_that_does_not_fit_is_named(given_datum: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        from_json(given_datum)
    with pytest.raises(InvalidRequest, match=reason):
        read_protobuf(open_protobuf(as_protobuf(given_datum)).message)


def test_images_and_tables_are_refused() -> None:
    image = datum() | {"model_input": {"chunks": [{"type": "image", "data": "x"}]}}
    with pytest.raises(InvalidRequest, match="chunk of type 'image'"):
        from_json(image)
    message = schema.ForwardBackwardRequest(model_id="m", seq_id=1)
    # field 2 of a chunk: an image, which our description of the message has not
    message.data.add().model_input.add().ParseFromString(b"\x12\x03\x0a\x01x")
    with pytest.raises(InvalidRequest, match="a chunk that is not text"):
        read_protobuf(message)
    wide = datum()
    wide["loss_fn_inputs"]["target_tokens"] |= {"shape": [1, 3]}
    with pytest.raises(InvalidRequest, match="one value a position"):
        from_json(wide)


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a forward_backward request"):
        open_protobuf(b"\xff\xff\xff")


def test_empty_outputs_and_missing_alternatives_are_told() -> None:
    """A batch's outputs are cut by offsets; alternatives that are not there are left out of JSON."""
    logprobs = [np.asarray(each, "<f4").tobytes() for each in ([-1.0, -2.0], [-3.0])]
    trained = Trained(data=tuple(DatumOutput(each, 1.0) for each in logprobs), metrics={"loss:sum": 2.0})
    kind, body = answer(trained, protobuf=True)
    message = schema.ForwardBackwardOutput.FromString(body)
    field = message.loss_fn_outputs[0].fields["logprobs"]
    assert kind == "application/x-protobuf"
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 8, 12]
    assert field.data == b"".join(logprobs)
    topk = Alternatives(
        2, np.asarray([0, 0, 5, 0], "<i4").tobytes(), np.asarray([-99999, -99999, -0.5, -99999], "<f4").tobytes()
    )
    sampled = Sampled(sequences=(Sequence(b"", b"", True),), prompt_logprobs=b"\0\0\xc0\x7f", topk_prompt=topk)
    document = msgspec.json.decode(answer(sampled, protobuf=False)[1])
    assert document["prompt_logprobs"] == [None]
    assert document["topk_prompt_logprobs"] == [None, [[5, -0.5]]]
