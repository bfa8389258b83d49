"""Each loss against its formula written out for one token, with its gradient, in any mixture."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from backends.megatron_train.batching import LOSS_DEFAULTS
from backends.megatron_train.losses import row_losses

CONFIGS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.6},
}
numbers = st.floats(-2, 2, allow_nan=False, width=32)
token = st.tuples(st.floats(-6, -0.125, width=32), st.floats(-6, -0.125, width=32), numbers, numbers)


def expected(kind: str, lp: float, q: float, a: float, w: float) -> tuple[float, float]:
    """(loss, its derivative by lp) of one token."""
    config = CONFIGS[kind]
    r = math.exp(lp - q)
    if kind == "cross_entropy":
        return -w * lp, -w
    if kind == "importance_sampling":
        return -w * r * a, -w * r * a
    if kind == "ppo":
        clipped = min(max(r, config["clip_low_threshold"]), config["clip_high_threshold"])
        if r * a <= clipped * a:
            return -w * r * a, -w * r * a
        return -w * clipped * a, 0.0
    if kind == "cispo":
        clipped = min(max(r, config["clip_low_threshold"]), config["clip_high_threshold"])
        return -w * clipped * lp * a, -w * clipped * a
    return -w * (lp * a - config["beta"] / 2 * (lp - q) ** 2), -w * (a - config["beta"] * (lp - q))


@given(st.lists(st.tuples(st.sampled_from(sorted(CONFIGS)), st.lists(token, min_size=3, max_size=3)), min_size=1))
def test_a_mixture_of_losses_equals_each_token_alone(rows: list[tuple[str, list[tuple[float, ...]]]]) -> None:
    lp, q, a, w = (torch.tensor([[t[i] for t in tokens] for _, tokens in rows]) for i in range(4))
    lp.requires_grad_()
    kinds = sorted({kind for kind, _ in rows})
    losses = row_losses(lp, w, q, a, [(kind, CONFIGS[kind]) for kind in kinds], [kinds.index(kind) for kind, _ in rows])
    losses.sum().backward()
    for row, (kind, tokens) in enumerate(rows):
        alone = [expected(kind, *token) for token in tokens]
        assert losses[row].item() == pytest.approx(sum(loss for loss, _ in alone), rel=1e-4, abs=1e-4)
        for place, (_, slope) in enumerate(alone):
            ratio = math.exp(tokens[place][0] - tokens[place][1])
            if kind == "ppo" and min(abs(ratio - bound) for bound in CONFIGS["ppo"].values()) < 1e-4:
                continue  # where the two branches meet there is no one slope
            assert lp.grad is not None
            assert lp.grad[row, place].item() == pytest.approx(slope, rel=1e-3, abs=1e-4)


def test_a_token_of_weight_zero_has_no_part_even_where_its_formula_overflows() -> None:
    lp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss = row_losses(
        lp, torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, -1000.0]]), torch.ones(1, 2),
        [("importance_sampling", {})], [0],
    )  # fmt: skip
    loss.sum().backward()
    assert loss.tolist() == [-1.0]
    assert lp.grad is not None
    assert lp.grad.tolist() == [[-1.0, 0.0]]


def test_every_loss_has_its_defaults() -> None:
    assert LOSS_DEFAULTS.keys() == CONFIGS.keys()
    assert all(LOSS_DEFAULTS[kind].keys() == config.keys() for kind, config in CONFIGS.items())
