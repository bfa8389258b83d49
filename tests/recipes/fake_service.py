"""A training service in the test's own process, as its SDK looks: a model of which token follows which, really trained.

The logits of the next token are a row of a table, which is all there is to a policy; gradients and Adam are exact.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from recipes.text import Text

T = TypeVar("T")
END, VOCABULARY = 0, 128


class Tokenizer:
    """A token a character."""

    eos_token_id = END
    bos_token_id = None
    chat_template = "there is one"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, said: list[dict[str, str]], **_: bool) -> str:
        return f"<{said[0]['content']}>"


TEXT = Text(Tokenizer())


class Done(Awaitable[T], Generic[T]):
    """A future that is there."""

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:
        yield from ()
        return self._value


class Crash(Exception):
    """What a test has the service end a recipe with."""


def logprobs_of(table: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of what follows each of ``tokens``: (positions, vocabulary)."""
    rows = table[tokens]
    rows = rows - rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


class Policy:
    def __init__(self, table: np.ndarray) -> None:
        self.table = table
        self.gradient = np.zeros_like(table)
        self.moments = [np.zeros_like(table), np.zeros_like(table)]
        self.steps = 0

    def copy(self) -> Policy:
        other = Policy(self.table.copy())
        other.moments = [each.copy() for each in self.moments]
        other.steps = self.steps
        return other


class Service:
    """``crash_at`` ends whoever takes that many steps in all."""

    def __init__(self, crash_at: int | None = None) -> None:
        self.saved: dict[str, Policy] = {}
        self.begun: list[str] = []
        self.resumed: list[str] = []
        self.published: list[str] = []
        self.steps = 0
        self.crash_at = crash_at
        self._base = np.random.default_rng(0).normal(0.0, 0.3, (VOCABULARY, VOCABULARY))

    def create_lora_training_client(self, base_model: str, **given: Any) -> Done[Client]:
        self.begun.append(given["user_metadata"]["policy"])
        return Done(Client(self, f"tinker://run-{len(self.begun)}", Policy(self._base.copy())))

    def create_training_client_from_state_with_optimizer(self, path: str, **given: Any) -> Done[Client]:
        self.resumed.append(path)
        return Done(Client(self, f"tinker://resumed-{len(self.resumed)}", self.saved[path].copy()))

    def create_sampling_client(self, *, base_model: str) -> Done[Sampler]:
        return Done(Sampler(self._base))


class Client:
    def __init__(self, service: Service, name: str, policy: Policy) -> None:
        self._service, self._name, self._policy = service, name, policy

    def forward(self, data: list[Any], loss: str) -> Done[Any]:
        return Done(self._passed(data, loss, keep=False))

    def forward_backward(self, data: list[Any], loss: str) -> Done[Any]:
        return Done(self._passed(data, loss, keep=True))

    def forward_backward_custom(self, data: list[Any], loss: Callable[..., Any]) -> Done[Any]:
        leaves = [torch.tensor(self._of(datum), requires_grad=True) for datum in data]
        value, _ = loss(data, leaves)
        value.backward()
        for datum, leaf in zip(data, leaves, strict=True):
            assert leaf.grad is not None
            self._learn(datum, leaf.grad.numpy())
        return Done(SimpleNamespace(metrics={}, loss_fn_outputs=[]))

    def optim_step(self, adam: Any) -> Done[Any]:
        policy = self._policy
        if self._service.steps == self._service.crash_at:
            raise Crash
        self._service.steps += 1
        policy.steps += 1
        first, second = policy.moments
        first += (1 - adam.beta1) * (policy.gradient - first)
        second += (1 - adam.beta2) * (policy.gradient**2 - second)
        direction = first / (1 - adam.beta1**policy.steps)
        scale = np.sqrt(second / (1 - adam.beta2**policy.steps)) + adam.eps
        policy.table = policy.table - adam.learning_rate * direction / scale
        norm = float(np.linalg.norm(policy.gradient))
        policy.gradient = np.zeros_like(policy.table)
        return Done(SimpleNamespace(metrics={"grad_norm:mean": norm}))

    def save_state(self, name: str) -> Done[Any]:
        path = f"{self._name}/weights/{name}"
        self._service.saved[path] = self._policy.copy()
        return Done(SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name: str) -> Done[Any]:
        path = f"{self._name}/sampler_weights/{name}"
        self._service.published.append(path)
        return Done(SimpleNamespace(path=path))

    def save_weights_and_get_sampling_client(self) -> Done[Sampler]:
        return Done(Sampler(self._policy.table.copy()))

    def _passed(self, data: list[Any], loss: str, *, keep: bool) -> Any:
        total, outputs = 0.0, []
        for datum in data:
            inputs = {name: np.array(value.tolist()) for name, value in datum.loss_fn_inputs.items()}
            own, weights = self._of(datum), inputs["weights"]
            if loss == "cross_entropy":
                each, slope = -own, -np.ones_like(own)
            else:
                ratio = np.exp(own - inputs["logprobs"]) * (weights != 0)
                each = slope = -ratio * inputs["advantages"]
            total += float((weights * each).sum())
            outputs.append({"logprobs": own})
            if keep:
                self._learn(datum, weights * slope)
        return SimpleNamespace(metrics={"loss:sum": total}, loss_fn_outputs=outputs)

    def _of(self, datum: Any) -> np.ndarray:
        tokens = datum.model_input.to_ints()
        targets = datum.loss_fn_inputs["target_tokens"].tolist()
        return logprobs_of(self._policy.table, tokens)[np.arange(len(tokens)), targets]

    def _learn(self, datum: Any, slope: np.ndarray) -> None:
        tokens = datum.model_input.to_ints()
        targets = datum.loss_fn_inputs["target_tokens"].tolist()
        rows = -np.exp(logprobs_of(self._policy.table, tokens))
        rows[np.arange(len(tokens)), targets] += 1
        np.add.at(self._policy.gradient, tokens, slope[:, None] * rows)


class Sampler:
    def __init__(self, table: np.ndarray) -> None:
        self._table = table

    def compute_logprobs(self, prompt: Any) -> Done[list[float | None]]:
        tokens = prompt.to_ints()
        rows = logprobs_of(self._table, tokens[:-1])
        return Done([None, *rows[np.arange(len(tokens) - 1), tokens[1:]].tolist()])

    def sample(self, prompt: Any, count: int, params: Any) -> Done[Any]:
        draw = np.random.default_rng(abs(params.seed))
        return Done(SimpleNamespace(sequences=[self._one(prompt.to_ints()[-1], params, draw) for _ in range(count)]))

    def _one(self, last: int, params: Any, draw: np.random.Generator) -> Any:
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < params.max_tokens and last != END:
            row = logprobs_of(self._table, [last])[0]
            last = int(draw.choice(VOCABULARY, p=np.exp(row))) if params.temperature else int(row.argmax())
            tokens.append(last)
            logprobs.append(float(row[last]))
        return SimpleNamespace(tokens=tokens, logprobs=logprobs)
