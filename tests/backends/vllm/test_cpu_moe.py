"""Our torch experts, against the plain formula token by token; and rows of the base beside rows of adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from backends.vllm import cpu_moe
from backends.vllm.cpu_moe import TorchExperts
from backends.vllm.versions import UnsupportedVllm

TOKENS, CHOSEN, EXPERTS, HIDDEN, INNER, SLOTS, RANK = 7, 2, 4, 16, 12, 3, 2
MIXED = torch.tensor([-1, 0, 2, 2, -1, 1, 0])


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """Weights, adapters' stacks and a routing, drawn at random. ``shared``: gate's and up's A, and down's B, are held
    once.
    """

    def __init__(self, *, fused: bool = False, shared: bool = False) -> None:
        self.w13, self.w2 = drawn(EXPERTS, 2 * INNER, HIDDEN, seed=1), drawn(EXPERTS, HIDDEN, INNER, seed=2)
        halves, outputs, once = (1, 2 * INNER, EXPERTS) if fused else (2, INNER, 1 if shared else EXPERTS)
        self.a = tuple(drawn(SLOTS, once, RANK, HIDDEN, seed=10 + half) for half in range(halves))
        self.b = tuple(drawn(SLOTS, EXPERTS, outputs, RANK, seed=20 + half) for half in range(halves))
        self.down_a = (drawn(SLOTS, EXPERTS, RANK, INNER, seed=30),)
        self.down_b = (drawn(SLOTS, once, HIDDEN, RANK, seed=31),)
        self.x = drawn(TOKENS, HIDDEN, seed=3)
        self.ids = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])
        self.weights = drawn(TOKENS, CHOSEN, seed=4).abs()

    def run(self, slots: torch.Tensor, *, rows: int = TOKENS, **changes: Any) -> torch.Tensor:
        """What the experts make of the tokens together; ``slots`` may be of the first ones only."""
        experts = TorchExperts.__new__(TorchExperts)
        experts._lora_context = SimpleNamespace(  # type: ignore[assignment]
            punica_wrapper=SimpleNamespace(token_lora_indices=slots), w13_num_slices=len(self.a),
            w13_lora_a_stacked=self.a, w13_lora_b_stacked=self.b,
            w2_lora_a_stacked=self.down_a, w2_lora_b_stacked=self.down_b,
        )  # fmt: skip
        output = torch.full((rows, HIDDEN), 9.0, dtype=torch.float32)
        about: dict[str, Any] = {"expert_map": None, "apply_router_weight_on_input": False}
        experts.apply(
            output=output, hidden_states=self.x, w1=self.w13, w2=self.w2, topk_weights=self.weights,
            topk_ids=self.ids, activation=MoEActivation.SILU, global_num_experts=EXPERTS, a1q_scale=None,
            a2_scale=None, workspace13=output, workspace2=output, expert_tokens_meta=None, **(about | changes),
        )  # fmt: skip
        return output

    def expected(self, slots: torch.Tensor, *, weighted: bool = True, here: tuple[int, ...] = ()) -> torch.Tensor:
        rows = []
        for token, slot in enumerate(slots.tolist()):
            row = torch.zeros(HIDDEN)
            for choice, expert in enumerate(self.ids[token].tolist()):
                if here and expert not in here:
                    continue
                x = self.x[token]
                gate_up = self.w13[expert] @ x
                if slot >= 0:
                    products = [
                        b[slot, expert] @ (a[slot, min(expert, a.shape[1] - 1)] @ x)
                        for a, b in zip(self.a, self.b, strict=True)
                    ]
                    gate_up = gate_up + torch.cat(products)
                y = torch.nn.functional.silu(gate_up[:INNER]) * gate_up[INNER:]
                z = self.w2[expert] @ y
                if slot >= 0:
                    b = self.down_b[0]
                    z = z + b[slot, min(expert, b.shape[1] - 1)] @ (self.down_a[0][slot, expert] @ y)
                row += z * self.weights[token, choice] if weighted else z
            rows.append(row)
        return torch.stack(rows)


@pytest.mark.parametrize("kind", [{}, {"fused": True}, {"shared": True}], ids=str)
@pytest.mark.parametrize("slots", [MIXED, torch.full((TOKENS,), -1), torch.full((TOKENS,), 2)], ids=str)
def test_each_token_gets_its_experts_and_its_slots_product(kind: dict[str, bool], slots: torch.Tensor) -> None:
    layer = Layer(**kind)
    torch.testing.assert_close(layer.run(slots), layer.expected(slots))
    torch.testing.assert_close(
        layer.run(slots, apply_router_weight_on_input=True), layer.expected(slots, weighted=False)
    )


@pytest.mark.parametrize("most", [1, 3])
def test_rows_that_do_not_go_into_one_call_go_into_several(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(cpu_moe, "_MOST_ROWS", most)
    layer = Layer()
    for slots in (MIXED, torch.full((TOKENS,), 2)):
        torch.testing.assert_close(layer.run(slots), layer.expected(slots))


def test_a_worker_computes_the_experts_it_has() -> None:
    layer = Layer()
    map_ = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    part = Layer()
    part.ids = layer.ids
    for name in ("w13", "w2"):
        setattr(part, name, getattr(layer, name)[[1, 3]])
    for name in ("a", "b", "down_a", "down_b"):
        setattr(part, name, tuple(stack[:, [1, 3]] for stack in getattr(layer, name)))
    torch.testing.assert_close(part.run(MIXED, expert_map=map_), layer.expected(MIXED, here=(1, 3)))
    assert not part.run(MIXED, expert_map=torch.full((EXPERTS,), -1, dtype=torch.int32)).any()


def test_rows_that_only_fill_up_a_batch_are_the_bases() -> None:
    layer = Layer()
    filled = torch.cat([MIXED[:3], torch.full((TOKENS - 3,), -1)])
    torch.testing.assert_close(layer.run(MIXED[:3]), layer.expected(filled))


def test_no_token_is_none() -> None:
    layer = Layer()
    layer.x, layer.ids, layer.weights = layer.x[:0], layer.ids[:0], layer.weights[:0]
    assert layer.run(MIXED[:0], rows=0).shape == (0, HIDDEN)


def test_sums_are_of_fp32_whatever_the_default() -> None:
    layer = Layer()
    expected = layer.expected(MIXED)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = layer.run(MIXED)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("change", [{"activation": MoEActivation.GELU}, {"is_act_and_mul": False}, {"has_bias": True}])
def test_experts_that_we_do_not_know_are_refused_at_the_start(change: dict[str, Any]) -> None:
    known = {"is_lora_enabled": True, "activation": MoEActivation.SILU, "is_act_and_mul": True, "has_bias": False}
    assert cpu_moe.select_backend(SimpleNamespace(**known))[1] is TorchExperts
    with pytest.raises(UnsupportedVllm, match="SiLU gate"):
        cpu_moe.select_backend(SimpleNamespace(**(known | change)))
