"""How SGLang 0.5.23 is asked: its names of adapters, what it would ignore, and its errors in vLLM's form.

A request that reads tokens by their ids goes to ``/generate`` (``token_level.py``); others keep their form.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from backends.dialect import Ask, Fields
from wire.outcomes import InvalidRequest

from .token_level import generate, is_token_level, value_of
from .unheeded import COMPLETIONS, OBJECTS, UNHEEDED, check, check_object

# (SGLang's name of a field) by vLLM's
_RENAMED = {"include_stop_str_in_output": "no_stop_trim"}
# how FastAPI begins to tell of fields; bounded, and with one way to match, since clients write what comes after it
_FIRST_UNREADABLE = re.compile(
    r"[0-9]{1,9} validation errors?:\n  \{'type': '\w{1,99}', "
    r"'loc': \('body', '(?P<field>\w{1,99})'(?:[^()\n]|\(\)){0,999}\), "
    r"""'msg': (?:'(?P<reason>(?:[^'\\\n]|\\.){1,999})'|"(?P<quoted>[^"\n]{1,999})"), '"""
)
# it ends with where in the server that was
_SOURCE = '\n  File "'
# the lease promised that the engine has the adapter: that it hasn't is no fault of the client's
_ADAPTER_IS_GONE = ("never been loaded", "LoRA adapter")


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""
    param: Any = None


class _Nested(msgspec.Struct):
    error: _Error


class SglangDialect:
    """See ``backends.dialect.Dialect``."""

    def model(self, base: str, adapter: str) -> str:
        return base if adapter == base else f"{base}:{adapter}"

    def ask(self, path: str, fields: Fields) -> Ask:
        # it takes null for hardly any field
        given = {name: value for name, value in fields.items() if bytes(value) != b"null"}
        if path == COMPLETIONS and is_token_level(given):
            return generate(given)
        if bytes(given.get("continue_final_message", b"false")) == b"true":
            # vLLM wants this said beside it; SGLang means it
            given.pop("add_generation_prompt", None)
        for name in UNHEEDED.intersection(given):
            check(path, name, value_of(name, given[name]))
        for name in OBJECTS.intersection(given):
            check_object(name, value_of(name, given[name]))
        if bytes(given.get("top_k", b"")) == b"0":
            # all tokens, in vLLM's words
            given["top_k"] = msgspec.Raw(b"-1")
        if "seed" in given and bytes(given.get("n", b"1")) != b"1":
            raise InvalidRequest(
                "an SGLang engine gives a seed's one answer n times: ask for one at a time", field="seed"
            )
        return Ask(path, {_RENAMED.get(name, name): value for name, value in given.items()})

    def refusal(self, status: int, body: bytes) -> tuple[int, bytes]:
        error = _without_internals(_error_in(body))
        if status == 400 and any(sign in error.message for sign in _ADAPTER_IS_GONE):
            status = 404
        told = {"message": error.message, "type": error.type, "param": error.param, "code": status}
        return status, msgspec.json.encode({"error": told})


SGLANG = SglangDialect()


def _without_internals(error: _Error) -> _Error:
    """The error without the server's paths; of a field that could not be read, what is wrong with it and its name."""
    found = _FIRST_UNREADABLE.match(error.message)
    if found is not None:
        return _Error(f"{found['field']}: {found['reason'] or found['quoted']}", error.type, found["field"])
    return _Error(error.message.partition(_SOURCE)[0].rstrip(), error.type, error.param)


def _error_in(body: bytes) -> _Error:
    """What an error body says, in either of SGLang's forms: the error itself, or an object around it."""
    for kind in (_Nested, _Error):
        try:
            found: Any = msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError:
            continue
        told: _Error = found.error if isinstance(found, _Nested) else found
        if told.message:
            return told
    return _Error(body[:500].decode(errors="replace"))
