"""The unmodified SDKs against the service, which is ended in the middle and started again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fleet_states import BASE

from .rig import Rig, secret_of
from .sdks import SDKS, environment, run_client


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("requirement", "module"), SDKS.items())
async def test_everything_with_a_crash_in_the_middle(requirement: str, module: str, tmp_path: Path) -> None:
    interpreter = await asyncio.to_thread(environment, requirement)
    async with Rig(tmp_path, anonymous=False) as rig:
        seen = await drive(rig, interpreter, module)
        assert seen["bases"] == [BASE]
        assert seen["rank"] == 4
        # two data of four tokens at -1 - 0.1 * ((7 token + 3 target) % 10), one of them masked
        assert seen["cross_entropy"] == pytest.approx(2 * (1.3 + 1.3 + 1.3))
        assert seen["ppo narrow"] != pytest.approx(seen["ppo"] / 2)
        assert seen["many"] == 2500
        assert seen["saved"] == "weights/middle"
        assert seen["tokens"] == [[39, 40, 41], [40, 41, 42]]
        assert seen["reasons"] == ["length", "length"]
        assert seen["logprobs"] == [[-0.5] * 3] * 2
        assert seen["prompt"] == [None, -6 / 8, -7 / 8] == seen["scores"]
        assert seen["topk"] == [None, [[3, -0.25], [6, -0.75]], [[3, -0.25], [7, -0.875]]]
        assert seen["stopped"] == "stop"
        assert (seen["newest"], seen["base"]) == (1, 3)
        assert "weights has 2 values for 4 tokens" in seen["refused"]

        policy = rig.mesh.catalog.view.policy("acme/taught")
        assert policy is not None and policy.latest == 2
        revision = rig.mesh.catalog.view.revision("acme/taught", 1)
        assert revision is not None and revision.provenance.source.endswith("/sampler_weights/first")
        retained = rig.mesh.catalog.view.retained("acme/taught")
        kept = [each.record.uri for each in retained]
        assert [uri.split("/")[-1] for uri in kept if ":sample:" not in uri] == ["middle"]
        assert_done_once(rig)


async def drive(rig: Rig, interpreter: Path, module: str) -> dict[str, Any]:
    """What the client saw; the service crashes at its half."""

    async def crash() -> None:
        await asyncio.sleep(0.05)
        await rig.crash()
        await rig.restart()

    return await run_client(interpreter, module, rig.url, secret_of(rig.mesh.key("acme")), at_half=crash)


def assert_done_once(rig: Rig) -> None:
    """The trainer's changes are numbered without a gap in each life."""
    numbers: dict[str, list[int]] = {}
    for policy, _, number in rig.trainer.log:
        numbers.setdefault(policy, []).append(number)
    for found in numbers.values():
        assert found == list(range(found[0], found[0] + len(found)))
