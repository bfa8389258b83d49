"""A request's JSON body: what the gateway needs of it, and how its model is replaced.

Fields are kept as they came and written again by us, each once: what a field means can't depend on which of two
duplicates a parser takes. Fields we don't know are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from catalog.names import shown
from wire.outcomes import InvalidRequest

_Fields = dict[str, msgspec.Raw]
_decoder = msgspec.json.Decoder(_Fields)
_encoder = msgspec.json.Encoder()
_text_decoder = msgspec.json.Decoder(str)

# Fields of vLLM and SGLang by which a client could reach past its own request: adapters and files it may not name,
# other hosts, another request's id (an abort by id ends both), the scheduler's order, code to run, and expressions that
# SGLang's scheduler would match at every step, for however long that takes.
REFUSED = frozenset(
    {
        "lora_path",
        "lora_request",
        "lora_id",
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "request_id",
        "rid",
        "session_params",
        "session_id",
        "kv_hints",
        "priority",
        "prompt_embeds",
        "vllm_xargs",
        "custom_logit_processor",
        "custom_params",
        "logits_processors",
        "extra_key",
        "stop_regex",
    }
)


class Body(msgspec.Struct):
    """A parsed body. ``fields`` holds every field's JSON; ``model`` is what the client asked for."""

    model: str
    stream: bool
    fields: dict[str, msgspec.Raw]

    def fields_for(self, model: str, *, salt: str = "") -> _Fields:
        """The fields with ``model`` replaced. With ``salt``, prefix caching is confined to who shares that salt."""
        fields = {**self.fields, "model": _raw(model)}
        if salt:
            fields["cache_salt"] = _raw(salt + _text(fields.get("cache_salt")))
        return fields


def parse_body(body: bytes) -> Body:
    """Parse what is needed of ``body``. Raises InvalidRequest that names the field."""
    fields = _decode(body)
    model = fields.get("model")
    if model is None:
        raise InvalidRequest("the body has no model: name a policy (tenant/name) or a base", field="model")
    if not bytes(model).startswith(b'"'):
        raise InvalidRequest("model must be a string", field="model")
    refused = REFUSED.intersection(fields)
    if refused:
        field = min(refused)
        raise InvalidRequest(f"{field} is not for clients to set", field=field)
    return Body(_text_decoder.decode(model), _flag(fields, "stream"), fields)


def encode(fields: Mapping[str, msgspec.Raw]) -> bytes:
    """The fields as a body."""
    return _encoder.encode(fields)


def _decode(body: bytes) -> _Fields:
    try:
        if not body.isascii():
            body.decode()
        return _decoder.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("the body must be a JSON object", field="body") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", field="body") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8", field="body") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", field="body") from None


def _flag(fields: _Fields, name: str) -> bool:
    raw = fields.get(name)
    if raw is None:
        return False
    value = bytes(raw)
    if value not in (b"true", b"false", b"null"):
        raise InvalidRequest(f"{name} must be true or false, not {shown(value.decode(errors='replace'))}", field=name)
    return value == b"true"


def _text(raw: msgspec.Raw | None) -> str:
    if raw is None or bytes(raw) == b"null":
        return ""
    try:
        return ":" + _text_decoder.decode(raw)
    except msgspec.DecodeError:
        raise InvalidRequest("cache_salt must be a string", field="cache_salt") from None


def _raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(text))
