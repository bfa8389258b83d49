"""What can't be is refused, with the field that is wrong: an answer of 5xx is asked for again for ever."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from tests.gateway.fleet_states import BASE

from .rig import Rig
from .test_protocol import sample, sampler

HUGE = 1 << 80


def prompt(*tokens: int) -> dict[str, Any]:
    return {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}}


async def test_numbers_that_nothing_can_hold_are_refused_where_they_stand(rig: Rig) -> None:
    session = await rig.session()
    name = await sampler(rig, session)
    samples: list[tuple[dict[str, Any], str]] = [
        (prompt(1, HUGE), "$.prompt.chunks[0].tokens[1]"),
        (prompt(-1), "$.prompt.chunks[0].tokens[0]"),
        ({"seq_id": HUGE}, "$.seq_id"),
        ({"num_samples": HUGE}, "$.num_samples"),
        ({"topk_prompt_logprobs": HUGE}, "$.topk_prompt_logprobs"),
        ({"topk_sample_logprobs": HUGE}, "$.topk_sample_logprobs"),
        ({"prompt_logprobs_last_n": HUGE}, "$.prompt_logprobs_last_n"),
        *(
            ({"sampling_params": {field: HUGE}}, f"$.sampling_params.{field}")
            for field in ("max_tokens", "seed", "top_k")
        ),
        ({"sampling_params": {"seed": -HUGE}}, "$.sampling_params.seed"),
        ({"sampling_params": {"stop": [HUGE]}}, "$.sampling_params.stop[0]"),
    ]
    asked = [("asample", sample(name) | more, field) for more, field in samples]
    new = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    for more, field in (
        ({"model_seq_id": HUGE}, "$.model_seq_id"),
        ({"model_seq_id": -1}, "$.model_seq_id"),
        ({"lora_config": {"rank": HUGE}}, "$.lora_config.rank"),
        ({"lora_config": {"rank": 4, "seed": 1 << 63}}, "$.lora_config.seed"),
    ):
        asked.append(("create_model", new | more, field))
    for number in (HUGE, -1):
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": BASE}
        asked.append(("create_sampling_session", body, "$.sampling_session_seq_id"))
    for path, body, field in asked:
        told = await rig.ask(path, body)
        assert (told.status, told.json["category"]) == (400, "user"), (path, field, told.body)
        assert told.json["error"].endswith(f"at `{field}`"), told.body


async def test_a_sample_asks_for_no_more_than_the_gateway_lets_one_have(rig: Rig) -> None:
    name = await sampler(rig, await rig.session())
    for more, reason in (
        ({"num_samples": (1 << 63) - 1}, "num_samples is 9223372036854775807: expected 1 to 128"),
        ({"num_samples": 129}, "num_samples is 129: expected 1 to 128"),
        ({"sampling_params": {"max_tokens": (1 << 18) + 1}}, "max_tokens is 262145: expected 1 to 262144"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs is 21: expected 0 to 20"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1: expected 0 to 20"),
    ):
        told = await rig.ask("asample", sample(name) | more)
        assert (told.status, told.json["error"]) == (400, reason)


async def test_a_name_that_can_be_none_is_not_found(rig: Rig) -> None:
    for name in ("", "x" * 600):
        assert (await rig.ask("optim_step", {"model_id": name, "seq_id": 1, "adam_params": {}})).status == 404
        assert (await rig.ask("session_heartbeat", {"session_id": name})).status == 404
        assert (await rig.ask("retrieve_future", {"request_id": name})).status == 404
        assert (await rig.ask("asample", sample(name))).status == 404
    empty = await rig.mesh.ask(
        "POST", "/api/v1/forward_backward", data=b"", headers={"content-type": "application/x-protobuf"}
    )
    assert (empty.status, empty.json["error"]) == (404, "there is no run ''")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_a_compressed_body_is_not_taken(rig: Rig, encoding: str) -> None:
    """Neither one that is as it says nor one that isn't."""
    for body in (gzip.compress(b"{}"), b"{}"):
        told = await rig.mesh.ask("POST", "/api/v1/create_session", data=body, headers={"content-encoding": encoding})
        assert told.status == 400
        assert told.error["message"] == f"Content-Encoding '{encoding}' is not taken: send the body as it is"


async def test_so_are_they_in_an_operation_which_keeps_its_place(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    data = [{"model_input": prompt(HUGE)["prompt"], "loss_fn_inputs": {}}]
    wrong = {"forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}
    failed = await rig.result(await rig.ask("forward_backward", {"model_id": run, "seq_id": 1} | wrong))
    assert failed["category"] == "user" and "model_input.chunks[0].tokens[0]" in failed["error"]
    assert (await rig.ask("optim_step", {"model_id": run, "seq_id": HUGE})).status == 400
    assert "metrics" in await rig.result(await rig.train(run, 2))


async def test_a_setting_of_the_optimizer_that_is_not_known_is_not_left_out(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    step = {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": 0.1, "amsgrad": True}}
    failed = await rig.result(await rig.ask("optim_step", step))
    assert failed["category"] == "user" and "unknown field `amsgrad`" in failed["error"]


async def test_a_policy_s_name_is_text(rig: Rig) -> None:
    metadata = {"user_metadata": {"policy": 5}}
    told = await rig.ask("create_session", metadata)
    assert (told.status, told.json["error"]) == (400, "user_metadata.policy is '5': expected text")
    new = {"session_id": await rig.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    assert (await rig.ask("create_model", new | metadata)).status == 400
