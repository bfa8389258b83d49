"""The training service under the real supervisor, with the real trainer on a tiny base."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from packer.revision import RevisionFile
from tests.backends.megatron.bases import make_base
from tests.gateway.training.rig import datum
from tests.gateway.training.sdks import SDKS, environment, run_client
from tests.models import make_tiny_base

from .training_mesh import engine_of, trained

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]


async def test_a_run_is_trained_saved_published_and_outlives_its_service(tmp_path: Path) -> None:
    async with trained(tmp_path, make_base(tmp_path / "base", "llama")) as client:
        _, run = await client.begin("taught", train_mlp=False)
        before = (await client.train(run, 1))["metrics"]["loss:sum"]
        await client.result("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {"learning_rate": 0.01}})
        saved = await client.result("save_weights", {"model_id": run, "seq_id": 3, "path": "a"})
        after = (await client.train(run, 4, forward_only=True))["metrics"]["loss:sum"]
        assert after < before
        await client.train(run, 5)

        service = next(child for child in client.running.state.processes if child.name == "training")
        assert service.identity is not None
        os.kill(service.identity.pid, signal.SIGKILL)
        assert (await client.train(run, 6, forward_only=True))["metrics"]["loss:sum"] == after
        loaded = {"model_id": run, "seq_id": 7, "path": saved["path"], "optimizer": True}
        await client.result("load_weights", loaded)
        assert (await client.train(run, 8, forward_only=True))["metrics"]["loss:sum"] == after
        await client.result("save_weights_for_sampler", {"model_id": run, "seq_id": 9, "path": "first"})

        shown = await client.show("default/taught")
        assert [each["uri"] for each in shown["checkpoints"]] == [saved["path"]]
        (revision,) = shown["revisions"]
        assert revision["provenance"]["source"] == f"tinker://{run}/sampler_weights/first"
        assert (revision["rank"], set(revision["targets"])) == (4, {"q", "k", "v", "o"})
        store = client.running.layout.store
        (file,) = [path for path in store.rglob("*") if path.name.startswith(revision["digest"])]
        assert RevisionFile.open(file).facts().digest == revision["digest"]


async def test_what_is_sampled_is_what_was_trained(tmp_path: Path) -> None:
    """The engine's log-probabilities of the revision are the trainer's, prompt and samples alike."""
    base = make_tiny_base(tmp_path / "base")
    async with trained(tmp_path, base, node={"engines": [engine_of(base)]}) as client:
        session, run = await client.begin("taught")
        text = tuple(range(60, 72))
        for turn in range(3):
            await client.train(run, 2 * turn + 1, datum(text[:-1], text[1:]))
            adam = {"learning_rate": 0.02}
            await client.result("optim_step", {"model_id": run, "seq_id": 2 * turn + 2, "adam_params": adam})
        body = {"model_id": run, "seq_id": 7, "sampling_session_seq_id": 0}
        sampler = (await client.result("save_weights_for_sampler", body))["sampling_session_id"]

        asked = {
            "sampling_session_id": sampler, "seq_id": 0, "num_samples": 2, "prompt_logprobs": True,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": text}]},
            "sampling_params": {"max_tokens": 8, "seed": 5, "temperature": 1.0},
        }  # fmt: skip
        drawn = await client.result("asample", asked)
        assert drawn["prompt_logprobs"][0] is None
        for sequence in drawn["sequences"]:
            whole = (*text, *sequence["tokens"])
            known = await client.train(
                run, 8 + drawn["sequences"].index(sequence), datum(whole[:-1], whole[1:]), forward_only=True
            )
            expected = np.asarray(known["loss_fn_outputs"][0]["logprobs"]["data"])
            told = np.asarray([*drawn["prompt_logprobs"][1:], *sequence["logprobs"]])
            np.testing.assert_allclose(told, expected, atol=1e-3)
        again = await client.result("asample", asked | {"seq_id": 1})
        for first, second in zip(drawn["sequences"], again["sequences"], strict=True):
            assert first["tokens"] == second["tokens"]
            # the last bits are those of the batch: whether both samples are of one step is a matter of time
            np.testing.assert_allclose(first["logprobs"], second["logprobs"], atol=1e-5)
        # alone in its batch, a sample is the same to the last bit
        alone = [await client.result("asample", asked | {"seq_id": seq, "num_samples": 1}) for seq in (3, 4)]
        assert alone[0]["sequences"] == alone[1]["sequences"]
        third = drawn["sequences"][0]["tokens"][2]
        params = {"max_tokens": 8, "seed": 5, "temperature": 1.0, "stop": [third]}
        stopped = await client.result("asample", asked | {"seq_id": 2, "num_samples": 1, "sampling_params": params})
        assert stopped["sequences"][0]["stop_reason"] == "stop"
        assert stopped["sequences"][0]["tokens"][-1] == third

        body = {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny"}
        plain = (await client.ask("create_sampling_session", body))["sampling_session_id"]
        untaught = await client.result("asample", asked | {"sampling_session_id": plain})
        assert np.nansum(drawn["prompt_logprobs"][1:]) > np.nansum(untaught["prompt_logprobs"][1:])


@pytest.mark.timeout(900)
async def test_the_stock_sdks_on_the_real_thing_with_kills_in_the_middle(tmp_path: Path) -> None:
    """The gateway, the training service and its trainer are killed while each SDK's operations are under way."""
    base = make_tiny_base(tmp_path / "base")
    async with trained(tmp_path, base, node={"engines": [engine_of(base)]}) as client:
        running = client.running

        async def kill() -> None:
            await asyncio.sleep(0.2)
            for name in ("gateway", "training"):
                process = next(each for each in running.state.processes if each.name == name)
                assert process.identity is not None
                os.kill(process.identity.pid, signal.SIGKILL)

        secret = running.layout.admin_key.read_text().strip()
        for requirement, module in SDKS.items():
            interpreter = await asyncio.to_thread(environment, requirement)
            seen = await run_client(interpreter, module, running.mesh.url, secret, at_half=kill, rate=0.01)
            assert (seen["many"], seen["newest"], seen["base"]) == (2500, 1, 3)
            assert len(set(seen["through a crash"])) == 1
            assert seen["scores"][0] is seen["prompt"][0] is None
            # what an engine rounds depends on what else it has to do
            np.testing.assert_allclose(seen["scores"][1:], seen["prompt"][1:], atol=1e-5)
            assert [len(tokens) for tokens in seen["tokens"]] == [3, 3]
        shown = await client.show("default/taught")
        assert shown["latest"] == 2 * len(SDKS)
