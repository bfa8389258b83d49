"""A header is believed only where it describes the file's bytes exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from packer import safetensors_header
from packer.safetensors_header import TensorSpec, decode_header, encode_header, parse_header
from wire.outcomes import InvalidRequest

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [16, 19]},
}


def file_of(header: Any, data: int = 19) -> memoryview:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(len(raw).to_bytes(8, "little") + raw + bytes(data))


def changed(name: str, **fields: Any) -> memoryview:
    return file_of({**GOOD, name: {**GOOD[name], **fields}})


def test_a_stock_file_is_read(tmp_path: Any) -> None:
    tensors = {"x.weight": torch.ones(3, 5, dtype=torch.bfloat16), "ü": torch.zeros(2), "empty": torch.zeros(0, 4)}
    file = save(tensors, metadata={"format": "pt", 'k"': "\\"})
    header = parse_header(memoryview(file), "f")
    assert header.metadata == {"format": "pt", 'k"': "\\"}
    assert {name: spec.shape for name, spec in header.tensors.items()} == {
        "x.weight": (3, 5),
        "ü": (2,),
        "empty": (0, 4),
    }
    start, end = header.tensors["x.weight"].data_offsets
    assert file[header.data_start + start : header.data_start + end] == b"\x80\x3f" * 15


def test_any_spelling_of_a_header_is_read() -> None:
    spaced = json.dumps({"b": GOOD["b"], "__metadata__": {"k": "v"}, "a": GOOD["a"]}, indent=3).encode()
    header = parse_header(file_of(spaced), "f")
    assert header.tensors["a"] == TensorSpec("F32", (2, 2), (0, 16))
    assert header.metadata == {"k": "v"}


def test_a_file_without_tensors_is_read() -> None:
    assert parse_header(file_of({}, data=0), "f").tensors == {}


def test_the_stock_library_reads_what_is_encoded() -> None:
    header = encode_header({"t": TensorSpec("F32", (1, 2), (0, 8))}, {"k": "v"}, align=64)
    assert len(header) % 64 == 0
    assert torch.equal(load(header + bytes(8))["t"], torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (memoryview(b""), "too short"),
        (memoryview(b"\x01\x00"), "too short"),
        (memoryview((1 << 63).to_bytes(8, "little") + b"{}"), "declares a header of 9223372036854775808 bytes"),
        (file_of(b"[]", data=0), "not a JSON object"),
        (file_of(b"{", data=0), "not JSON"),
        (file_of(b'{"\xff":1}', data=0), "not JSON"),
        (file_of(b'{"a":' * 5000, data=0), "nested too deeply"),
        (file_of(b'{"a":NaN}', data=0), "NaN"),
        (file_of(b'{"a":' + b"9" * 5000 + b"}", data=0), "not JSON"),
        (file_of(b'{"a":1,"a":1}', data=0), "'a' twice"),
        (file_of(json.dumps(GOOD).replace('"b"', '"a"').encode()), "'a' twice"),
        (file_of(json.dumps(GOOD).replace('"shape": [3]', '"shape": [3], "\\u0073hape": [3]').encode()), "twice"),
        (file_of({**GOOD, "c": 1}), "'c' must have dtype, shape and data_offsets"),
        (file_of({**GOOD, "__metadata__": {"k": 1}}), "map of strings"),
        (changed("b", extra=1), "'b' must have dtype, shape and data_offsets, and nothing else"),
        (changed("b", dtype="F31"), "unknown dtype 'F31'"),
        (changed("b", shape=[-3]), "impossible shape"),
        (changed("b", shape=[1 << 60, 1 << 60]), "impossible shape"),
        (changed("b", shape=[1] * 9), "impossible shape"),
        (changed("b", shape=[4]), "takes another number"),
        (changed("b", shape=["3"]), "'b'"),
        (changed("b", shape=[3.5]), "'b'"),
        (changed("b", data_offsets=[16]), "'b'"),
        (changed("b", data_offsets=[19, 16]), "impossible offsets"),
        (changed("b", data_offsets=[-3, 0]), "impossible offsets"),
        (changed("b", data_offsets=[10**4000, 10**4000 + 3]), "impossible offsets"),
        (changed("b", data_offsets=[15, 18]), "'b' overlaps the tensor before it"),
        (changed("b", data_offsets=[17, 20]), "'b' leaves a hole before it"),
        (file_of(GOOD, data=18), "truncated"),
        (file_of(GOOD, data=20), "1 bytes after its last tensor"),
    ],
)  # fmt: skip
def test_a_lying_header_is_refused_with_its_reason(file: memoryview, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_header(file, "f.safetensors")
    assert reason in refused.value.message
    assert refused.value.message.startswith("f.safetensors")
    assert len(refused.value.message) < 500


def test_a_declared_size_is_bounded_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 100)
    with pytest.raises(InvalidRequest, match="at most 100"):
        parse_header(file_of(b"{" + b" " * 100 + b"}", data=0), "f")


def test_the_number_of_tensors_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 1)
    many = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(4)}
    with pytest.raises(InvalidRequest, match="more than 1 tensors"):
        parse_header(file_of(many, data=0), "f")


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused_or_read(data: bytes) -> None:
    for file in (data, len(data).to_bytes(8, "little") + data):
        try:
            parse_header(memoryview(file), "f")
        except InvalidRequest as refused:
            assert refused.message


@given(st.data())
def test_a_changed_byte_never_escapes_the_checks(data: st.DataObject) -> None:
    file = bytearray(file_of(GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 20))] = data.draw(st.integers(0, 255))
    try:
        header = parse_header(memoryview(bytes(file)), "f")
    except InvalidRequest:
        return
    covered = sum(end - start for start, end in (spec.data_offsets for spec in header.tensors.values()))
    assert covered == len(file) - header.data_start


SPECS = st.builds(
    TensorSpec,
    st.sampled_from(["BF16", "F32", "\u20ac"]),
    st.lists(st.integers(0, 1 << 70), max_size=3).map(tuple),
    st.tuples(st.integers(-5, 1 << 40), st.integers(0, 1 << 40)),
)


@given(
    tensors=st.dictionaries(st.text(max_size=8), SPECS, max_size=5),
    metadata=st.dictionaries(st.text(max_size=8), st.text(max_size=8), min_size=1, max_size=2),
    data=st.data(),
)
def test_what_was_encoded_is_decoded_and_no_other_bytes_are(
    tensors: dict[str, TensorSpec], metadata: dict[str, str], data: st.DataObject
) -> None:
    tensors.pop("__metadata__", None)
    try:
        header = encode_header(tensors, metadata, 64)
    except OverflowError:
        return
    assert decode_header(header, 64) == (tensors, metadata)
    spoilt = bytearray(header)
    place = data.draw(st.integers(0, len(header) - 1))
    spoilt[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    other = decode_header(bytes(spoilt), 64)
    assert other is None or encode_header(*other, 64) == bytes(spoilt)
