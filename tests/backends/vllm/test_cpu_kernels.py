"""vLLM's CPU kernels under our patch: the base's rows stay as they are, and the others get what is theirs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.lora.layers.utils import LoRAMapping
from vllm.lora.ops import torch_ops
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from backends.vllm import cpu_kernels
from backends.vllm.versions import UnsupportedVllm

SLOTS, RANK, WIDTH, VOCABULARY = 3, 4, 16, 32
# adapters by id, in slots by place; 0 is the base
IN_SLOTS: list[int | None] = [11, 12, 13]
MIXED = (0, 12, 12, 0, 13, 0, 11, 0)


@pytest.fixture
def stock() -> dict[str, Any]:
    """The kernels as they were before the patch."""
    return {name: getattr(lora_ops, name).__wrapped__ for name in cpu_kernels.KERNELS}


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lora_ops, torch_ops, punica_cpu):
        for name in cpu_kernels.KERNELS:
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(PunicaWrapperCPU, "add_lora_logits", PunicaWrapperCPU.add_lora_logits)
    cpu_kernels.patch()


def _wrapper(tokens: tuple[int, ...], is_prefill: bool) -> PunicaWrapperCPU:
    wrapper = PunicaWrapperCPU(64, 64, "cpu")
    wrapper.update_metadata(LoRAMapping(tokens, tokens, is_prefill=is_prefill), IN_SLOTS, SLOTS, VOCABULARY)
    return wrapper


def _tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=drawn) for shape in shapes]


def _delta(token: int, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    slot = IN_SLOTS.index(token)
    return b[slot, 0] @ (a[slot, 0] @ x)


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("tokens", [MIXED, (0, 0, 0), (11, 12), (0,), (0, 13), (0, *[12] * 9, 13, *[11] * 8, 0)])
def test_linear_layers_leave_the_base_alone(tokens: tuple[int, ...], is_prefill: bool) -> None:
    count = len(tokens)
    x, before, a, b = _tensors((count, WIDTH), (count, WIDTH), (SLOTS, 1, RANK, WIDTH), (SLOTS, 1, WIDTH, RANK))
    after = before.clone()
    _wrapper(tokens, is_prefill).add_lora_linear(after, x, (a,), (b,), 1.0, (WIDTH,))
    _check(tokens, before, after, x, a, b)


@pytest.mark.parametrize("is_prefill", [True, False])
def test_logits_leave_the_base_alone(is_prefill: bool) -> None:
    count = len(MIXED)
    x, before = _tensors((count, WIDTH), (count, VOCABULARY))
    a, b = _tensors((SLOTS, 1, RANK, WIDTH), (SLOTS, 1, VOCABULARY, RANK))
    after = before.clone()
    _wrapper(MIXED, is_prefill).add_lora_logits(after, x, a, b, 1.0)
    _check(MIXED, before, after, x, a, b)


@pytest.mark.parametrize(("tokens", "rows"), [(MIXED, 20), ((11, 12), 3), ((11, 0), 1)])
def test_a_prompts_logits_beside_other_requests_stay_as_they_are(tokens: tuple[int, ...], rows: int) -> None:
    x, before, a, b = _tensors((rows, WIDTH), (rows, VOCABULARY), (SLOTS, 1, RANK, WIDTH), (SLOTS, 1, VOCABULARY, RANK))
    after = before.clone()
    _wrapper(tokens, True).add_lora_logits(after, x, a, b, 1.0)
    assert torch.equal(after, before)


def test_a_prompts_logits_alone_are_its_adapters() -> None:
    x, before, a, b = _tensors((5, WIDTH), (5, VOCABULARY), (SLOTS, 1, RANK, WIDTH), (SLOTS, 1, VOCABULARY, RANK))
    after = before.clone()
    _wrapper((12,), True).add_lora_logits(after, x, a, b, 1.0)
    _check((12,) * 5, before, after, x, a, b)


@pytest.mark.parametrize("is_prefill", [True, False])
def test_embeddings_leave_the_base_alone(is_prefill: bool) -> None:
    count = len(MIXED)
    looked_up, before, b = _tensors((count, RANK), (count, WIDTH), (SLOTS, 1, WIDTH, RANK))
    after = before.clone()
    _wrapper(MIXED, is_prefill).add_lora_embedding(after, looked_up, b)
    _check(MIXED, before, after, looked_up, torch.eye(RANK).expand(SLOTS, 1, RANK, RANK), b)


def _check(
    tokens: tuple[int, ...],
    before: torch.Tensor,
    after: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
) -> None:
    for row, token in enumerate(tokens):
        if token == 0:
            assert torch.equal(after[row], before[row])
        else:
            torch.testing.assert_close(after[row], before[row] + _delta(token, x[row], a, b))


@pytest.mark.parametrize("tokens", [(12,) * 6, (12, 12, 13, 11, 12, 13), (12,), (12,) * 9 + (13, 11) + (13,) * 7])
def test_rows_are_what_the_stock_kernels_make_of_them(tokens: tuple[int, ...], stock: dict[str, Any]) -> None:
    """In the engine's own dtype, for rows of one adapter and of several, wherever a kernel writes."""
    count, slots = len(tokens), torch.tensor([IN_SLOTS.index(token) for token in tokens])
    x, h, a, b = _tensors((count, WIDTH), (count, RANK), (SLOTS, 1, RANK, WIDTH), (SLOTS, 1, WIDTH, RANK))
    a, b, x = a.bfloat16(), b.bfloat16(), x.bfloat16()
    for name, inputs, weights, width, rest in (
        ("bgmv_shrink", x, a, RANK, (0.5,)),
        ("bgmv_expand", h, b, WIDTH, (True,)),
        ("bgmv_expand", h, b, WIDTH - 2, (False,)),
        ("bgmv_expand_slice", h, b, 2 * WIDTH, (3, WIDTH, True)),
        ("bgmv_expand_slice", h, b, 2 * WIDTH, (3, WIDTH, False)),
    ):
        (before,) = _tensors((count, width))
        dtype = torch.float32 if name == "bgmv_shrink" else torch.bfloat16
        ours, theirs = before.to(dtype), before.to(dtype)
        getattr(punica_cpu, name)(inputs, weights, ours, slots, *rest)
        stock[name](inputs, weights, theirs, slots, *rest)
        torch.testing.assert_close(ours, theirs)


def test_not_even_the_sign_of_a_zero_changes() -> None:
    outputs = torch.full((2, 1), -0.0)
    weights = torch.full((1, 1, 1, 1), float("inf"))
    punica_cpu.bgmv_expand(torch.ones(2, 1), weights, outputs, torch.tensor([-1, 0]), add_inputs=True)
    assert torch.signbit(outputs[0, 0])
    assert torch.isinf(outputs[1, 0])


def test_a_vllm_whose_prefill_goes_another_way_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def another_way(inputs: torch.Tensor, weights: torch.Tensor, outputs: torch.Tensor, *rest: object) -> None:
        outputs += inputs

    monkeypatch.setattr(punica_cpu, "sgmv_expand", another_way)
    with pytest.raises(UnsupportedVllm, match="sgmv_expand gives the base an adapter"):
        cpu_kernels.patch()
