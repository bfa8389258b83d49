"""The losses of the training API: sums over tokens, each a formula on log-probabilities.

With ``lp`` the policy's log-probability of a target, ``q`` the one it was sampled with, ``r = exp(lp - q)``, ``A`` its
advantage and ``w`` its weight:

| loss | of a token | configuration |
| --- | --- | --- |
| cross_entropy | ``-w lp`` | |
| importance_sampling | ``-w r A`` | |
| ppo | ``-w min(r A, clamp(r, low, high) A)`` (arXiv 1707.06347) | clip_low_threshold 0.8, clip_high_threshold 1.2 |
| cispo | ``-w sg(clamp(r, low, high)) lp A`` (arXiv 2506.13585), ``sg``: no gradient | 0.0, 4.0 |
| dro | ``-w [lp A - beta/2 (lp - q)^2]`` (arXiv 2405.19107) | beta 0.1 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Tensor = torch.Tensor
Formula = Callable[[Tensor, Tensor, Tensor, Mapping[str, float]], Tensor]


def _cross_entropy(lp: Tensor, q: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    return -lp


def _importance_sampling(lp: Tensor, q: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    return -torch.exp(lp - q) * advantages


def _ppo(lp: Tensor, q: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(lp - q)
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _cispo(lp: Tensor, q: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    ratio = torch.exp(lp.detach() - q)
    return -ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"]) * lp * advantages


def _dro(lp: Tensor, q: Tensor, advantages: Tensor, config: Mapping[str, float]) -> Tensor:
    return -(lp * advantages - config["beta"] / 2 * (lp - q).square())


FORMULAS: dict[str, Formula] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}


def row_losses(
    logprobs: Tensor,
    weights: Tensor,
    sampled: Tensor,
    advantages: Tensor,
    losses: list[tuple[str, Mapping[str, float]]],
    loss_of_row: list[int],
) -> Tensor:
    """Each row's loss (rows,), from fp32 tensors of shape (rows, positions). Where a weight is 0 a token counts not.

    ``losses`` are the kinds with their whole configuration; ``loss_of_row`` says which of them a row has.
    """
    # what counts not, as padding, must not reach the sum or its gradient as 0 times infinity
    counted = weights != 0
    logprobs, sampled, advantages = (torch.where(counted, each, 0.0) for each in (logprobs, sampled, advantages))
    rows = logprobs.new_zeros(len(loss_of_row))
    for place in sorted(set(loss_of_row)):
        chosen = torch.tensor([row for row, loss in enumerate(loss_of_row) if loss == place], device=logprobs.device)
        kind, config = losses[place]
        formula = FORMULAS[kind]
        of_tokens = formula(logprobs[chosen], sampled[chosen], advantages[chosen], config)
        rows = rows.index_add(0, chosen, (weights[chosen] * of_tokens).sum(-1))
    return rows
