"""A client that uses a stock SDK for all that the training API has: ``client.py MODULE BASE_URL KEY BASE RATE``.

Runs in the SDK's own environment, so it imports nothing of ours. It prints a line ``half`` in the middle and waits for
one on standard input while operations are under way; its last line is what it saw, as JSON.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from typing import Any

module, url, key, base, rate = sys.argv[1:]
os.environ |= {
    name: value for kind in ("TINKER", "MINT") for name, value in ((f"{kind}_BASE_URL", url), (f"{kind}_API_KEY", key))
}
tinker: Any = importlib.import_module(module)
types: Any = importlib.import_module("tinker").types


def done(given: Any) -> Any:
    return given.result() if hasattr(given, "result") else given


def datum(**inputs: list[float]) -> Any:
    tokens, targets = [1, 2, 3, 4], [2, 3, 4, 5]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets, **inputs}
    )


ADAM = types.AdamParams(learning_rate=float(rate), beta1=0.5)
RL = {"logprobs": [-1.5] * 4, "advantages": [1.0, -1.0, 0.5, 2.0]}
seen: dict[str, Any] = {}

service = tinker.ServiceClient(user_metadata={"policy": "taught"})
seen["bases"] = [model.model_name for model in service.get_server_capabilities().supported_models]
training = done(service.create_lora_training_client(base_model=base, rank=4, seed=3))
seen["rank"] = training.get_info().lora_rank

# every loss, each of them answered
for loss, inputs in {
    "cross_entropy": {"weights": [1.0, 1.0, 0.0, 1.0]},
    "importance_sampling": RL,
    "ppo": RL,
    "cispo": RL,
    "dro": RL,
}.items():
    output = training.forward_backward([datum(**inputs), datum(**inputs)], loss).result()
    assert [len(each["logprobs"].tolist()) for each in output.loss_fn_outputs] == [4, 4], output
    seen[loss] = output.metrics["loss:sum"]
clipped = training.forward_backward(
    [datum(**RL)], "ppo", loss_fn_config={"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
).result()
seen["ppo narrow"] = clipped.metrics["loss:sum"]
seen["grad_norm"] = training.optim_step(ADAM).result().metrics["grad_norm:mean"]
seen["forward"] = training.forward([datum()], "cross_entropy").result().metrics["loss:sum"]


def squares(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    loss = sum((each**2).sum() for each in logprobs)
    return loss, {"squares:sum": float(loss.detach())}


custom = training.forward_backward_custom([datum(), datum()], squares).result()
seen["squares"] = custom.metrics["squares:sum"]
training.optim_step(ADAM).result()

# more than one request to a call: they arrive first one last
many = training.forward_backward([datum() for _ in range(2500)], "cross_entropy").result()
one = training.forward([datum()], "cross_entropy").result()
assert math.isclose(many.metrics["loss:sum"], 2500 * one.metrics["loss:sum"], rel_tol=1e-5)
seen["many"] = len(many.loss_fn_outputs)

print("half", flush=True)
under_way = [training.forward_backward([datum()], "cross_entropy") for _ in range(4)]
step = training.optim_step(ADAM)
sys.stdin.readline()
seen["through a crash"] = [each.result().metrics["loss:sum"] for each in under_way]
step.result()


def loss_of(client: Any) -> float:
    return float(client.forward([datum()], "cross_entropy").result().metrics["loss:sum"])


def stepped(client: Any) -> float:
    """The loss after one more step, which the moments have a part in."""
    client.forward_backward([datum()], "cross_entropy").result()
    client.optim_step(ADAM).result()
    return loss_of(client)


saved = training.save_state("middle").result().path
seen["saved"] = saved.split("/", 3)[3]
here = loss_of(training)
on = stepped(training)
training.load_state(saved).result()
assert loss_of(training) == here
assert stepped(training) != on
training.load_state_with_optimizer(saved).result()
assert stepped(training) == on
resumed = done(service.create_training_client_from_state(saved))
assert loss_of(resumed) == here
assert stepped(resumed) != on
resumed = done(service.create_training_client_from_state_with_optimizer(saved))
assert stepped(resumed) == on

# the last run that was made writes the policy that all of them are called
path = resumed.save_weights_for_sampler("first").result().path
prompt = types.ModelInput.from_ints([5, 6, 7])
params = types.SamplingParams(max_tokens=3, seed=11, temperature=0.5)
sampler = done(service.create_sampling_client(model_path=path))
answer = sampler.sample(
    prompt=prompt, num_samples=2, sampling_params=params, include_prompt_logprobs=True, topk_prompt_logprobs=2
).result()
seen["tokens"] = [list(each.tokens) for each in answer.sequences]
seen["reasons"] = [each.stop_reason for each in answer.sequences]
seen["logprobs"] = [list(each.logprobs) for each in answer.sequences]
seen["prompt"] = [None if each is None or math.isnan(each) else each for each in answer.prompt_logprobs]
seen["topk"] = [row and [[token, value] for token, value in row] for row in answer.topk_prompt_logprobs]
stop = types.SamplingParams(max_tokens=8, stop=["\n"])
seen["stopped"] = sampler.sample(prompt=prompt, num_samples=1, sampling_params=stop).result().sequences[0].stop_reason
scores = sampler.compute_logprobs(prompt).result()
seen["scores"] = [None if each is None or math.isnan(each) else each for each in scores]
stepped(resumed)
newest = done(resumed.save_weights_and_get_sampling_client())
seen["newest"] = len(newest.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences)
plain = done(service.create_sampling_client(base_model=base))
seen["base"] = len(plain.sample(prompt=prompt, num_samples=3, sampling_params=params).result().sequences)

try:
    resumed.forward_backward([datum(weights=[1.0, 2.0])], "cross_entropy").result()
except Exception as error:
    seen["refused"] = str(error)
# and goes on
stepped(resumed)
if hasattr(service, "close"):
    service.close("success").result()
print(json.dumps(seen), flush=True)
