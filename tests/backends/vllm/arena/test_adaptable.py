"""What of a model an adapter would not reach, though it is wrapped."""

from __future__ import annotations

from typing import Any

from torch import nn

from backends.vllm.arena.adaptable import bypassed


class Wrapper(nn.Module):
    """As vLLM wraps a layer for adapters."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Block(nn.Module):
    """A block whose experts compute the router themselves where ``inside``."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.gate: nn.Module = nn.Linear(2, 2)
        self.up: nn.Module = nn.Linear(2, 2)
        self.experts = nn.Module()
        if inside:
            self.experts.gate = self.gate


def wrap(block: Any) -> dict[str, nn.Module]:
    block.gate, block.up = Wrapper(block.gate), Wrapper(block.up)
    return {"gate": block.gate, "up": block.up}


def test_a_router_that_its_experts_compute_is_not_reached() -> None:
    block = Block(inside=True)
    assert bypassed(block, wrap(block)) == {"gate"}


def test_a_router_that_its_block_computes_is_reached() -> None:
    block = Block(inside=False)
    assert bypassed(block, wrap(block)) == set()
