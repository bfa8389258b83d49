"""How much one request may have generated: engines take any amount, and answer nobody else meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from wire.outcomes import InvalidRequest

_int_decoder = msgspec.json.Decoder(int)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])

_CHOICES = ("n", "best_of")
_TOKENS = ("max_tokens", "max_completion_tokens")
_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")
_FLAGS = (b"true", b"false")


class GenerationBounds(msgspec.Struct, frozen=True):
    """``max_choices`` counts the answers that a request asks for, over all its prompts; ``max_generated_tokens`` what
    all of them may have together; ``max_logprobs`` the alternatives told for each token.
    """

    max_choices: int
    max_generated_tokens: int
    max_logprobs: int

    def check(self, fields: Mapping[str, msgspec.Raw]) -> None:
        """Raises InvalidRequest that names the field of a body which asks for too much, or not for a whole number."""
        for field in _LOGPROBS:
            if bytes(fields.get(field, b"")) not in _FLAGS:
                self._number(fields, field, least=0, most=self.max_logprobs)
        prompts = _prompts(fields.get("prompt"))
        if prompts > self.max_choices:
            raise InvalidRequest(f"prompt holds {prompts} prompts: {self.max_choices} at most", field="prompt")
        choices = max(self._number(fields, field, least=1, most=self.max_choices // prompts) for field in _CHOICES)
        for field in _TOKENS:
            self._number(fields, field, least=0, most=self.max_generated_tokens // (choices * prompts))

    def _number(self, fields: Mapping[str, msgspec.Raw], field: str, *, least: int, most: int) -> int:
        """The field's value, or ``least`` where it has none."""
        raw = fields.get(field)
        if raw is None or bytes(raw) == b"null":
            return least
        try:
            number = _int_decoder.decode(raw)
        except msgspec.DecodeError:
            raise InvalidRequest(f"{field} must be a whole number", field=field) from None
        if not least <= number <= most:
            raise InvalidRequest(f"{field} must be from {least} to {most} in this request, not {number}", field=field)
        return number


def _prompts(raw: msgspec.Raw | None) -> int:
    """How many prompts the field holds: a list is one prompt where it is of token ids."""
    if raw is None or not bytes(raw).startswith(b"["):
        return 1
    items = _list_decoder.decode(raw)
    return len(items) if items and bytes(items[0])[:1] in (b'"', b"[") else 1
