"""A plan fills any range of its destination with exactly the bytes that a plain copy would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.memory import FreshMemory
from packer.plan import CopyPlan, Runs, Segment, Turned

SOURCE = np.random.default_rng(0).integers(0, 256, 40_000, np.uint8)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), grain=st.sampled_from([1, 2, 6, 16, 64, 512]), several=st.booleans())
def test_any_range_of_any_plan(data: st.DataObject, grain: int, several: bool) -> None:
    draw = data.draw
    shift = draw(st.integers(0, 31))
    expected: list[bytes] = []
    segments: list[Segment] = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            experts, rows, columns = (draw(st.integers(1, 5)) for _ in range(3))
            view = SOURCE[: 2 * experts * rows * columns].view("<u2").reshape(rows, columns, experts).transpose(2, 0, 1)
            segments.append(Turned(view, "turned"))
            expected.append(np.ascontiguousarray(view).tobytes())
            continue
        most = (len(SOURCE) - shift) // grain // 4
        runs = draw(st.lists(st.tuples(st.integers(0, most), st.integers(1, 20)), min_size=1, max_size=60))
        offsets = [shift + place * grain for place, _ in runs]
        lengths = [min(length * grain, len(SOURCE) - offset) for offset, (_, length) in zip(offsets, runs, strict=True)]
        which = [number % 2 for number in range(len(runs))] if several else None
        sources = [SOURCE, SOURCE[::-1].copy()]
        segments.append(Runs(sources, offsets, lengths, [str(number) for number in range(len(runs))], which))
        expected += [
            sources[which[number] if which else 0][offset : offset + length].tobytes()
            for number, (offset, length) in enumerate(zip(offsets, lengths, strict=True))
        ]
    plan = CopyPlan(segments)
    whole = b"".join(expected)
    assert plan.total == len(whole)
    start = draw(st.integers(0, len(whole) - 1))
    out = np.zeros(draw(st.integers(1, len(whole) - start)), np.uint8)
    plan.fill(start, out)
    assert out.tobytes() == whole[start : start + out.size]


def test_a_byte_is_named_by_its_tensor() -> None:
    turned = Turned(SOURCE[:8].view("<u2").reshape(2, 2, 1), "b")
    plan = CopyPlan([Runs([SOURCE], [0, 100], [10, 20], ["a", "c"]), turned])
    assert [plan.name_at(position) for position in (0, 9, 10, 29, 30, 37)] == ["a", "a", "c", "c", "b", "b"]


def test_fresh_memory_holds_what_was_written_and_no_more() -> None:
    memory = FreshMemory(10)
    memory.write(b"abc")
    memory.write(memoryview(b"defghi"))
    assert bytes(memory.view) == b"abcdefghi"
    assert memory.view.readonly
    with pytest.raises(ValueError, match="capacity of 10"):
        memory.write(b"jk")
