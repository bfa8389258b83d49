"""Inside the API server: a request that would end the scheduler is refused, one that asks for too much gets less."""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from . import versions
from .parameters import bounded

_stock_status = TokenizerManager.init_running_status
_stock_validate = TokenizerManager._validate_one_request
_stock_last_message = OpenAIServingChat._handle_last_assistant_message


def patch() -> None:
    """Replace how requests are looked at. Raises UnsupportedSglang."""
    versions.check(versions.REQUEST_SEAMS)
    TokenizerManager.init_running_status = init_running_status
    TokenizerManager._validate_one_request = validate
    OpenAIServingChat._handle_last_assistant_message = last_message


@functools.wraps(_stock_status)
def init_running_status(self: Any) -> None:
    """A request that may have more tokens than there is room for in the context ends with it, as on vLLM."""
    _stock_status(self)
    self.validate_total_tokens = False


@functools.wraps(_stock_validate)
def validate(self: Any, obj: Any, input_ids: Any) -> None:
    """A prompt without tokens ends a stock server, and so do tokens that the vocabulary lacks and some parameters.
    Raises ValueError, which is answered 400.
    """
    vocabulary = self.model_config.vocab_size
    if input_ids is not None and not len(input_ids):
        raise ValueError("the prompt has no tokens")
    if input_ids and not 0 <= min(input_ids) <= max(input_ids) < vocabulary:
        raise ValueError(f"the prompt has a token id that is not within 0 to {vocabulary - 1}")
    if isinstance(obj.sampling_params, dict):
        obj.sampling_params = bounded(obj.sampling_params, vocabulary=vocabulary, context=self.context_len)
    _stock_validate(self, obj, input_ids)


@functools.wraps(_stock_last_message)
def last_message(self: Any, messages: list[dict[str, Any]], request: Any) -> Any:
    """Whoever said the last message said it: SGLang would make the user's of an assistant's."""
    if not request.continue_final_message:
        return messages, None
    return _stock_last_message(self, messages, request)
