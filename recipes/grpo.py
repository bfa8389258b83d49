"""Group-relative policy optimisation (Shao et al., 2024): an answer's advantage is its reward among its group's.

advantage = (reward - mean) / (standard deviation + epsilon), the same for all tokens of an answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from wire.outcomes import EngineFailed

from . import service as training
from .config import Grpo
from .course import Sampler, Taken
from .data import Example, batch, read
from .folder import Figures
from .rewards import named
from .scoring import said, served_logprobs
from .text import Text, datum, size

_EPSILON = 1e-6


class Rollout(NamedTuple):
    """A sampled answer, in tokens, with the engine's log-probability of each."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float


class Reinforced:
    """See ``course.Recipe``. Held-out figures: the mean ``reward`` of answers sampled as in training."""

    name = "grpo"

    def __init__(self, config: Grpo, text: Text, base: Any) -> None:
        """``base`` samples from the base, and is asked only where straying from it is made dear."""
        self._config = config
        self._text = text
        self._base = base
        self._reward = named(config.reward)
        self._items = read(config.train, Example, "train", self._misfit)
        self._held_out = read(config.held_out, Example, "held_out", self._misfit)[: config.held_out_items or None]

    def _misfit(self, item: Example) -> str:
        return self._text.misfit(item.prompt)

    async def step(self, client: Any, step: int) -> Taken:
        config = self._config
        sampler = await client.save_weights_and_get_sampling_client()
        items = batch(self._items, step, config.batch, config.seed)
        groups = await self._rollouts(sampler, items, config.group, seed=config.seed * 1_000_003 + step)
        told = [
            pair for group in groups for pair in zip(group, advantages([each.reward for each in group]), strict=True)
        ]
        # an answer of no tokens counts in its group, and there is nothing of it to learn from
        learnt = [(each, gain) for each, gain in told if each.tokens]
        if not learnt:
            raise EngineFailed(f"step {step}: all answers are empty, so there is nothing to learn from")
        every, worth = [each for each, _ in learnt], [gain for _, gain in learnt]
        strayed = await self._strayed(every)
        mean = statistics.fmean(away for row in strayed for away in row)
        total = sum(len(each.tokens) for each in every)
        data = [
            datum(
                each.prompt,
                each.tokens,
                weights=[1 / total] * len(each.tokens),
                logprobs=each.logprobs,
                advantages=[gain - config.kl_coefficient * (away - mean) for away in row],
            )
            for each, gain, row in zip(every, worth, strayed, strict=True)
        ]
        passed = client.forward_backward(data, config.loss)
        stepped = training.optimise(client, config.learning_rate)
        output, norm = await passed, await stepped
        figures = {
            "loss": output.metrics["loss:sum"],
            "reward": statistics.fmean(each.reward for each, _ in told),
            "kl": _divergence(every, output),
            "answer_tokens": total / len(told),
            "gradient_norm": norm.metrics["grad_norm:mean"],
        }
        if config.kl_coefficient:
            figures["kl_base"] = mean
        return Taken(figures, size(data) + total)

    async def evaluate(self, client: Any, sampler: Sampler) -> Figures:
        groups = await self._rollouts(await sampler(), self._held_out, self._config.evaluation_samples, seed=-1)
        return {"reward": statistics.fmean(each.reward for group in groups for each in group)}

    async def _rollouts(self, sampler: Any, items: Sequence[Example], count: int, *, seed: int) -> list[list[Rollout]]:
        told = await said(
            sampler, self._text, items, count=count, max_tokens=self._config.max_tokens,
            temperature=self._config.temperature, seed=seed,
        )  # fmt: skip
        return [
            [
                Rollout(
                    self._text.prompt(item.prompt), list(each.tokens), list(each.logprobs or ()),
                    self._reward(item, self._text.read(each.tokens)),
                )
                for each in group
            ]
            for item, group in zip(items, told, strict=True)
        ]  # fmt: skip

    async def _strayed(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """How much likelier each token is than under the base, in nats; zeros where that costs nothing."""
        if not self._config.kl_coefficient:
            return [[0.0] * len(each.tokens) for each in rollouts]
        base = await served_logprobs(self._base, [(each.prompt, each.tokens) for each in rollouts])
        return [
            [own - other for own, other in zip(each.logprobs, row, strict=True)]
            for each, row in zip(rollouts, base, strict=True)
        ]


def advantages(rewards: Sequence[float]) -> list[float]:
    """Of one group."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (deviation + _EPSILON) for reward in rewards]


def _divergence(rollouts: Sequence[Rollout], output: Any) -> float:
    """The engine's policy from the trainer's, in nats a token: the mean of r - 1 - log r over what was sampled."""
    found = []
    for rollout, each in zip(rollouts, output.loss_fn_outputs, strict=True):
        trained = each["logprobs"].tolist()[len(rollout.prompt) - 1 :]
        ratios = [own - sampled for own, sampled in zip(trained, rollout.logprobs, strict=True)]
        found += [math.exp(ratio) - 1 - ratio for ratio in ratios]
    return statistics.fmean(found)
