"""Fields of vLLM's OpenAI API that SGLang passes over without a word or takes in another sense: a request that means
something by one of them would get another answer than it asked for.
"""

from __future__ import annotations

from typing import Any

from wire.outcomes import InvalidRequest

COMPLETIONS = "/v1/completions"

# by field, what asks for nothing: the API's default. vLLM's repetition penalty counts the prompt's tokens too, and its
# chats have no ids in place of their messages
_DEFAULTS: dict[str, Any] = {
    "add_generation_prompt": True, "allowed_token_ids": None, "bad_words": [], "chat_template": None,
    "documents": None, "guided_choice": None, "guided_grammar": None, "guided_json": None, "guided_regex": None,
    "include_reasoning": True, "input_ids": None, "length_penalty": 1.0, "logprob_token_ids": None,
    "min_logprobs": None, "prompt_logprobs": None, "repetition_detection": None, "repetition_penalty": 1.0,
    "return_prompt_text": False, "return_token_offsets": False, "return_tokens_as_token_ids": False,
    "spaces_between_special_tokens": True, "structured_outputs": None, "suffix": None, "thinking_token_budget": None,
    "truncate_prompt_tokens": None, "use_beam_search": False, "watermarking": False,
}  # fmt: skip
_OF_COMPLETIONS = {"add_special_tokens": True}
_OF_CHAT = {"add_special_tokens": False, "echo": False}
UNHEEDED = frozenset((*_DEFAULTS, *_OF_CHAT))

# fields that must be objects, on which SGLang breaks where they are not
OBJECTS = frozenset({"chat_template_kwargs", "response_format"})
# what a chat template's renderer itself is called with
_RENDERERS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
        "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
        "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip


def asks_for_nothing(path: str, name: str, value: Any) -> bool:
    """Whether a field's ``value`` is what would hold without it."""
    defaults = _OF_COMPLETIONS if path == COMPLETIONS else _OF_CHAT
    return value in (None, defaults.get(name, _DEFAULTS.get(name, False)))


def check(path: str, name: str, value: Any) -> None:
    """Raises InvalidRequest where the field would be passed over and means something."""
    heeded = name not in UNHEEDED or (name == "echo" and path == COMPLETIONS)
    if not heeded and not asks_for_nothing(path, name, value):
        raise InvalidRequest(f"{name} is nothing that an SGLang engine heeds in such a request", field=name)


def check_object(name: str, value: Any) -> None:
    """Raises InvalidRequest for one of ``OBJECTS`` that is none, or arguments of a template that are the renderer's."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", field=name)
    renderers = sorted(_RENDERERS.intersection(value)) if name == "chat_template_kwargs" else []
    if renderers:
        raise InvalidRequest(f"{name}: {renderers[0]} is not for a template's arguments to set", field=name)
