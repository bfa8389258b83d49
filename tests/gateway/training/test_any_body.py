"""Whatever a body has in a field, it is taken or refused: a 5xx would be asked for again for ever."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from tests.gateway.fleet_states import BASE

from .rig import Rig, datum
from .test_protocol import sample, sampler

# as they stand in JSON; the last ones are no text and no number that others could read
STRANGE = [
    "null", "true", "-1", "0", "9223372036854775808", str(1 << 80), "1.5", "1e308", '""', '"\\u0000"', '"\u00e9"',
    f'"{"x" * 600}"', '"../../up"', "[]", "{}", "[[]]", '["a", 1]', '{"a": {"b": []}}', '"\\ud800"', "1e999", "NaN",
]  # fmt: skip


def leaves(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a body's values are, also those that hold others."""
    if path:
        yield path
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for name, value in inner:
        yield from leaves(value, (*path, name))


def with_value(body: Any, path: tuple[Any, ...], raw: str) -> bytes:
    """The JSON of ``body`` with ``raw`` at ``path``."""
    if not path:
        return raw.encode()
    copied = body.copy()
    copied[path[0]] = msgspec.Raw(with_value(body[path[0]], path[1:], raw))
    return msgspec.json.encode(copied)


async def bodies_of(rig: Rig) -> dict[str, dict[str, Any]]:
    """A good body for every route; those of operations lack their number."""
    session = await rig.session()
    run, other = await rig.run(session, 0), await rig.run(session, 1)
    saved = await rig.result(await rig.ask("save_weights", {"model_id": other, "seq_id": 1, "path": "a"}))
    batch = {"data": [datum(weights=[1.0, 0.5, 0.0])], "loss_fn": "cross_entropy", "loss_fn_config": {"a": 1.0}}
    new = {"session_id": session, "model_seq_id": 9, "base_model": BASE, "user_metadata": {"policy": "named"}}
    operation = {"model_id": run}
    return {
        "create_session": {"user_metadata": {"policy": "named"}},
        "session_heartbeat": {"session_id": session},
        "create_model": new | {"lora_config": {"rank": 4, "seed": 1}, "optimizer_config": {"type": "adamw"}},
        "get_info": {"model_id": run},
        "weights_info": {"tinker_path": saved["path"]},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 9, "base_model": BASE},
        "asample": sample(await sampler(rig, session), 1, seed=3, stop=[5]) | {"num_samples": 1},
        "forward": operation | {"forward_input": batch},
        "forward_backward": operation | {"forward_backward_input": batch},
        "optim_step": operation | {"adam_params": {"learning_rate": 0.1, "eps": 1e-8, "grad_clip_norm": 1.0}},
        "save_weights": operation | {"path": "a", "ttl_seconds": 60, "overwrite": True},
        "load_weights": operation | {"path": saved["path"], "optimizer": True},
        "save_weights_for_sampler": operation | {"path": "b", "kind": "snapshot", "ttl_seconds": 60},
        f"sessions/{session}x/finish": {"reason": {"type": "success"}},
    }  # fmt: skip


async def test_whatever_stands_in_a_field_is_taken_or_refused(rig: Rig) -> None:
    routes = await bodies_of(rig)
    run = routes["get_info"]["model_id"]
    numbers = itertools.count(1)
    number = next(numbers)
    for route, body in routes.items():
        ordered = route in ("forward", "forward_backward", "optim_step") or ("weights" in route and "info" not in route)
        for path, raw in itertools.product(list(leaves(body)), STRANGE):
            numbered = body | {"seq_id": number} if ordered else body
            sent = with_value(numbered, path, raw)
            told = await rig.mesh.ask("POST", f"/api/v1/{route}", data=sent)
            assert told.status < 500, (route, sent, told.body)
            if ordered and told.status == 200 and told.json["model_id"] == run:
                result = await rig.result(told)
                assert result.get("category") != "server", (route, sent, result)
                number = next(numbers)
    assert number > 100, "some were taken"
