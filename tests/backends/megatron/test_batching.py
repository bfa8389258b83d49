"""Batches are dealt to ranks without losing, doubling or cutting a datum, in passes of bounded size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.megatron_train.batching import complete_losses, deal, read_rows
from tests.backends.megatron.bases import VOCABULARY, datum, floats
from wire.outcomes import InvalidRequest
from wire.trainer import Batch, Loss


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    tokens=st.sampled_from([1, 64, 200, 10_000]),
    grain=st.sampled_from([1, 2, 3, 4]),
    data=st.integers(1, 4),
)
def test_every_datum_is_in_one_pass_of_one_rank(lengths: list[int], tokens: int, grain: int, data: int) -> None:
    batch = Batch(
        tuple(datum(length, place, weights=floats([place] * length)) for place, length in enumerate(lengths)),
        (Loss("cross_entropy"),),
    )
    rows = read_rows(batch, vocabulary=VOCABULARY, context=100)
    ranks = [deal(rows, tokens=tokens, grain=grain, data=data, data_rank=rank) for rank in range(data)]
    assert len({len(passes) for passes in ranks}) == 1
    placed = [place for passes in ranks for each in passes for place in each.places]
    assert sorted(placed) == list(range(len(lengths)))
    assert min(len(passes) for passes in ranks) >= 1
    for passes in ranks:
        for each in passes:
            rows_in, width = each.tokens.shape
            assert width % grain == 0
            assert rows_in == 1 or rows_in * width <= tokens
            if not each.places:
                assert not each.weights.any()
            for row, (place, length) in enumerate(zip(each.places, each.lengths, strict=True)):
                assert length == lengths[place]
                assert each.tokens[row, :length].tobytes() == batch.data[place].tokens
                assert each.targets[row, :length].tobytes() == batch.data[place].targets
                assert (each.weights[row, :length] == place).all()
                assert not each.weights[row, length:].any()


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12))
def test_the_same_batch_is_dealt_alike_each_time(lengths: list[int]) -> None:
    batch = Batch(tuple(datum(length, place) for place, length in enumerate(lengths)), (Loss("cross_entropy"),))
    rows = read_rows(batch, vocabulary=VOCABULARY, context=100)
    first, second = (deal(rows, tokens=64, grain=2, data=2, data_rank=1) for _ in range(2))
    assert [each.places for each in first] == [each.places for each in second]


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("ppo", {"clip": 0.2}, "has no setting 'clip'"),
        ("ppo", {"clip_high_threshold": float("nan")}, "is not finite"),
        ("ppo", {"clip_low_threshold": 2.0, "clip_high_threshold": 0.5}, "is 2, more than clip_high_threshold, 0.5"),
        ("cispo", {"clip_low_threshold": 4.5}, "is 4.5, more than clip_high_threshold, 4"),
    ],
)
def test_numbers_that_a_loss_can_not_have_are_refused(kind: str, config: dict[str, float], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        complete_losses((Loss(kind, config),))
    assert refused.value.field == "loss_fn_config"
