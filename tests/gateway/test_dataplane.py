"""What a client sees of a request, and what happens to its lease."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from wire.node import Health
from wire.outcomes import Outcome

from . import stub_engine, stub_sidecar
from .fleet_states import BASE
from .mesh import Mesh, until


async def test_a_policy_answers_under_its_concrete_name(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.chat("acme/bot", headers={"x-request-id": "mine-1"})
        assert told.status == 200
        assert told.json["model"] == "acme/bot@1"
        assert told.json["choices"][0]["message"]["content"] == "the engine n0e0"
        assert told.headers["x-roost-revision"] == "acme/bot@1"
        assert told.headers["x-roost-node"] == "n0"
        assert told.headers["x-roost-outcome"] == "ok"
        assert told.headers["x-request-id"] == "mine-1"
        assert b"@" not in told.body.replace(b"acme/bot@1", b"")
        await mesh.all_leases_are_back()
        assert mesh.outcomes() == {"ok": 1}


async def test_a_stream_tells_the_revision_in_every_chunk(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.chat("acme/bot", stream=True, n=2, stream_options={"include_usage": True})
        assert told.status == 200
        assert told.headers["content-type"].startswith("text/event-stream")
        assert {event["model"] for event in told.events} == {"acme/bot@1"}
        assert len([event for event in told.events if event["choices"]]) == 6
        assert told.events[-1]["usage"] == {"total_tokens": 7}
        assert told.body.endswith(b"data: [DONE]\n\n")
        await mesh.all_leases_are_back()


async def test_fields_reach_the_engine_as_they_are(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "n": 3, "logprobs": True, "top_logprobs": 2, "stop": ["\n", "é"], "temperature": 0.25, "unknown": {"a": [None]},
    }  # fmt: skip
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.chat("acme/bot", **fields)
        assert len(told.json["choices"]) == 3
        assert told.json["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
        asked = mesh.engine.asked[0]
        assert {name: asked[name] for name in fields} == fields
        assert asked["model"].startswith("acme@")


async def test_completions_with_token_ids(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        body = {"model": "acme/bot", "prompt": [1, 2, 3]}
        told = await mesh.ask("POST", "/v1/completions", json=body)
        assert told.json["model"] == "acme/bot@1"
        assert mesh.engine.asked[0]["prompt"] == [1, 2, 3]
        assert mesh.outcomes("completions") == {"ok": 1}


async def test_the_base_is_asked_by_its_own_name_and_without_a_revision(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        told = await mesh.chat(BASE)
        assert told.json["model"] == BASE
        assert mesh.sidecar.acquired[0].digest == ""
        # an anonymous caller has no tenant to keep apart
        assert "cache_salt" not in mesh.engine.asked[0]
        await mesh.chat(BASE, headers=mesh.key("acme"))
        assert mesh.engine.asked[1]["cache_salt"] == "acme"


async def test_revisions_and_channels_are_served_as_named(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot", b"one")
        mesh.publish("acme/bot", b"two")
        for model, revision in (("acme/bot", 2), ("acme/bot@1", 1), ("acme/bot:stable", 2), ("acme/bot:latest", 2)):
            told = await mesh.chat(model)
            assert told.json["model"] == f"acme/bot@{revision}"
        digests = [ask.digest for ask in mesh.sidecar.acquired]
        assert digests[0] == digests[2] == digests[3] != digests[1]
        ask = mesh.sidecar.acquired[0]
        assert (ask.base, ask.tenant, ask.policy, ask.rank, ask.size) == (BASE, "acme", "acme/bot", 8, 3)


@pytest.mark.parametrize(
    ("model", "status"),
    [
        ("acme/none", 404),
        ("acme/bot@9", 404),
        ("acme/bot:none", 404),
        ("nobase", 404),
        ("acme/../bot", 400),
        ("../../etc/passwd", 400),
        ("acme/bot/more", 400),
        ("acme/bot@0", 400),
        ("acme/bot@1:stable", 400),
        ("ACME/bot", 400),
        ("acme/bøt", 400),
        ("bäse", 400),
        ("acme/" + "b" * 10_000, 400),
        ("b" * 10_000, 400),
        ("acme/bot\r\nx-evil: 1", 400),
        ("", 400),
    ],
)
async def test_a_name_that_is_not_there_is_told_by_its_field(tmp_path: Path, model: str, status: int) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        told = await mesh.chat(model)
        assert told.status == status
        assert told.error["param"] == "model"
        assert len(told.body) < 1000
        assert (await mesh.chat("acme/bot")).status == 200


async def test_a_bad_body_is_refused_and_the_next_request_served(tmp_path: Path) -> None:
    async with Mesh(tmp_path, max_body_bytes=1 << 20) as mesh:
        mesh.publish("acme/bot")
        long = b'{"model":"' + b"x" * (1 << 20)
        for body, status in ((b"nope", 400), (b"[]", 400), (b"{}", 400), (b'{"model":"\\ud800"}', 400), (long, 413)):
            told = await mesh.ask("POST", "/v1/chat/completions", data=body)
            assert (told.status, told.error["type"]) == (status, {400: "invalid_request", 413: "too_large"}[status])
        assert (await mesh.chat("acme/bot")).status == 200
        await mesh.all_leases_are_back()


async def test_a_retired_policy_is_gone(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        assert (await mesh.ask("POST", "/roost/v1/policies/acme/bot/retire")).status == 200
        assert (await mesh.chat("acme/bot")).status == 410


@pytest.mark.parametrize("outcome", [o for o in Outcome if o not in (Outcome.OK, Outcome.CLIENT_GONE)])
async def test_every_refusal_of_a_sidecar_reaches_the_client(tmp_path: Path, outcome: Outcome) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.sidecar.scripts.append(stub_sidecar.refuse(outcome, retry_after_s=2.2, message="full up"))
        told = await mesh.chat("acme/bot")
        assert told.status == outcome.http_status
        assert told.headers["x-roost-outcome"] == outcome.value == told.error["type"] == told.error["code"]
        assert told.headers["retry-after"] == "3"
        # why the journal is away is for the log alone
        private = outcome is Outcome.JOURNAL_UNAVAILABLE
        assert told.error["message"] == ("the catalog is not available now" if private else "full up")
        assert mesh.outcomes() == {outcome.value: 1}
        assert mesh.engine.asked == []


async def test_a_refusal_is_tried_elsewhere_once(tmp_path: Path) -> None:
    async with Mesh(tmp_path, nodes=3) as mesh:
        mesh.publish("acme/bot")
        full = stub_sidecar.refuse(Outcome.COLD_LOAD_BOUND, elsewhere=True, retry_after_s=1.0)
        first = (await mesh.chat("acme/bot")).headers["x-roost-node"]
        sidecars = {sidecar.address.name: sidecar for sidecar in mesh.sidecars}
        sidecars[first].scripts.append(full)
        second = (await mesh.chat("acme/bot")).headers["x-roost-node"]
        assert second != first
        sidecars[first].scripts.append(full)
        sidecars[second].scripts.append(full)
        told = await mesh.chat("acme/bot")
        assert told.status == 429
        assert told.headers["retry-after"] == "1"
        assert sum(len(sidecar.acquired) for sidecar in mesh.sidecars) == 5


@pytest.mark.parametrize("outcome", [Outcome.COLD_LOAD_BOUND, Outcome.NO_HEALTHY_NODE])
async def test_the_only_node_is_not_asked_again_after_a_refusal(tmp_path: Path, outcome: Outcome) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.sidecar.scripts.append(stub_sidecar.refuse(outcome, elsewhere=True, retry_after_s=1.0))
        assert (await mesh.chat("acme/bot")).status == outcome.http_status
        assert len(mesh.sidecar.acquired) == 1


async def test_without_a_node_the_answer_says_what_is_missing(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        node = mesh.gateways[0].nodes["n0"]
        sidecar = mesh.sidecar
        sidecar.fingerprint = "0" * 64
        sidecar.announce()
        await until(lambda: node.engines["n0e0"].fingerprint == "0" * 64)
        told = await mesh.chat("acme/bot")
        assert (told.status, told.error["type"]) == (503, "base_not_deployed")
        sidecar.fingerprint, sidecar.health = "f" * 64, Health.STARTING
        sidecar.announce()
        await until(lambda: node.engines["n0e0"].health == "starting")
        told = await mesh.chat("acme/bot")
        assert (told.status, told.error["type"], told.headers["retry-after"]) == (503, "no_healthy_node", "2")
        sidecar.health, sidecar.max_rank = "ready", 4
        sidecar.announce()
        await until(lambda: node.engines["n0e0"].max_rank == 4)
        told = await mesh.chat("acme/bot")
        assert (told.status, told.error["type"]) == (409, "unfit")
        assert sidecar.acquired == []


async def test_two_gateways_send_a_policy_to_the_same_node(tmp_path: Path) -> None:
    async with Mesh(tmp_path, nodes=3, gateways=2) as mesh:
        nodes = set()
        for number in range(12):
            mesh.publish(f"acme/bot{number}")
            mine = await mesh.chat(f"acme/bot{number}", gateway=0)
            theirs = await mesh.chat(f"acme/bot{number}", gateway=1)
            assert mine.headers["x-roost-node"] == theirs.headers["x-roost-node"]
            nodes.add(mine.headers["x-roost-node"])
        assert len(nodes) > 1


@pytest.mark.parametrize("prefix_bytes", [0, 64])
async def test_several_copies_take_turns_or_each_its_prompts(tmp_path: Path, prefix_bytes: int) -> None:
    async with Mesh(tmp_path, nodes=2, prefix_bytes=prefix_bytes, replica_leases=1) as mesh:
        mesh.publish("acme/bot")
        await mesh.chat("acme/bot")
        adapter = next("acme@" + ask.digest for sidecar in mesh.sidecars for ask in sidecar.acquired)
        popularity = mesh.gateways[0].nodes.popularity
        for sidecar in mesh.sidecars:
            sidecar.serving.add(adapter)
            sidecar.announce()
        await until(lambda: all(adapter in node.engines[f"{node.name}e0"].serving for node in mesh.gateways[0].nodes))
        popularity.observe("elsewhere", {adapter: 2})
        await until(lambda: popularity.observe("elsewhere", {adapter: 2}) or popularity.replicas(adapter) == 2)
        served = {}
        for turn in range(12):
            messages = [{"role": "user", "content": f"prompt {turn % 6}"}]
            told = await mesh.ask("POST", "/v1/chat/completions", json={"model": "acme/bot", "messages": messages})
            served.setdefault(turn % 6, []).append(told.headers["x-roost-node"])
        used = {node for nodes in served.values() for node in nodes}
        assert used == {"n0", "n1"}
        if prefix_bytes:
            assert all(len(set(nodes)) == 1 for nodes in served.values())
        else:
            assert sum(nodes.count("n0") for nodes in served.values()) == 6


async def test_an_engines_word_on_the_request_is_passed_on_without_its_name_for_the_model(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.engine.scripts.append(stub_engine.refuse(400, "{model} has a context of 10 tokens"))
        told = await mesh.chat("acme/bot")
        assert told.status == 400
        assert told.error["message"] == "acme/bot@1 has a context of 10 tokens"
        assert told.headers["x-roost-outcome"] == "invalid_request"
        assert told.headers["x-roost-revision"] == "acme/bot@1"
        mesh.engine.scripts.append(stub_engine.fail_in_stream(400))
        told = await mesh.chat("acme/bot", stream=True)
        assert (told.status, told.error["message"]) == (400, "no")
        assert mesh.outcomes() == {"invalid_request": 2}
        assert mesh.sidecar.failed_engines == []
        await mesh.all_leases_are_back()


@pytest.mark.parametrize(
    "failure",
    [
        stub_engine.die_before_answering,
        stub_engine.refuse(500),
        stub_engine.refuse(503),
        stub_engine.refuse(404, "The model `{model}` does not exist."),
        stub_engine.refuse(401),
        stub_engine.fail_in_stream(500),
    ],
    ids=["dies", "500", "503", "lost the adapter", "401", "fails in the stream"],
)
@pytest.mark.parametrize("nodes", [1, 2])
async def test_what_fails_before_the_first_byte_is_tried_once_more(
    tmp_path: Path, failure: stub_engine.Script, nodes: int
) -> None:
    async with Mesh(tmp_path, nodes=nodes) as mesh:
        mesh.publish("acme/bot")
        first = (await mesh.chat("acme/bot")).headers["x-roost-node"]
        engine = next(engine for engine in mesh.engines if engine.name.startswith(first))
        # a connection that was idle before is replaced by a fresh one first, of which only the pool knows
        engine.scripts.extend([failure] * (2 if failure is stub_engine.die_before_answering else 1))
        told = await mesh.chat("acme/bot", stream=True)
        assert told.status == 200
        assert told.events[-1]["model"] == "acme/bot@1"
        assert (told.headers["x-roost-node"] == first) == (nodes == 1)
        assert mesh.outcomes() == {"ok": 2}
        await mesh.all_leases_are_back()
        sidecar = next(sidecar for sidecar in mesh.sidecars if sidecar.address.name == first)
        assert sidecar.failed_engines == [engine.name]


async def test_an_engine_that_could_not_be_reached_is_named_to_its_node_and_to_no_other(tmp_path: Path) -> None:
    for nodes in (1, 2):
        async with Mesh(tmp_path / str(nodes), nodes=nodes, engines=2) as mesh:
            mesh.publish("acme/bot")
            for engine in mesh.engines:
                await engine.stop()
            assert (await mesh.chat("acme/bot")).status == 502
            first, again = [ask for sidecar in mesh.sidecars for ask in sidecar.acquired]
            (failed, *_) = mesh.sidecar.failed_engines
            assert (first.failed_engine, again.failed_engine) == ("", failed if nodes == 1 else "")


async def test_a_second_failure_is_told(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.engine.scripts.extend([stub_engine.refuse(404, "no {model}"), stub_engine.refuse(404, "no {model}")])
        told = await mesh.chat("acme/bot")
        assert (told.status, told.error["type"]) == (502, "engine_failed")
        assert "acme@" not in told.error["message"]
        assert mesh.outcomes() == {"engine_failed": 1}
        await mesh.all_leases_are_back()
        assert len(mesh.sidecar.released) == 2


async def test_a_stream_that_breaks_ends_with_an_error_and_no_end(tmp_path: Path) -> None:
    async with Mesh(tmp_path, nodes=2) as mesh:
        mesh.publish("acme/bot")
        for engine in mesh.engines:
            engine.scripts.append(stub_engine.die_after_chunks(3))
        told = await mesh.chat("acme/bot", stream=True)
        assert told.status == 200
        assert told.broken
        assert [event["model"] for event in told.events[:-1]] == ["acme/bot@1"] * 3
        assert told.events[-1]["error"]["type"] == "engine_failed"
        assert b"[DONE]" not in told.body
        assert sum(len(engine.asked) for engine in mesh.engines) == 1
        assert mesh.outcomes() == {"engine_failed": 1}
        await mesh.all_leases_are_back()
        assert sum(len(sidecar.failed_engines) for sidecar in mesh.sidecars) == 1


async def test_a_failure_that_the_engine_tells_in_the_stream_is_counted(tmp_path: Path) -> None:
    async def fail_in_the_middle(
        engine: stub_engine.StubEngine, request: Any, body: dict[str, Any]
    ) -> stub_engine.web.StreamResponse:
        response = await stub_engine.begin_stream(request)
        await stub_engine.send_chunk(response, body["model"], "word ")
        await stub_engine.send_event(response, {"error": {"message": "dead", "code": 500}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.engine.scripts.append(fail_in_the_middle)
        told = await mesh.chat("acme/bot", stream=True)
        assert told.events[-1]["error"]["message"] == "dead"
        assert mesh.outcomes() == {"engine_failed": 1}
        await until(lambda: mesh.sidecar.failed_engines == ["n0e0"])


async def test_a_client_that_goes_away_frees_its_lease_and_stops_the_engine(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.engine.scripts.append(stub_engine.go_on_for_ever)
        async with mesh.streaming("acme/bot"):
            assert len(mesh.sidecar.held) == 1
        await mesh.all_leases_are_back()
        await until(lambda: mesh.engine.aborted == 1)
        assert mesh.outcomes() == {"client_gone": 1}
        assert mesh.sidecar.failed_engines == []
        assert mesh.gateways[0].metrics.in_flight == 0


async def test_a_client_that_goes_away_while_it_waits_gives_its_place_back(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.sidecar.scripts.append(stub_sidecar.keep_waiting)
        asking = asyncio.ensure_future(mesh.chat("acme/bot"))
        await until(lambda: len(mesh.sidecar.acquired) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: mesh.sidecar.released == [mesh.sidecar.acquired[0].lease])
        await until(lambda: mesh.outcomes() == {"client_gone": 1})


async def test_a_wait_for_a_load_is_counted(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        mesh.sidecar.scripts.append(stub_sidecar.grant_after_a_load)
        await mesh.chat("acme/bot")
        await mesh.chat("acme/bot")
        text = (await mesh.ask("GET", "/metrics")).body.decode()
        assert "roost_gateway_cold_wait_seconds_count 1.0" in text
        assert 'roost_gateway_requests_total{outcome="ok",route="chat"} 2.0' in text


async def test_the_engine_gets_nothing_of_the_clients_headers(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        sent = {"x-data-parallel-rank": "1", "x-priority": "1", "cookie": "a=b", "x-request-id": "same"}
        key = mesh.key("acme")
        await mesh.chat("acme/bot", headers=sent | key)
        await mesh.chat("acme/bot", headers=sent | key)
        first, second = ({name.lower(): value for name, value in sent.items()} for sent in mesh.engine.headers)
        assert set(first) == {"host", "content-type", "content-length", "x-request-id"}
        # two requests of one id are two to the engine
        assert first["x-request-id"] != second["x-request-id"]


async def test_an_engine_gets_its_token_and_nobody_else_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    async with Mesh(tmp_path, access_log=True) as mesh:
        mesh.publish("acme/bot")
        mesh.sidecar.token = "the engine's own"
        told = await mesh.chat("acme/bot", headers=mesh.key("acme"))
        assert told.status == 200
        assert mesh.engine.headers[0]["Authorization"] == "Bearer the engine's own"
        assert "the engine's own" not in f"{told.body!r}{told.headers}"
    assert "the engine's own" not in f"{caplog.text}{capfd.readouterr()}"


async def test_many_at_once_all_answer_and_leave_nothing_behind(tmp_path: Path) -> None:
    async with Mesh(tmp_path, nodes=2) as mesh:
        for number in range(5):
            mesh.publish(f"acme/bot{number}")
        asks = [mesh.chat(f"acme/bot{i % 5}", stream=bool(i % 2)) for i in range(200)]
        told = await asyncio.gather(*asks)
        assert {answer.status for answer in told} == {200}
        for i, answer in enumerate(told):
            model = answer.events[0]["model"] if i % 2 else answer.json["model"]
            assert model == f"acme/bot{i % 5}@1"
        await mesh.all_leases_are_back()
        assert mesh.outcomes() == {"ok": 200}
        assert {node.leased for node in mesh.gateways[0].nodes} == {0}


async def test_an_openai_client_gets_what_it_expects(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        async with openai.AsyncOpenAI(base_url=mesh.url + "/v1", api_key="unused", max_retries=0) as client:
            answer = await client.chat.completions.create(model="acme/bot", messages=[])
            assert answer.model == "acme/bot@1"
            assert answer.choices[0].message.content == "the engine n0e0"
            with pytest.raises(openai.NotFoundError, match="no policy acme/none"):
                await client.chat.completions.create(model="acme/none", messages=[])
            mesh.engine.scripts.append(stub_engine.die_after_chunks(2))
            stream = await client.chat.completions.create(model="acme/bot", messages=[], stream=True)
            with pytest.raises(openai.APIError):
                async for chunk in stream:
                    assert chunk.model == "acme/bot@1"


async def test_a_body_is_written_again_with_each_field_once(tmp_path: Path) -> None:
    async with Mesh(tmp_path) as mesh:
        mesh.publish("acme/bot")
        body = b'{"model":"x/y","messages":[],"model":"acme/bot","n":2,"n":1}'
        told = await mesh.ask("POST", "/v1/chat/completions", data=body)
        assert told.json["model"] == "acme/bot@1"
        assert json.dumps(mesh.engine.asked[0]).count("model") == 1
