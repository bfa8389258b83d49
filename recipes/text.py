"""Text into tokens, and tokens into what the training API takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker import types

from wire.outcomes import InvalidRequest


class Text:
    """``tokenizer`` is one of transformers; see ``Config`` for ``chat`` and ``stop``. ``context`` is how many tokens
    the base is trained on at once, 0 where that is not known.
    """

    def __init__(self, tokenizer: Any, *, chat: bool = False, stop: Sequence[str] = (), context: int = 0) -> None:
        if chat and not getattr(tokenizer, "chat_template", None):
            raise InvalidRequest("chat: the tokenizer has no chat template", field="chat")
        self._tokenizer = tokenizer
        self._chat = chat
        self._stop = list(stop) or None
        self._context = context
        self.end: int | None = tokenizer.eos_token_id

    def prompt(self, text: str) -> list[int]:
        """Token ids, never none."""
        if self._chat:
            said = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        return self._tokens(text) or [self._tokenizer.bos_token_id or self.end or 0]

    def answer(self, text: str, *, ended: bool = True) -> list[int]:
        """Token ids, with the end token unless ``ended`` is false."""
        return self._tokens(text) + ([self.end] if ended and self.end is not None else [])

    def misfit(self, prompt: str, *answers: str) -> str:
        """Why a prompt with one of ``answers`` behind it (without any: one token) is too long; empty where none is."""
        if not self._context:
            return ""
        # the last token is a target alone
        total = len(self.prompt(prompt)) + max((len(self.answer(each)) - 1 for each in answers), default=1)
        return f"it has {total} tokens, and the base's context is {self._context}" if total > self._context else ""

    def read(self, tokens: Sequence[int]) -> str:
        """What was sampled, without the end token."""
        return str(self._tokenizer.decode([token for token in tokens if token != self.end]))

    def sampling(self, *, max_tokens: int, temperature: float, seed: int) -> types.SamplingParams:
        return types.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, stop=self._stop)

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def datum(prompt: Sequence[int], answer: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """One sequence: each position's target is the next token. ``inputs`` have a value for each of ``answer``'s tokens.

    ``weights`` are 1 for the answer unless they are given; what belongs to the prompt is 0.
    """
    tokens = [*prompt, *answer]
    before = len(prompt) - 1
    fields: dict[str, types.TensorData] = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])
    }
    for name, values in {"weights": [1.0] * len(answer), **inputs}.items():
        padded = [0.0] * before + [float(value) for value in values]
        fields[name] = types.TensorData(data=padded, dtype="float32", shape=[len(padded)])
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=fields)


def size(data: Sequence[types.Datum]) -> int:
    """Tokens in all."""
    return sum(each.model_input.length for each in data)
