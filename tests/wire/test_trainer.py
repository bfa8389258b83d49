"""The trainer's messages arrive as they were sent, and each is told from all others."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.codec import Codec, MalformedMessage
from wire.outcomes import Outcome
from wire.trainer import (
    Adam,
    AnswerOfRank,
    AskLimits,
    AskMemory,
    AskOfRank,
    Batch,
    CreatePolicy,
    Datum,
    DatumOutput,
    Done,
    EndRank,
    ExportLayers,
    Failed,
    ForwardBackward,
    LoadState,
    Loss,
    MemoryReport,
    OptimStep,
    Outputs,
    PolicyMemory,
    PolicySpec,
    PolicyStatus,
    RemovePolicy,
    SaveState,
    Stepped,
    TrainerLimits,
)

names = st.text(max_size=20)
numbers = st.floats(allow_nan=False, width=64)
counts = st.integers(0, 1 << 40)
data = st.builds(
    Datum, tokens=st.binary(), targets=st.binary(), weights=st.binary(), logprobs=st.binary(), advantages=st.binary(),
    loss=st.integers(0, 9),
)  # fmt: skip
batches = st.builds(
    Batch,
    data=st.lists(data, max_size=3).map(tuple),
    losses=st.lists(st.builds(Loss, kind=names, config=st.dictionaries(names, numbers, max_size=2)), max_size=2).map(
        tuple
    ),
)
specs = st.builds(
    PolicySpec, policy=names, rank=counts, alpha=numbers, targets=st.lists(names, max_size=3).map(tuple), seed=counts
)
ASKS: list[Any] = [
    st.builds(CreatePolicy, spec=specs, snapshot=names),
    st.builds(ForwardBackward, policy=names, batch=batches, forward_only=st.booleans()),
    st.builds(OptimStep, policy=names, adam=st.builds(Adam, learning_rate=numbers, grad_clip_norm=numbers)),
    st.builds(SaveState, policy=names, path=names, optimizer=st.booleans(), gradients=st.booleans()),
    st.builds(LoadState, policy=names, path=names, optimizer=st.booleans()),
    st.builds(ExportLayers, policy=names, path=names, dtype=names, first=counts, last=counts),
    st.builds(RemovePolicy, policy=names),
    st.builds(AskMemory),
    st.builds(AskLimits),
    st.builds(EndRank),
]
ANSWERS: list[Any] = [
    st.builds(Done, files=st.dictionaries(names, names, max_size=2), step=counts),
    st.builds(
        Outputs,
        data=st.dictionaries(counts, st.builds(DatumOutput, logprobs=st.binary(), loss=numbers), max_size=3),
        seconds=numbers,
    ),
    st.builds(Stepped, grad_norm=numbers, step=counts, seconds=numbers),
    st.builds(PolicyStatus, policy=names, number=counts, step=counts, parameters=counts),
    st.builds(
        MemoryReport,
        policies=st.dictionaries(names, st.builds(PolicyMemory, device=counts, host=counts, disk=counts), max_size=2),
        base=counts,
        scratch=counts,
        peak=counts,
    ),
    st.builds(
        TrainerLimits, architecture=names, targets=st.lists(names, max_size=2).map(tuple), max_rank=counts,
        max_context=counts, vocabulary=counts, dtype=names, world_size=counts,
    ),
    st.builds(Failed, outcome=st.sampled_from(Outcome), message=names, field=st.none() | names),
]  # fmt: skip


@given(st.one_of(ASKS))
def test_an_ask_arrives_as_it_was_sent(ask: Any) -> None:
    codec: Codec[Any] = Codec(AskOfRank)
    assert codec.decode(codec.encode(ask)) == ask


@given(st.one_of(ANSWERS))
def test_an_answer_arrives_as_it_was_sent(answer: Any) -> None:
    codec: Codec[Any] = Codec(AnswerOfRank)
    assert codec.decode(codec.encode(answer)) == answer


def test_all_messages_are_tested() -> None:
    assert len(ASKS) == len(get_args(AskOfRank))
    assert len(ANSWERS) == len(get_args(AnswerOfRank))


@given(st.binary(max_size=64))
def test_any_bytes_are_a_message_or_are_refused(raw: bytes) -> None:
    codec: Codec[Any] = Codec(AskOfRank)
    try:
        codec.decode(raw)
    except MalformedMessage as error:
        assert error.reason


def test_a_batch_s_loss_is_the_sum_over_its_data() -> None:
    outputs = Outputs(data={1: DatumOutput(b"", 2.5), 0: DatumOutput(b"", -1.0)})
    assert outputs.loss == pytest.approx(1.5)
