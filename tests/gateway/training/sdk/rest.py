"""A client that uses a stock SDK's RestClient: ``rest.py BASE_URL KEY OTHER_KEY BASE``.

The other key is another tenant's.

Runs in the SDK's own environment, so it imports nothing of ours. Its last line is what it saw, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

url, key, other_key, base = sys.argv[1:]
seen: dict[str, Any] = {}


def done(given: Any) -> Any:
    return given.result() if hasattr(given, "result") else given


def refused(call: Callable[[], Any]) -> list[Any]:
    """Status and message, as the SDK shows them."""
    try:
        done(call())
    except tinker.APIStatusError as error:
        return [error.status_code, error.body["error"]]
    return [200, ""]


def in_time(call: Callable[[], Any]) -> Any:
    """What ``call`` returns once it is not refused."""
    until = time.monotonic() + 20
    while time.monotonic() < until and refused(call)[0] != 200:
        time.sleep(0.1)
    return done(call())


datum = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3, 4]), loss_fn_inputs={"target_tokens": [2, 3, 4, 5]}
)
service = tinker.ServiceClient(base_url=url, api_key=key, user_metadata={"policy": "taught", "note": "mine"})
first = done(service.create_lora_training_client(base_model=base, rank=4, seed=3))
rest = service.create_rest_client()

saved = done(first.save_state("one")).path
again = done(first.save_state("two", ttl_seconds=3600)).path
sampled = done(first.save_weights_for_sampler("three")).path
run_id = saved.split("/")[2]
sampler = done(service.create_sampling_client(model_path=sampled))
done(service.create_lora_training_client(base_model=base, rank=8, seed=3))

runs = done(rest.list_training_runs())
run = done(rest.get_training_run(run_id))
assert run == done(rest.get_training_run_by_tinker_path(sampled)) == runs.training_runs[1]
seen["runs"] = [each.lora_rank for each in runs.training_runs]
seen["cursor"] = [runs.cursor.offset, runs.cursor.limit, runs.cursor.total_count]
page = done(rest.list_training_runs(limit=1, offset=1))
seen["page"] = [[each.lora_rank for each in page.training_runs], page.cursor.total_count]
seen["past the end"] = len(done(rest.list_training_runs(limit=1, offset=2)).training_runs)
seen["run"] = [run.base_model, run.model_owner, run.is_lora, run.corrupted, run.user_metadata]
seen["last"] = [run.last_checkpoint.tinker_path == again, run.last_sampler_checkpoint.tinker_path == sampled]
seen["age"] = time.time() - run.last_request_time.timestamp()

listed = done(rest.list_checkpoints(run_id)).checkpoints
seen["checkpoints"] = [[each.checkpoint_type, each.checkpoint_id, each.public] for each in listed]
assert [each.tinker_path for each in listed] == [sampled, again, saved]
assert all(each.size_bytes for each in listed)
seen["expire"] = [each.expires_at is not None for each in listed]
mine = done(rest.list_user_checkpoints(limit=2))
assert mine.checkpoints == listed[:2]
seen["mine"] = [mine.cursor.offset, mine.cursor.limit, mine.cursor.total_count]
seen["info"] = [done(rest.get_weights_info_by_tinker_path(path)).lora_rank for path in (saved, sampled)]

sessions = done(rest.list_sessions()).sessions
session = done(rest.get_session(sessions[0]))
seen["sessions"] = [run_id.startswith(sessions[0]), len(sessions), len(session.training_run_ids)]
seen["sampler"] = done(rest.get_sampler(session.sampler_ids[0])).model_path == sampled

# what another tenant has is not there
other = tinker.ServiceClient(base_url=url, api_key=other_key).create_rest_client()
seen["other"] = [
    len(done(other.list_training_runs()).training_runs),
    len(done(other.list_user_checkpoints()).checkpoints),
    sessions[0] in done(other.list_sessions()).sessions,
]
for name, call in {
    "run": lambda: other.get_training_run(run_id),
    "checkpoints": lambda: other.list_checkpoints(run_id),
    "info": lambda: other.get_weights_info_by_tinker_path(saved),
    "session": lambda: other.get_session(sessions[0]),
    "delete": lambda: other.delete_checkpoint_from_tinker_path(saved),
    "ttl": lambda: other.set_checkpoint_ttl_from_tinker_path(saved, 60),
}.items():
    seen[f"other's {name}"] = refused(call)[0]

# a time for what had none, and none for what had one
done(rest.set_checkpoint_ttl_from_tinker_path(saved, 60))
done(rest.set_checkpoint_ttl_from_tinker_path(again, None))
listed = done(rest.list_checkpoints(run_id)).checkpoints
seen["expire now"] = [each.expires_at is not None for each in listed]

# in use, and then not
third = done(service.create_training_client_from_state(again))
seen["loaded"] = refused(lambda: rest.delete_checkpoint_from_tinker_path(again))
for _ in range(3):
    third.forward_backward([datum], "cross_entropy").result()
in_time(lambda: rest.delete_checkpoint_from_tinker_path(again))
in_time(lambda: rest.delete_checkpoint(run_id, "weights/one"))
seen["sampled from"] = refused(lambda: rest.delete_checkpoint_from_tinker_path(sampled))
seen["left"] = [each.checkpoint_id for each in done(rest.list_user_checkpoints()).checkpoints]
seen["again"] = refused(lambda: rest.delete_checkpoint_from_tinker_path(saved))
seen["load"] = refused(lambda: service.create_training_client_from_state(saved))[0]
seen["the name again"] = done(first.save_state("one")).path == saved
seen["samples"] = len(
    sampler.sample(
        prompt=types.ModelInput.from_ints([5, 6, 7]), num_samples=2, sampling_params=types.SamplingParams(max_tokens=3)
    )
    .result()
    .sequences
)

for name, call in {
    "no run": lambda: rest.get_training_run("nothing:train:0"),
    "no session": lambda: rest.get_session("nothing"),
    "no checkpoint": lambda: rest.delete_checkpoint(run_id, "weights/none"),
    "no kind": lambda: rest.delete_checkpoint(run_id, "one"),
    "limit 0": lambda: rest.list_training_runs(limit=0),
    "limit 1001": lambda: rest.list_user_checkpoints(limit=1001),
    "offset -1": lambda: rest.list_sessions(offset=-1),
    "ttl 0": lambda: rest.set_checkpoint_ttl_from_tinker_path(saved, 0),
    "publish": lambda: rest.publish_checkpoint_from_tinker_path(saved),
    "unpublish": lambda: rest.unpublish_checkpoint_from_tinker_path(saved),
    "project": lambda: rest.assign_session_project(sessions[0], "p"),
    "archive": lambda: rest.get_checkpoint_archive_url_from_tinker_path(saved),
    "trace": lambda: rest.export_session_trace(sessions[0]),
    "in a project": lambda: rest.list_training_runs(project_id="p"),
}.items():
    try:
        seen[name] = refused(call)
    except (AttributeError, TypeError):
        seen[name] = None  # not of this version
print(json.dumps(seen), flush=True)
