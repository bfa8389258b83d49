"""The wire as SDKs depend on it: what bites them, one by one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.training.work import Save
from tests.gateway.fleet_states import BASE
from tests.gateway.mesh import until
from tests.gateway.stub_engine import refuse
from wire.events import Scope
from wire.outcomes import InvalidRequest, StorageFull

from .fake_trainer import LIMITS
from .rig import Rig, datum
from .test_data import as_protobuf

PROTOBUF = {"content-type": "application/x-protobuf", "accept": "application/x-protobuf"}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


async def sampler(rig: Rig, session: str, number: int = 0, **on: Any) -> str:
    body = {"session_id": session, "sampling_session_seq_id": number, **(on or {"base_model": BASE})}
    told = await rig.ask("create_sampling_session", body)
    assert told.status == 200, told.body
    return str(told.json["sampling_session_id"])


def sample(name: str, seq: int = 0, **more: Any) -> dict[str, Any]:
    params = more.pop("sampling_params", {"max_tokens": 3})
    return {"sampling_session_id": name, "seq_id": seq, "prompt": PROMPT, "sampling_params": params, **more}


async def test_outputs_and_samples_are_protobuf_where_that_is_asked_for(rig: Rig) -> None:
    session = await rig.session()
    run = await rig.run(session)
    body = as_protobuf(datum()).replace(b"\x0a\x01m\x10\x03", b"\x0a" + bytes([len(run)]) + run.encode() + b"\x10\x01")
    accepted = await rig.mesh.ask("POST", "/api/v1/forward_backward", data=body, headers=PROTOBUF)
    assert accepted.status == 200, accepted.body
    asked = {"request_id": accepted.json["request_id"]}
    told = await rig.ask("retrieve_future", asked, headers={"accept": "application/x-protobuf"})
    assert told.headers["content-type"] == "application/x-protobuf"
    assert (await rig.ask("retrieve_future", asked)).json["metrics"]["loss:sum"] == pytest.approx(3.9)
    drawn = await rig.ask("asample", sample(await sampler(rig, session)))
    await rig.result(drawn)
    asked = {"request_id": drawn.json["request_id"]}
    told = await rig.ask("retrieve_future", asked, headers={"accept": "application/x-protobuf"})
    assert told.headers["content-type"] == "application/x-protobuf"


async def test_every_metric_says_how_it_is_combined(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    trained, stepped = await rig.train(run, 1), await rig.step(run, 2)
    for accepted in (trained, stepped):
        metrics = (await rig.result(accepted))["metrics"]
        assert metrics
        assert {name.partition(":")[2] for name in metrics} <= {"mean", "sum", "min", "max"}


async def test_paths_and_ids_are_what_clients_derive(rig: Rig) -> None:
    session = await rig.session()
    run = await rig.run(session, 3)
    assert run == f"{session}:train:3"
    saved = await rig.result(await rig.ask("save_weights", {"model_id": run, "seq_id": 1, "path": "a"}))
    assert saved["path"] == f"tinker://{run}/weights/a"
    told = await rig.result(await rig.ask("save_weights_for_sampler", {"model_id": run, "seq_id": 2, "path": "b"}))
    assert told["path"] == f"tinker://{run}/sampler_weights/b"
    body = {"model_id": run, "seq_id": 3, "sampling_session_seq_id": 5}
    told = await rig.result(await rig.ask("save_weights_for_sampler", body))
    assert told["sampling_session_id"] == f"{session}:sample:5"
    assert (await rig.mesh.ask("GET", f"/api/v1/samplers/{session}:sample:5")).json["base_model"] == BASE


async def test_chunks_that_arrive_first_one_last_run_in_order(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    later = [await rig.train(run, seq) for seq in (3, 2, 4)]
    step = await rig.step(run, 5)
    assert [name for _, name, _ in rig.trainer.log] == []
    first = await rig.train(run, 1)
    for accepted in (first, *later, step):
        await rig.result(accepted)
    kinds = [kind for _, kind, _ in rig.trainer.log]
    assert kinds == ["forward_backward"] * 4 + ["optim_step"]


async def test_who_asks_early_waits_at_the_server(tmp_path: Path) -> None:
    async with Rig(tmp_path, poll_s=0.3) as rig:
        run = await rig.run(await rig.session())
        waiting = await rig.step(run, 2)
        began = time.monotonic()
        told = await rig.ask("retrieve_future", {"request_id": waiting.json["request_id"]})
        assert time.monotonic() - began >= 0.3
        assert (told.status, told.json["type"], told.json["queue_state"]) == (408, "try_again", "active")
        rig.trainer.ready = False
        told = await rig.ask("retrieve_future", {"request_id": waiting.json["request_id"]})
        assert (told.json["queue_state"], told.json["queue_state_reason"]) == (
            "paused_capacity", "the trainer is starting",
        )  # fmt: skip


async def test_a_result_wakes_who_waits_for_it(tmp_path: Path) -> None:
    async with Rig(tmp_path, poll_s=30.0) as rig:
        run = await rig.run(await rig.session())
        waiting = await rig.step(run, 2)
        poll = asyncio.create_task(rig.ask("retrieve_future", {"request_id": waiting.json["request_id"]}))
        await asyncio.sleep(0.1)
        await rig.train(run, 1)
        assert (await asyncio.wait_for(poll, 10)).json["metrics"]["step:max"] == 1


async def test_a_failure_says_whose_it_is(rig: Rig) -> None:
    session = await rig.session()
    run = await rig.run(session)
    failed = await rig.result(await rig.train(run, 1, loss="no_such"))
    assert failed == {"error": "there is no loss 'no_such'", "category": "user"}
    # its place is taken: what comes behind it goes on
    assert "metrics" in await rig.result(await rig.train(run, 2))
    rig.mesh.engine.scripts.extend([refuse(500)] * 12)
    failed = await rig.result(await rig.ask("asample", sample(await sampler(rig, session))))
    assert failed["category"] == "server"


async def test_a_malformed_operation_fails_in_its_place(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    malformed = await rig.ask("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {"learning_rate": "much"}})
    assert (await rig.result(malformed))["category"] == "user"
    assert "metrics" in await rig.result(await rig.train(run, 2))
    told = await rig.ask("optim_step", {"model_id": run})
    assert (told.status, told.json["category"]) == (400, "user")
    assert "seq_id" in told.json["error"]
    assert (await rig.ask("optim_step", {"model_id": run, "seq_id": 0})).status == 400


async def test_unknown_things_are_not_found(rig: Rig) -> None:
    session = await rig.session()
    assert (await rig.ask("retrieve_future", {"request_id": "none"})).status == 404
    assert (await rig.ask("optim_step", {"model_id": f"{session}:train:9", "seq_id": 1})).status == 404
    assert (await rig.ask("weights_info", {"tinker_path": f"tinker://{session}:train:0/weights/x"})).status == 404
    assert (await rig.mesh.ask("GET", "/api/v1/samplers/none")).status == 404
    assert (await rig.mesh.ask("GET", "/api/v1/no_such")).status == 404
    assert (await rig.ask("weights_info", {"tinker_path": "/etc/passwd"})).status == 400


async def test_full_queues_are_told_as_each_sdk_honours_it(tmp_path: Path) -> None:
    """429 for samples, 503 for training; what everybody waits for is let in all the same."""
    async with Rig(tmp_path, max_pending_samples=0, max_pending_bytes=0) as rig:
        session = await rig.session()
        assert (await rig.ask("asample", sample(await sampler(rig, session)))).status == 429
        run = await rig.run(session)
        rig.trainer.seconds[run] = 0.3
        first = await rig.train(run, 1)
        assert (await rig.train(run, 3)).status == 503
        await rig.result(first)
        assert (await rig.train(run, 2)).status == 200


async def test_an_operation_sent_again_is_the_same_one(rig: Rig) -> None:
    run = await rig.run(await rig.session())
    once, again = await rig.train(run, 1), await rig.train(run, 1)
    assert once.json == again.json
    await rig.result(once)
    assert (await rig.train(run, 1)).json == once.json
    assert len(rig.trainer.log) == 1
    other = await rig.train(run, 1, datum((4, 5), (5, 6)))
    assert other.status == 409
    assert "sent already, with other contents" in other.json["error"]


async def test_request_ids_don_t_follow_from_contents(rig: Rig) -> None:
    session = await rig.session()
    name = await sampler(rig, session)
    first, second = await rig.ask("asample", sample(name, 0)), await rig.ask("asample", sample(name, 1))
    assert first.json["request_id"] != second.json["request_id"]
    assert (await rig.ask("asample", sample(name, 0))).json == first.json
    assert (await rig.ask("asample", sample(name, 0, num_samples=2))).status == 409


async def test_an_operation_that_never_comes_fails_those_behind_it(tmp_path: Path) -> None:
    async with Rig(tmp_path, gap_s=0.2) as rig:
        run = await rig.run(await rig.session())
        behind = [await rig.train(run, 2), await rig.step(run, 3)]
        for accepted in behind:
            failed = await rig.result(accepted)
            assert failed["category"] == "user"
            assert "operation 1" in failed["error"]
        assert (await rig.train(run, 1)).status == 409
        assert "metrics" in await rig.result(await rig.train(run, 4))


async def test_an_operation_that_comes_while_it_is_given_up_is_done_with_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(tmp_path, gap_s=0.2) as rig:
        run = await rig.run(await rig.session())
        journal, full = rig.service.journal, asyncio.Event()
        written, asked = journal.resolve_lost, []

        async def resolve_lost(model_id: str) -> Any:
            asked.append(model_id)
            if not full.is_set():
                raise StorageFull("the training journal has no room")
            return await written(model_id)

        monkeypatch.setattr(journal, "resolve_lost", resolve_lost)
        behind = await rig.step(run, 2)
        await until(lambda: bool(asked))
        first = await rig.train(run, 1)
        full.set()
        assert "metrics" in await rig.result(first)
        assert "metrics" in await rig.result(behind)


async def test_samples_are_asked_for_as_clients_mean_them(rig: Rig) -> None:
    session = await rig.session()
    name = await sampler(rig, session)
    params = {"max_tokens": 2, "seed": 9, "temperature": 0.0, "top_k": 5, "top_p": 0.5, "stop": [7, 8]}
    body = sample(name, 0, sampling_params=params, num_samples=2, topk_sample_logprobs=2)
    accepted = await rig.ask("asample", body)
    assert len(accepted.json["sample_sequence_ids"]) == 2
    assert (await rig.result(accepted))["sequences"][0]["stop_reason"] == "stop"
    asked = rig.mesh.engine.asked[-1]
    assert {key: asked[key] for key in ("prompt", "n", "max_tokens", "seed", "temperature", "top_k", "top_p")} == {
        "prompt": [5, 6, 7], "n": 2, "max_tokens": 2, "seed": 9, "temperature": 0.0, "top_k": 5, "top_p": 0.5,
    }  # fmt: skip
    assert (asked["stop_token_ids"], asked["ignore_eos"], asked["logprobs"]) == ([7, 8], False, 2)
    await rig.result(await rig.ask("asample", sample(name, 1, sampling_params={"max_tokens": 2, "stop": []})))
    assert rig.mesh.engine.asked[-1]["ignore_eos"] is True
    await rig.result(await rig.ask("asample", sample(name, 2, sampling_params={"stop": "end"})))
    assert rig.mesh.engine.asked[-1]["stop"] == ["end"]
    # without a bound: no more than the context that is trained, which an engine refuses a number above
    assert rig.mesh.engine.asked[-1]["max_tokens"] == LIMITS.max_context
    only_last = sample(name, 3, prompt_logprobs=True, prompt_logprobs_last_n=1)
    result = await rig.result(await rig.ask("asample", only_last))
    assert result["prompt_logprobs"] == [None, None, -7 / 8]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"prompt": {"chunks": []}}, "prompt is empty"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"prompt_alt_tokens_k": 1}, "not supported"),
        ({"sampling_params": {"stop": ["a", 1]}}, "mixes"),
        ({"seq_id": -1}, "seq_id"),
    ],
)
async def test_a_sample_that_can_t_be_is_refused(rig: Rig, more: dict[str, Any], reason: str) -> None:
    name = await sampler(rig, await rig.session())
    told = await rig.ask("asample", sample(name) | more)
    assert told.status == 400
    assert reason in told.json["error"]


async def test_a_gateway_that_has_no_room_is_asked_again(rig: Rig) -> None:
    name = await sampler(rig, await rig.session())
    rig.mesh.engine.scripts.extend([refuse(503)] * 4)
    assert "sequences" in await rig.result(await rig.ask("asample", sample(name)))


async def test_what_the_engine_finds_at_fault_is_the_client_s(rig: Rig) -> None:
    name = await sampler(rig, await rig.session())
    rig.mesh.engine.scripts.append(refuse(400, "the prompt is too long"))
    failed = await rig.result(await rig.ask("asample", sample(name)))
    assert failed == {"error": "the prompt is too long", "category": "user"}


async def test_inflight_samplers_follow_the_run(rig: Rig) -> None:
    session = await rig.session()
    run = await rig.run(session)
    body = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
    first = (await rig.result(await rig.ask("save_weights_for_sampler", body)))["sampling_session_id"]
    await rig.result(await rig.ask("asample", sample(first)))
    before = rig.mesh.engine.asked[-1]["model"]
    await rig.train(run, 2)
    await rig.step(run, 3)
    await rig.result(await rig.ask("save_weights_for_sampler", body | {"seq_id": 4, "sampling_session_seq_id": 1}))
    await rig.result(await rig.ask("asample", sample(first, 1)))
    assert rig.mesh.engine.asked[-1]["model"] != before


async def test_other_tenants_see_nothing(tmp_path: Path) -> None:
    async with Rig(tmp_path, anonymous=False) as rig:
        ours, theirs = rig.mesh.key("acme"), rig.mesh.key("rival")
        assert (await rig.ask("create_session", headers={"x-api-key": "tml-wrong"})).status == 401
        session = await rig.session(headers=ours)
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
        assert (await rig.ask("create_model", body, headers=theirs)).status == 404
        made = await rig.ask("create_model", body, headers=ours)
        asked = {"request_id": made.json["request_id"]}
        assert (await rig.ask("retrieve_future", asked, headers=theirs)).status == 404
        run = (await rig.result(made, headers=ours))["model_id"]
        assert (await rig.ask("get_info", {"model_id": run}, headers=theirs)).status == 404
        step = {"model_id": run, "seq_id": 1, "adam_params": {}}
        assert (await rig.ask("optim_step", step, headers=theirs)).status == 404
        reader = rig.mesh.key("acme", Scope.INVOKE)
        assert (await rig.ask("optim_step", step, headers=reader)).status == 403
        assert (await rig.ask("get_info", {"model_id": run}, headers=reader)).status == 200
        await rig.result(
            await rig.ask("save_weights", {"model_id": run, "seq_id": 1, "path": "a"}, headers=ours), headers=ours
        )
        path = f"tinker://{run}/weights/a"
        assert (await rig.ask("weights_info", {"tinker_path": path}, headers=theirs)).status == 404
        assert (await rig.ask("weights_info", {"tinker_path": path}, headers=ours)).json["lora_rank"] == 4
        named = body | {"model_seq_id": 1, "user_metadata": {"policy": "rival/stolen"}}
        assert (await rig.ask("create_model", named, headers=ours)).status == 400


async def test_a_sampling_session_is_bound_to_another_revision_by_its_own_run_alone(rig: Rig) -> None:
    session = await rig.session()
    one, two = await rig.run(session, 0), await rig.run(session, 1)
    body = {"seq_id": 1, "sampling_session_seq_id": 0}
    taken = await rig.result(await rig.ask("save_weights_for_sampler", body | {"model_id": one}))
    failed = await rig.result(await rig.ask("save_weights_for_sampler", body | {"model_id": two}))
    assert "is there already, on something else" in failed["error"]
    again = body | {"model_id": one, "seq_id": 2, "kind": "inflight"}
    assert "error" in await rig.result(await rig.ask("save_weights_for_sampler", again))
    record = rig.service.journal.sampler(taken["sampling_session_id"])
    assert record is not None and record.policy == f"default/run-{session}-0"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"base_model": "other"}, "base_model 'other' is not trained here"),
        ({"lora_config": None}, "lora_config is missing"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer 'dimuon'"),
        ({"user_metadata": {"policy": "Not A Name"}}, "policy"),
    ],
)
async def test_a_run_that_can_t_be_is_refused(rig: Rig, fields: dict[str, Any], reason: str) -> None:
    body = {"session_id": await rig.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    told = await rig.ask("create_model", body | fields)
    assert told.status == 400
    assert reason in told.json["error"]


async def test_a_run_that_could_not_be_made_says_so_ever_after(rig: Rig) -> None:
    session = await rig.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 65}}
    assert "rank 65" in (await rig.result(await rig.ask("create_model", body)))["error"]
    assert "could not be made" in (await rig.result(await rig.train(f"{session}:train:0", 1)))["error"]


async def test_a_finished_session_s_runs_end_when_their_operations_are_done(rig: Rig) -> None:
    session = await rig.session()
    run, idle = await rig.run(session), await rig.run(session, 1)
    saved = await rig.result(await rig.ask("save_weights", {"model_id": idle, "seq_id": 1, "path": "a"}))
    rig.trainer.seconds[run] = 0.2
    late = await rig.train(run, 1)
    finish = {"reason": {"type": "success"}, "detail": None}
    assert (await rig.ask(f"sessions/{session}/finish", finish)).status == 200
    assert "metrics" in await rig.result(late)
    await until(lambda: set(rig.trainer.removed) == {run, idle})
    for told in (await rig.train(run, 2), await rig.ask(f"sessions/{session}/finish", {"reason": {"type": "what"}})):
        assert told.status == 400
    assert "finished (success)" in (await rig.train(run, 2)).json["error"]
    # nor is one let in that was on its way as the session ended
    with pytest.raises(InvalidRequest, match="is finished"):
        await rig.service.journal.accept(run, 2, "default", Save(name="late"))
    await until(lambda: not list(rig.service.journal.changes(run, 0)))
    # what was saved outlives the run
    body = {"session_id": await rig.session(), "model_seq_id": 0, "path": saved["path"], "optimizer": True}
    assert "model_id" in await rig.result(await rig.ask("load_weights", body))


async def test_results_are_dropped_in_time_and_operations_stay_known(rig: Rig) -> None:
    session = await rig.session()
    run = await rig.run(session)
    trained = await rig.train(run, 1)
    drawn = await rig.ask("asample", sample(await sampler(rig, session)))
    await rig.result(trained)
    await rig.result(drawn)
    await rig.service.journal.prune(time.time_ns() // 1_000_000 + 1000)
    for accepted in (trained, drawn):
        told = await rig.ask("retrieve_future", {"request_id": accepted.json["request_id"]})
        assert told.status in (404, 410)
    # it was trained, and is not again; a sample may be drawn anew
    assert (await rig.train(run, 1)).json == trained.json
    anew = await rig.ask("asample", sample(f"{session}:sample:0"))
    assert anew.json["request_id"] != drawn.json["request_id"]
    assert "sequences" in await rig.result(anew)


async def test_without_a_training_service_the_gateway_says_so(rig: Rig) -> None:
    await rig.crash()
    told = await rig.ask("create_session")
    assert told.status == 503
    await rig.restart()
    assert (await rig.ask("create_session")).status == 200


async def test_a_run_that_wants_the_unembedding_is_made_of_the_rest_or_refused(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        session = await rig.session()
        run = await rig.run(session, lora_config={"rank": 4, "train_unembed": True, "train_mlp": False})
        record = rig.service.journal.run(run)
        assert record is not None and record.targets == ("q", "k", "v", "o")
        alone = {"rank": 4, "train_unembed": True, "train_mlp": False, "train_attn": False}
        new = {"session_id": session, "model_seq_id": 1, "base_model": BASE, "lora_config": alone}
        told = await rig.ask("create_model", new)
        assert (told.status, told.json["category"]) == (400, "user")
        assert "train_unembed is true" in told.json["error"]
        await rig.end()
        rig.given["refuse_unembed"] = True
        await rig.restart()
        told = await rig.ask("create_model", new | {"lora_config": {"rank": 4}})
        assert told.status == 400
        assert "train_unembed=False" in told.json["error"]
        await rig.run(session, 1, lora_config={"rank": 4, "train_unembed": False})
