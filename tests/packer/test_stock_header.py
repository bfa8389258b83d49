"""The fast reader of headers reads what the stock library writes, and nothing that a careful reader wouldn't."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from packer import safetensors_header
from packer.safetensors_header import parse_header
from packer.stock_header import parse_entries
from wire.outcomes import InvalidRequest

NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=300), min_size=1, max_size=12)


def entries_of(file: bytes) -> bytes:
    return file[9 : 8 + int.from_bytes(file[:8], "little")]


@given(names=st.sets(NAMES, min_size=1, max_size=20), data=st.data())
def test_what_the_stock_library_writes(names: set[str], data: st.DataObject) -> None:
    sizes = st.lists(st.integers(0, 12), max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])
    tensors = {name: torch.zeros(data.draw(sizes), dtype=data.draw(dtypes)) for name in names - {"__metadata__"}}
    file = save(tensors)
    header = parse_header(memoryview(file), "file")
    assert header.tensors.keys() == tensors.keys()
    assert all(header.tensors[name].shape == tuple(tensor.shape) for name, tensor in tensors.items())
    theirs = json.loads(b"{" + entries_of(file)) if tensors else {}
    assert {name: list(spec.data_offsets) for name, spec in header.tensors.items()} == {
        name: entry["data_offsets"] for name, entry in theirs.items()
    }
    plain = all(name.isascii() and '"' not in name and "\\" not in name and "\x7f" not in name for name in tensors)
    if tensors:
        assert (parse_entries(entries_of(file)) is not None) == plain


GOOD = '"a":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]},"b":{"dtype":"U8","shape":[],"data_offsets":[6,7]}}'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"U8"', '"U8 "'), ("[0,6]", "[00,6]"), ("[0,6]", "[0,06]"), ("[0,6]", "[0,6,6]"),
        ("[0,6]", "[-0,6]"), ("[0,6]", "[0,6.0]"), ("[0,6]", "[0]"), ("[0,6]", "[,6]"), ("[0,6]", "[0,]"),
        ("[0,6]", "[0,9999999999999999999]"), ("[2,3]", "[2,]"), ("[2,3]", "[02]"), ("[2,3]", "[2e0]"), ("}}", "}} x"),
        ("},", "},,"), ("dtype", "dtypo"), ('"b":', '"b" :'), ("[6,7]}}", "[6,7]}"), ('"a"', "'a'"), ("[2,3]", "[[2]]"),
    ],
)  # fmt: skip
def test_another_spelling_is_left_to_the_careful_reader(before: str, after: str) -> None:
    assert parse_entries(GOOD.encode()) is not None
    changed = GOOD.replace(before, after, 1)
    assert changed != GOOD
    columns = parse_entries(changed.encode())
    # a dtype that nobody knows is spelt well all the same
    assert columns is None or columns.kinds[columns.kind[0]][0] == "U8 "


def careful(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_header, "_parse_stock", lambda _: None)
        return outcome(raw)


def outcome(raw: bytes) -> Any:
    file = len(raw).to_bytes(8, "little") + raw + bytes(7)
    try:
        header = parse_header(memoryview(file), "file")
    except InvalidRequest:
        return None
    return header.tensors.as_dict(), header.metadata


def test_both_readers_agree_on_spoilt_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(0)
    scraps = [*'"{}[],:-0 \\x9', '"a"', '"dtype":', "00", '{"__metadata__":{"k":"v"},', "[0,6]"]
    read = 0
    for _ in range(4_000):
        raw = random_.choice(["{", '{"__metadata__":{"format":"pt","x":"y"},']) + GOOD
        for _ in range(random_.randint(0, 2)):
            at = random_.randrange(len(raw))
            raw = raw[:at] + random_.choice(scraps) + raw[at + random_.randint(0, 2) :]
        ours = outcome(raw.encode())
        assert ours == careful(raw.encode(), monkeypatch)
        read += ours is not None
    assert read > 400
