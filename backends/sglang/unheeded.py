"""Fields of vLLM's OpenAI API that SGLang passes over without a word: a request that means something by one of them
would get another answer than it asked for.
"""

from __future__ import annotations

from typing import Any

from wire.outcomes import InvalidRequest

COMPLETIONS = "/v1/completions"

# by field, what asks for nothing: the API's default
_DEFAULTS: dict[str, Any] = {
    "add_generation_prompt": True, "allowed_token_ids": None, "bad_words": [], "chat_template": None,
    "documents": None, "guided_choice": None, "guided_grammar": None, "guided_json": None, "guided_regex": None,
    "include_reasoning": True, "length_penalty": 1.0, "logprob_token_ids": None, "min_logprobs": None,
    "prompt_logprobs": None, "repetition_detection": None, "return_prompt_text": False, "return_token_offsets": False,
    "return_tokens_as_token_ids": False, "spaces_between_special_tokens": True, "structured_outputs": None,
    "suffix": None, "thinking_token_budget": None, "truncate_prompt_tokens": None, "use_beam_search": False,
    "watermarking": False,
}  # fmt: skip
_OF_COMPLETIONS = {"add_special_tokens": True}
_OF_CHAT = {"add_special_tokens": False, "echo": False}
UNHEEDED = frozenset((*_DEFAULTS, *_OF_CHAT))


def asks_for_nothing(path: str, name: str, value: Any) -> bool:
    """Whether a field's ``value`` is what would hold without it."""
    defaults = _OF_COMPLETIONS if path == COMPLETIONS else _OF_CHAT
    return value in (None, defaults.get(name, _DEFAULTS.get(name, False)))


def check(path: str, name: str, value: Any) -> None:
    """Raises InvalidRequest where the field would be passed over and means something."""
    heeded = name not in UNHEEDED or (name == "echo" and path == COMPLETIONS)
    if not heeded and not asks_for_nothing(path, name, value):
        raise InvalidRequest(f"{name} is nothing that an SGLang engine heeds in such a request", field=name)
