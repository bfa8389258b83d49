"""A fleet whose engines take different adapters of one base with experts: each goes where it can be served, or is
refused with what each engine says before anything is fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
import torch

from packer.shape import BaseShape
from tests.e2e.mesh import BASE, Mesh, Reply, ask
from tests.e2e.second_node import NAME, SecondNode
from tests.models import make_merged, make_tiny_base, reference_answer
from tests.packer.moe import config, folder_of, per_expert

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HERE, THERE = "here", NAME
VLLM_RANK, SGLANG_RANK = 16, 8
PROMPT, TOKENS = "the quick brown fox", 8
EXPERTS = ("q_proj", "gate_proj", "up_proj", "down_proj")
# PEFT's name of the router
ROUTER = ("q_proj", "gate")


class Fleet(NamedTuple):
    mesh: Mesh
    base: Path

    def publish(self, policy: str, rank: int, targets: Sequence[str]) -> str:
        """Publish an adapter; returns what it must answer, by transformers."""
        folder = self.mesh.root / policy
        shape = BaseShape.from_config((self.base / "config.json").read_bytes())
        tensors = {
            name: tensor * (0.15 if "lora_B" in name else tensor.shape[1] ** -0.5)
            for name, tensor in per_expert(shape, rank, dtype=torch.float32, seed=len(policy)).items()
            if any(f".{target}." in name for target in targets)
        }
        folder_of(folder, tensors, config(rank, target_modules=sorted(targets)))
        self.mesh.publish(f"acme/{policy}", folder)
        merged = make_merged(folder.with_suffix(".merged"), self.base, folder)
        return reference_answer(merged, None, PROMPT, TOKENS)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("differ")
    base = make_tiny_base(root / "base", arch="qwen3_moe")
    second = SecondNode(root / "there", {"backend": "sglang", "max_rank": SGLANG_RANK})
    told = {"slots": 2, "max_rank": VLLM_RANK}
    mesh = Mesh(root / "mesh", base, engine=told, sidecar={}, others=[second.address])
    mesh.up()
    try:
        second.up(mesh)
        yield Fleet(mesh, base)
    finally:
        second.down()
        mesh.down()


async def _ask(fleet: Fleet, policy: str) -> Reply:
    async with aiohttp.ClientSession() as session:
        return await ask(session, fleet.mesh.url, f"acme/{policy}", PROMPT, max_tokens=TOKENS)


async def test_experts_are_served_by_either(fleet: Fleet) -> None:
    expected = await asyncio.to_thread(fleet.publish, "experts", SGLANG_RANK, EXPERTS)
    for node, other in ((HERE, THERE), (THERE, HERE)):
        await asyncio.to_thread(fleet.mesh.roost, "node", "cordon", other)
        reply = await _ask(fleet, "experts")
        await asyncio.to_thread(fleet.mesh.roost, "node", "uncordon", other)
        assert (reply.status, reply.text, reply.headers["x-roost-node"]) == (200, expected, node), reply.error


async def test_what_one_can_not_take_goes_to_the_other(fleet: Fleet) -> None:
    # several: each would have another first node
    for number in range(3):
        policy = f"wide{'x' * number}"
        expected = await asyncio.to_thread(fleet.publish, policy, VLLM_RANK, EXPERTS)
        reply = await _ask(fleet, policy)
        assert (reply.status, reply.text, reply.headers["x-roost-node"]) == (200, expected, HERE), reply.error
    fetches = (await asyncio.to_thread(fleet.mesh.nodes))[THERE]["fetches"]
    await asyncio.to_thread(fleet.mesh.roost, "node", "cordon", HERE)
    refused = await _ask(fleet, policy)
    await asyncio.to_thread(fleet.mesh.roost, "node", "uncordon", HERE)
    assert refused.status == 503
    assert "draining" in refused.error
    assert (await asyncio.to_thread(fleet.mesh.nodes))[THERE]["fetches"] == fetches


@pytest.mark.parametrize(
    ("policy", "rank", "targets", "reason"),
    [
        ("wider", 32, EXPERTS, f"rank 32 is above sglang's {SGLANG_RANK}; rank 32 is above vllm's {VLLM_RANK}"),
        # vLLM wraps a router, and its experts compute it past the wrapper
        ("router", SGLANG_RANK, ROUTER, "sglang can't change router; vllm can't change router"),
    ],
)
async def test_what_neither_takes_is_refused_with_both_reasons(
    fleet: Fleet, policy: str, rank: int, targets: Sequence[str], reason: str
) -> None:
    await asyncio.to_thread(fleet.publish, policy, rank, targets)
    before = await asyncio.to_thread(fleet.mesh.nodes)
    reply = await _ask(fleet, policy)
    assert (reply.status, reply.error) == (409, f"no engine of {BASE} takes this adapter: {reason}")
    after = await asyncio.to_thread(fleet.mesh.nodes)
    assert [after[node]["fetches"] for node in (HERE, THERE)] == [before[node]["fetches"] for node in (HERE, THERE)]
