from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.body import REFUSED, encode, parse_body
from wire.outcomes import InvalidRequest

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
FIELDS = st.dictionaries(st.text().filter(lambda name: name not in REFUSED | {"model", "stream", "cache_salt"}), JSON)


@given(fields=FIELDS, model=st.text(), engine_model=st.text(), indent=st.sampled_from([None, 1]))
def test_only_the_model_changes(fields: dict[str, Any], model: str, engine_model: str, indent: int | None) -> None:
    sent = json.dumps(fields | {"model": model}, indent=indent).encode("utf-8", "surrogatepass")
    body = parse_body(sent)
    assert body.model == model
    assert json.loads(encode(body.fields_for(engine_model))) == fields | {"model": engine_model}


def test_a_duplicate_cannot_smuggle_another_model() -> None:
    body = parse_body(b'{"model": "other@x", "n": 1, "mod\\u0065l": "acme/bot", "n": 2}')
    assert body.model == "acme/bot"
    sent = encode(body.fields_for("acme@d"))
    assert sent.count(b'"model"') == 1
    assert sent.count(b'"n"') == 1
    assert json.loads(sent) == {"model": "acme@d", "n": 2}


@pytest.mark.parametrize(
    ("body", "field", "reason"),
    [
        (b"", "body", "not JSON"),
        (b"nope", "body", "not JSON"),
        (b'{"model": "a/b"', "body", "not JSON"),
        (b'{"model": "a/b"} {}', "body", "not JSON"),
        (b'{"model": "a/b", "t": NaN}', "body", "not JSON"),
        (b'{"model": "a/b", "p": "\xff\xfe"}', "body", "not UTF-8"),
        (b"[]", "body", "object"),
        (b'"a/b"', "body", "object"),
        (b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "body", "deep"),
        (b"{}", "model", "no model"),
        (b'{"model": null}', "model", "string"),
        (b'{"model": 3}', "model", "string"),
        (b'{"model": ["a/b"]}', "model", "string"),
        (b'{"model": "a/b", "stream": "yes"}', "stream", "true or false"),
        (b'{"model": "a/b", "stream": 1}', "stream", "true or false"),
    ],
)
def test_a_bad_body_is_refused_by_the_name_of_its_field(body: bytes, field: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        parse_body(body)
    assert caught.value.field == field


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_fields_that_reach_past_the_request_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(json.dumps({"model": "acme/bot", field: {}}).encode())
    assert caught.value.field == field


def test_stream_is_known() -> None:
    assert parse_body(b'{"model": "a/b", "stream": true}').stream
    assert not parse_body(b'{"model": "a/b", "stream": false}').stream
    assert not parse_body(b'{"model": "a/b", "stream": null}').stream
    assert not parse_body(b'{"model": "a/b"}').stream


def test_tenants_on_one_base_cannot_share_a_prefix_cache() -> None:
    plain = parse_body(b'{"model": "base"}')
    assert json.loads(encode(plain.fields_for("base", salt="acme")))["cache_salt"] == "acme"
    assert json.loads(encode(plain.fields_for("base", salt="acme")))["cache_salt"] == "acme", "asked a second time"
    # a client's own salt narrows further, and can't be another tenant's
    own = parse_body(b'{"model": "base", "cache_salt": "rival"}')
    assert json.loads(encode(own.fields_for("base", salt="acme")))["cache_salt"] == "acme:rival"
    with pytest.raises(InvalidRequest, match="cache_salt"):
        parse_body(b'{"model": "base", "cache_salt": 3}').fields_for("base", salt="acme")
