"""A policy's record: what was made is repeated, what comes next is made, anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.megatron_train.replay import Change, Record, State, decode_answer, encode_answer, size_of
from tests.backends.megatron.bases import sft_batch
from wire.outcomes import VersionConflict
from wire.trainer import Adam, AnswerOfRank, DatumOutput, ForwardBackward, OptimStep, Outputs, PolicySpec, Stepped

SPEC = PolicySpec(policy="one", rank=4)
LEARN = ForwardBackward(policy="one", batch=sft_batch())


@given(st.lists(st.sampled_from(["learn", "step", "snapshot", "stale", "ahead"]), max_size=30))
def test_snapshot_and_changes_are_the_whole_history(events: list[str]) -> None:
    record = Record(SPEC, 100)
    history: list[Change] = []
    kept = steps = 0
    for place, event in enumerate(events):
        number = len(history)
        if event in ("learn", "step"):
            assert record.repeated(number + 1) is None
            steps += event == "step"
            change: Change = LEARN if event == "learn" else OptimStep(policy="one", adam=Adam())
            answer: AnswerOfRank = (
                Outputs(seconds=place) if event == "learn" else Stepped(grad_norm=place, step=steps, seconds=place)
            )
            record.made(change, answer, 1.0)
            history.append(change)
            assert record.repeated(number + 1) is answer
            assert record.state == State(number + 1, steps, event == "learn", answer)
        elif event == "snapshot":
            record.snapshotted(record.state, f"folder-{number}")
            kept = number
        else:
            with pytest.raises(VersionConflict, match=f"the next one is {number + 1}"):
                record.repeated(number + 2 if event == "ahead" else number - 1)
    assert record.state.number == len(history)
    assert record.changes == history[kept:]
    assert record.snapshot == (f"folder-{kept}" if "snapshot" in events else "")
    assert record.nbytes == sum(size_of(change) for change in history[kept:])


@given(st.floats(allow_nan=False), st.binary(max_size=32))
def test_an_answer_outlives_its_control(number: float, logprobs: bytes) -> None:
    for answer in (
        Stepped(grad_norm=number, step=3, seconds=0.5),
        Outputs(data={0: DatumOutput(logprobs, number), 7: DatumOutput(b"", 0.0)}, seconds=0.1),
        None,
    ):
        assert decode_answer(encode_answer(answer)) == answer
