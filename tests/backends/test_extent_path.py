"""The path that names an extent: one spelling for each, and a reason for every other text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.extent_path import ExtentPath, is_extent, parse

NUMBERS = st.integers(1, (1 << 63) - 1)
PATHS = st.builds(
    ExtentPath,
    segment=st.from_regex(r"roost-[A-Za-z0-9][A-Za-z0-9._-]{0,40}", fullmatch=True),
    offset=st.integers(1, (1 << 57) - 1).map(lambda blocks: 64 * blocks),
    length=NUMBERS,
    generation=NUMBERS,
    digest=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
)
GOOD = str(ExtentPath("roost-node-0", 64, 5, 7, "ab" * 32))


@given(PATHS)
def test_what_is_written_is_read(path: ExtentPath) -> None:
    assert is_extent(str(path))
    assert parse(str(path)) == path


@given(st.text(max_size=80) | st.text(max_size=60).map(lambda text: f"roost-arena:///{text}") | PATHS.map(str))
def test_there_is_one_spelling(text: str) -> None:
    try:
        path = parse(text)
    except ValueError:
        return
    assert str(path) == text
    assert "/" not in path.segment
    assert path.offset >= 64


@given(PATHS, st.integers(0, 200), st.characters())
def test_a_changed_character_is_noticed(path: ExtentPath, at: int, character: str) -> None:
    text = str(path)
    at %= len(text)
    changed = text[:at] + character + text[at + 1 :]
    try:
        assert changed == text or parse(changed) != path
    except ValueError:
        return


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("roost-node-0", "node", "segment 'node' is not the name"),
        ("roost-node-0", "roost-../x", "segment 'roost-../x' is not the name"),
        ("roost-node-0", "roost-..", "segment 'roost-..' is not the name"),
        ("roost-node-0", "roost-node-0\n", r"segment 'roost-node-0\n' is not the name"),
        ("offset=64", "offset=63", "offset 63 leaves no room"),
        ("offset=64", "offset=4128", "offset 4128 is not a multiple of 64"),
        ("offset=64", "offset=064", "offset '064' is not a number"),
        ("offset=64", "offset=-64", "offset '-64' is not a number"),
        ("offset=64", "offset=\u0661\u0662\u0663", "is not a number"),
        ("offset=64", f"offset={1 << 63}", "is not a number"),
        ("length=5", "length=0", "length and generation must be positive"),
        ("generation=7", "generation=0", "length and generation must be positive"),
        ("generation=7&", "", "does not have the fields"),
        ("length=5&generation=7", "generation=7&length=5", "does not have the fields"),
        ("digest=abab", "digest=ABAB", "digest 'ABAB"),
        ("digest=abab", "digest=ab", "is not 64 hex digits"),
        ("roost-arena:///", "roost-arena://host/", "is not roost-arena:///SEGMENT"),
        ("roost-arena:///", "file:///", "is not roost-arena:///SEGMENT"),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(old: str, new: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse(GOOD.replace(old, new))


def test_folders_are_no_extents() -> None:
    assert not is_extent("/run/adapters/tiny/acme@digest")
