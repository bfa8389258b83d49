"""Supervised fine-tuning: the mean negative log-likelihood of right answers, token by token."""

from __future__ import annotations

import statistics
from typing import Any

from . import service as training
from .config import Sft
from .course import Sampler, Taken
from .data import Example, batch, read
from .folder import Figures
from .rewards import exact
from .scoring import answer_logprobs, said
from .text import Text, datum, size


class Supervised:
    """See ``course.Recipe``.

    Held-out figures: ``loss`` is what is trained for; ``accuracy`` the share of items to which the served policy's
    likeliest tokens are the very answer; with labels, ``label_accuracy`` the share whose answer is the likeliest label.
    """

    name = "sft"

    def __init__(self, config: Sft, text: Text) -> None:
        """Raises InvalidRequest for files that aren't as they should be."""
        self._config = config
        self._text = text
        self._items = read(config.train, Example, "train", self._misfit)
        held_out = read(config.held_out, Example, "held_out", self._misfit) if config.held_out else []
        self._held_out = held_out[: config.held_out_items or None]

    def _misfit(self, item: Example) -> str:
        return self._text.misfit(item.prompt, item.answer)

    async def step(self, client: Any, step: int) -> Taken:
        items = batch(self._items, step, self._config.batch, self._config.seed)
        tokens = [(self._text.prompt(item.prompt), self._text.answer(item.answer)) for item in items]
        total = sum(len(answer) for _, answer in tokens)
        data = [datum(prompt, answer, weights=[1 / total] * len(answer)) for prompt, answer in tokens]
        passed = client.forward_backward(data, "cross_entropy")
        stepped = training.optimise(client, self._config.learning_rate)
        output, norm = await passed, await stepped
        figures = {"loss": output.metrics["loss:sum"], "gradient_norm": norm.metrics["grad_norm:mean"]}
        return Taken(figures, size(data))

    async def evaluate(self, client: Any, sampler: Sampler) -> Figures:
        if not self._held_out:
            return {}
        prompts = [self._text.prompt(item.prompt) for item in self._held_out]
        answers = [self._text.answer(item.answer) for item in self._held_out]
        scores = await answer_logprobs(client, list(zip(prompts, answers, strict=True)))
        figures = {"loss": -sum(map(sum, scores)) / sum(map(len, scores)), "accuracy": await self._accuracy(sampler)}
        if self._config.labels:
            figures["label_accuracy"] = await self._label_accuracy(client, prompts)
        return figures

    async def _accuracy(self, sampler: Sampler) -> float:
        told = await said(
            await sampler(),
            self._text,
            self._held_out,
            count=1,
            max_tokens=self._config.max_tokens,
            temperature=0.0,
            seed=0,
        )
        right = [
            exact(item, self._text.read(first.tokens)) for item, (first,) in zip(self._held_out, told, strict=True)
        ]
        return statistics.fmean(right)

    async def _label_accuracy(self, client: Any, prompts: list[list[int]]) -> float:
        labels = self._config.labels
        asked = [(prompt, self._text.answer(label, ended=False)) for prompt in prompts for label in labels]
        scores = [sum(row) for row in await answer_logprobs(client, asked)]
        right = 0
        for place, item in enumerate(self._held_out):
            own = scores[place * len(labels) : (place + 1) * len(labels)]
            right += labels[own.index(max(own))] == item.answer
        return right / len(self._held_out)
