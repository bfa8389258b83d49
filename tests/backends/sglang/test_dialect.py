"""What SGLang is asked in place of what clients ask vLLM, and what its answers become; the forms are the server's."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from backends.dialect import Ask
from backends.registry import dialect_of
from gateway.training.completions import read_answer, request_body
from gateway.training.work import Sample
from wire.outcomes import EngineFailed, InvalidRequest

DIALECT = dialect_of("sglang")
ADAPTER = "acme@" + "0a" * 32
MODEL = f"tiny:{ADAPTER}"


def ask(path: str = "/v1/completions", **fields: Any) -> Ask:
    raw = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in ({"model": MODEL} | fields).items()}
    return DIALECT.ask(path, raw)


def told(asked: Ask) -> dict[str, Any]:
    return {name: json.loads(bytes(value)) for name, value in asked.fields.items()}


def sequence(ids: list[int], *, end: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    """As ``/generate`` gives it."""
    tokens = [[-0.5 * token, token, None] for token in ids]
    info = {"id": "x", "finish_reason": end or {"type": "length", "length": len(ids)}, "prompt_tokens": 3}
    info |= {"completion_tokens": len(ids), "output_token_logprobs": tokens} | meta
    return {"text": "abc", "output_ids": ids, "meta_info": info}


def answered(asked: Ask, *sequences: dict[str, Any]) -> dict[str, Any]:
    assert asked.answer is not None
    found: dict[str, Any] = json.loads(asked.answer(json.dumps(sequences).encode()))
    return found


def test_an_adapter_is_asked_for_beside_its_base() -> None:
    assert DIALECT.model("tiny", ADAPTER) == MODEL
    assert DIALECT.model("tiny", "tiny") == "tiny"


def test_an_ordinary_request_keeps_its_form() -> None:
    asked = ask(path="/v1/chat/completions", messages=[], max_tokens=5, seed=3, stop=None, user=None, stream=True)
    assert asked.path == "/v1/chat/completions"
    assert asked.answer is None
    assert told(asked) == {"model": MODEL, "messages": [], "max_tokens": 5, "seed": 3, "stream": True}


def test_a_field_that_it_calls_otherwise_is_renamed() -> None:
    asked = ask(prompt="x", stop=["b"], include_stop_str_in_output=True)
    assert told(asked) == {"model": MODEL, "prompt": "x", "stop": ["b"], "no_stop_trim": True}


@pytest.mark.parametrize("field", ["structured_outputs", "bad_words", "allowed_token_ids", "use_beam_search"])
def test_what_it_would_pass_over_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field) as caught:
        ask(prompt="x", **{field: ["x"]})
    assert caught.value.field == field
    ask(prompt="x", **{field: None})


@pytest.mark.parametrize(
    ("path", "name", "means", "default"),
    [
        ("/v1/chat/completions", "add_generation_prompt", False, True),
        ("/v1/chat/completions", "chat_template", "{{ messages }}", None),
        ("/v1/chat/completions", "documents", [{"title": "a", "text": "b"}], None),
        ("/v1/chat/completions", "add_special_tokens", True, False),
        ("/v1/chat/completions", "echo", True, False),
        ("/v1/chat/completions", "input_ids", [87], None),
        ("/v1/chat/completions", "include_reasoning", False, True),
        ("/v1/completions", "add_special_tokens", False, True),
        ("/v1/completions", "spaces_between_special_tokens", False, True),
        ("/v1/completions", "length_penalty", 0.5, 1.0),
        ("/v1/completions", "suffix", "end", None),
        ("/v1/completions", "repetition_penalty", 1.5, 1.0),
        ("/v1/chat/completions", "response_format", "json", {"type": "text"}),
        ("/v1/chat/completions", "chat_template_kwargs", 5, {"enable_thinking": False}),
        ("/v1/chat/completions", "chat_template_kwargs", {"messages": []}, {}),
    ],
)
def test_a_default_that_is_spelled_out_is_none_of_its_concern(path: str, name: str, means: Any, default: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(path, prompt="x", **{name: means})
    assert caught.value.field == name
    ask(path, prompt="x", **{name: default})
    if path == "/v1/completions":
        with pytest.raises(InvalidRequest) as caught:
            ask(path, prompt="x", prompt_logprobs=1, **{name: means})
        assert caught.value.field == name
        ask(path, prompt="x", prompt_logprobs=1, **{name: default})


def test_a_message_may_be_continued_as_vllm_wants_it_said() -> None:
    path = "/v1/chat/completions"
    asked = told(ask(path, messages=[], continue_final_message=True, add_generation_prompt=False))
    assert asked["continue_final_message"] is True
    assert "add_generation_prompt" not in asked
    assert told(ask("/v1/completions", prompt="x", echo=True))["echo"] is True


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/chat/completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "stream"),
        ("/v1/completions", {"prompt_logprobs": 1, "echo": True}, "echo"),
        ("/v1/completions", {"prompt_logprobs": "many"}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 1, "prompt": []}, "prompt"),
        ("/v1/completions", {"prompt_logprobs": 1, "prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt_logprobs": 1, "prompt": ["x", ""]}, "prompt"),
        ("/v1/completions", {"prompt_logprobs": 1, "prompt": [[1], []]}, "prompt"),
        ("/v1/completions", {"prompt_logprobs": 1, "prompt": [1, "x"]}, "prompt"),
        ("/v1/completions", {"prompt_logprobs": 1, "prompt": 7}, "prompt"),
        ("/v1/completions", {"prompt_logprobs": 1, "n": "two"}, "n"),
    ],
)
def test_what_it_cannot_be_asked_by_ids_is_refused_by_name(path: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(path, **({"prompt": "x"} | fields))
    assert caught.value.field == field


def test_several_answers_to_one_seed_would_all_be_the_same() -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(path="/v1/chat/completions", messages=[], seed=3, n=2)
    assert refused.value.field == "seed"
    assert told(ask(path="/v1/chat/completions", messages=[], seed=3, n=1))["seed"] == 3
    assert told(ask(path="/v1/chat/completions", messages=[], n=2))["n"] == 2


def test_each_sequence_is_asked_for_with_a_seed_of_its_own() -> None:
    asked = ask(
        prompt=[[1, 2], [3]], n=2, max_tokens=4, seed=7, temperature=0.5, top_k=0, stop_token_ids=[9], logprobs=2,
        prompt_logprobs=0, return_tokens_as_token_ids=True, cache_salt="s",
    )  # fmt: skip
    assert asked.path == "/generate"
    body = told(asked)
    shared = {"max_new_tokens": 4, "temperature": 0.5, "top_k": -1, "stop_token_ids": [9]}
    assert body.pop("sampling_params") == [shared | {"sampling_seed": seed} for seed in (7, 8, 7, 8)]
    assert body == {
        "input_ids": [[1, 2], [1, 2], [3], [3]], "lora_path": [ADAPTER] * 4, "return_logprob": True,
        "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": False, "cache_salt": "s",
    }  # fmt: skip


def test_the_base_is_asked_for_without_an_adapter() -> None:
    body = told(ask(model="tiny", prompt="x", prompt_logprobs=0, max_tokens=None))
    assert "lora_path" not in body
    assert body["text"] == ["x"]
    assert body["sampling_params"] == [{"max_new_tokens": 16}]


def test_a_sample_of_the_training_api_comes_back_as_from_vllm() -> None:
    sample = Sample(
        prompt=(1, 2, 3), count=2, max_tokens=2, seed=1, stop=(7,), prompt_logprobs=True, topk_prompt=1, topk_sample=1
    )
    asked = ask(**request_body(MODEL, sample, most_tokens=100))
    first = [None, 1, None]
    scored = {
        "input_token_logprobs": [first, [-2.0, 2, None], [-3.0, 3, None]],
        "input_top_logprobs": [None, [[-0.1, 9, None]], [[-3.0, 3, None]]],
    }
    stopped = {"type": "stop", "matched": 7}
    one = sequence([4, 7], end=stopped, output_top_logprobs=[[[-0.2, 8, None]], [[-3.5, 7, None]]], **scored)
    other = sequence([5, 6], output_top_logprobs=[[[-0.3, 8, None]], [[-0.4, 8, None]]], **scored)
    assert asked.answer is not None
    found = read_answer(sample, asked.answer(json.dumps([one, other]).encode()))
    assert [(s.stopped, list(memoryview(s.tokens).cast("i"))) for s in found.sequences] == [
        (True, [4, 7]), (False, [5, 6]),
    ]  # fmt: skip
    assert list(memoryview(found.sequences[0].logprobs).cast("f")) == [-2.0, -3.5]
    assert found.sequences[0].topk is not None
    assert list(memoryview(found.sequences[0].topk.tokens).cast("i")) == [8, 7]
    scores = list(memoryview(found.prompt_logprobs).cast("f"))
    assert scores[1:] == [-2.0, -3.0]
    assert scores[0] != scores[0], "there is none of the first token"
    assert found.topk_prompt is not None
    assert list(memoryview(found.topk_prompt.tokens).cast("i")) == [0, 9, 3]


def test_tokens_are_spelled_by_text_unless_ids_were_asked_for() -> None:
    asked = ask(prompt="x", prompt_logprobs=0, logprobs=1)
    meta = {"output_token_logprobs": [[-1.0, 4, "d"]], "output_top_logprobs": [[[-0.5, 5, "e"]]]}
    (choice,) = answered(asked, sequence([4], **meta, input_token_logprobs=[[None, 1, "x"]]))["choices"]
    assert choice["logprobs"] == {"tokens": ["d"], "token_logprobs": [-1.0], "top_logprobs": [{"e": -0.5, "d": -1.0}]}
    assert choice["prompt_logprobs"] == [None]
    assert "token_ids" not in choice


def test_usage_counts_each_prompt_once() -> None:
    asked = ask(prompt=["x", "y"], n=2, prompt_logprobs=0)
    rows = {"input_token_logprobs": [[None, 1, "x"]]}
    usage = answered(asked, *(sequence([1, 2], **rows) for _ in range(4)))["usage"]
    assert usage == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}


def test_a_sequence_that_was_given_up_is_no_answer() -> None:
    whole, part = sequence([1, 2]), sequence([1], end={"type": "abort", "message": "out of memory"})
    with pytest.raises(EngineFailed, match="gave up"):
        answered(ask(prompt="x", n=2, prompt_logprobs=0), whole, part)


@pytest.mark.parametrize("answer", [b"", b"{}", b"[]", b'[{"text": "x"}]', b'{"error": {"message": "no"}}'])
def test_an_answer_that_is_none_is_the_engines_failure(answer: bytes) -> None:
    asked = ask(prompt="x", prompt_logprobs=0)
    assert asked.answer is not None
    with pytest.raises(EngineFailed):
        asked.answer(answer)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"object": "error", "message": "max_tokens is bad", "type": "BadRequestError", "code": 400},
            "max_tokens is bad",
        ),
        ({"error": {"message": "temperature is bad"}}, "temperature is bad"),
        ({"detail": "no"}, '{"detail": "no"}'),
        ({"error": "no"}, '{"error": "no"}'),
    ],
)
def test_refusals_come_in_one_form(body: dict[str, Any], message: str) -> None:
    status, document = DIALECT.refusal(400, json.dumps(body).encode())
    error = json.loads(document)["error"]
    assert (status, error["message"], error["code"]) == (400, message, 400)


def test_a_refusal_names_the_field_and_no_place_in_the_server() -> None:
    told = (
        "1 validation error:\n  {'type': 'int_from_float', 'loc': ('body', 'top_k'), 'msg': 'Input should be a valid "
        "integer', 'input': 2.5}\n\n  File \"/srv/sglang/http_server.py\", line 1870, in openai_v1_chat_completions"
    )
    _, document = DIALECT.refusal(400, json.dumps({"message": told}).encode())
    error = json.loads(document)["error"]
    assert (error["message"], error["param"]) == ("top_k: Input should be a valid integer", "top_k")
    other = 'what is this?\n  File "/srv/sglang/other.py", line 1'
    _, document = DIALECT.refusal(400, json.dumps({"message": other}).encode())
    assert json.loads(document)["error"]["message"] == "what is this?"


@pytest.mark.parametrize(
    "told",
    [
        # what fails as a whole has no field, and the client's own text within
        "1 validation error:\n  {'type': 'value_error', 'loc': ('body',), 'msg': 'Value error, bad: \"{TEXT}\"'}",
        "1 validation error:\n  {'type': 'x', 'loc': ('body', 'a', '{TEXT}'), 'msg': 'no', 'input': '{TEXT}'}",
        "1 validation error:\n  {'type': 'x', 'loc': ('body', 'a'), 'msg': 'no {TEXT}', 'input': '{TEXT}'}",
        "{TEXT}",
    ],
)
@pytest.mark.parametrize(
    "text", ["'loc': ('body', 'a'" * 3000 + "'msg': 'q" * 3000, "'msg': 'q" * 10_000, "\n" * 100_000]
)
def test_what_a_client_wrote_into_an_error_is_read_once(told: str, text: str) -> None:
    """Read again from each of its places, this would hold a gateway for days."""
    message = told.replace("{TEXT}", text)
    _, document = DIALECT.refusal(400, json.dumps({"message": message}).encode())
    assert json.loads(document)["error"]["param"] is None


@pytest.mark.parametrize(
    ("loc", "msg", "reason"),
    [
        ("('body', 'n', 'function-wrap[check()]', 0)", "'no'", "no"),
        ("('body', 'n')", '"can\'t be"', "can't be"),
        ("('body', 'n')", "'a \\'b\\' and \"c\"'", "a \\'b\\' and \"c\""),
    ],
)
def test_of_several_fields_the_first_is_named(loc: str, msg: str, reason: str) -> None:
    one = f"  {{'type': 'int_type', 'loc': {loc}, 'msg': {msg}, 'input': 2.5}}\n"
    other = "  {'type': 'x', 'loc': ('body', 'other'), 'msg': 'bad', 'input': 3}\n"
    told = f"2 validation errors:\n{one}{other}"
    error = json.loads(DIALECT.refusal(400, json.dumps({"message": told}).encode())[1])["error"]
    assert (error["param"], error["message"]) == ("n", f"n: {reason}")


def test_no_bound_on_the_tokens_to_choose_from_is_spelled_as_it_knows_it() -> None:
    assert told(ask(prompt="x", top_k=0))["top_k"] == -1


def test_a_refusal_that_is_no_json_is_told_as_it_is() -> None:
    status, document = DIALECT.refusal(500, b"Internal Server Error")
    assert (status, json.loads(document)["error"]["message"]) == (500, "Internal Server Error")


def test_an_adapter_that_is_gone_is_no_fault_of_the_clients() -> None:
    gone = f"Got LoRA adapter that has never been loaded: {ADAPTER}"
    status, _ = DIALECT.refusal(400, json.dumps({"object": "error", "message": gone, "code": 400}).encode())
    assert status == 404


def test_an_unknown_backend_cannot_be_asked() -> None:
    with pytest.raises(EngineFailed, match="newer"):
        dialect_of("other")
