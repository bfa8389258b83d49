"""Direct preference optimisation (Rafailov et al., 2023): loss = -log sigmoid(margin), with

margin = beta * ((log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected))), p the policy and q the base.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from . import service as training
from .config import Dpo
from .course import Sampler, Taken
from .data import Preference, batch, read
from .folder import Figures
from .scoring import answer_logprobs, served_logprobs
from .text import Text, datum, size


class Preferring:
    """See ``course.Recipe``. Held-out figures: the mean ``margin``, and the share of pairs with one above 0."""

    name = "dpo"

    def __init__(self, config: Dpo, text: Text, base: Any) -> None:
        """``base`` samples from the base, which is the reference."""
        self._config = config
        self._text = text
        self._base = base
        self._items = read(config.train, Preference, "train", self._misfit)
        held_out = read(config.held_out, Preference, "held_out", self._misfit)
        self._held_out = held_out[: config.held_out_items or None]

    def _misfit(self, item: Preference) -> str:
        return self._text.misfit(item.prompt, item.chosen, item.rejected)

    async def step(self, client: Any, step: int) -> Taken:
        import torch

        asked = self._pairs(batch(self._items, step, self._config.batch, self._config.seed))
        reference = [sum(row) for row in await served_logprobs(self._base, asked)]
        data = [datum(prompt, answer) for prompt, answer in asked]
        seen: dict[str, float] = {}

        def loss(_: Sequence[Any], logprobs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            own = torch.stack([row[len(prompt) - 1 :].sum() for row, (prompt, _) in zip(logprobs, asked, strict=True)])
            gained = own - torch.tensor(reference)
            margins = self._config.beta * (gained[::2] - gained[1::2])
            value = -torch.nn.functional.logsigmoid(margins).mean()
            seen.update(loss=float(value.detach()), **_figures(margins.tolist()), kl=-float(gained.detach().mean()))
            return value, {}

        passed = client.forward_backward_custom(data, loss)
        stepped = training.optimise(client, self._config.learning_rate)
        await passed
        norm = await stepped
        return Taken({**seen, "gradient_norm": norm.metrics["grad_norm:mean"]}, size(data))

    async def evaluate(self, client: Any, sampler: Sampler) -> Figures:
        asked = self._pairs(self._held_out)
        own, reference = await answer_logprobs(client, asked), await served_logprobs(self._base, asked)
        gained = [sum(ours) - sum(theirs) for ours, theirs in zip(own, reference, strict=True)]
        pairs = zip(gained[::2], gained[1::2], strict=True)
        return _figures([self._config.beta * (chosen - rejected) for chosen, rejected in pairs])

    def _pairs(self, items: Sequence[Preference]) -> list[tuple[list[int], list[int]]]:
        """(prompt, answer) in tokens: of each item the better answer, then the other."""
        return [
            (self._text.prompt(item.prompt), self._text.answer(answer))
            for item in items
            for answer in (item.chosen, item.rejected)
        ]


def _figures(margins: Sequence[float]) -> Figures:
    return {
        "margin": statistics.fmean(margins),
        "preferred": statistics.fmean(float(margin > 0) for margin in margins),
    }
