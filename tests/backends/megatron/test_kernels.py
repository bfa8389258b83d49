"""The kernels of CUDA, run by Triton's interpreter without a GPU, against the operations that they stand for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")

from backends.megatron_train import plain_kernels
from tests.backends.megatron.bases import resident, sft_batch
from wire.trainer import CreatePolicy, ForwardBackward, PolicySpec

CLOSE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2e-2, 3e-2)}
DTYPES = pytest.mark.parametrize("dtype", CLOSE)


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """``cuda_kernels`` interpreted, which Triton decides when they are defined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from backends.megatron_train import cuda_kernels

        yield importlib.reload(cuda_kernels)
    importlib.reload(cuda_kernels)


def _drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    relative, absolute = CLOSE[dtype]
    assert found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected.float(), rtol=relative, atol=absolute)


@DTYPES
@pytest.mark.parametrize("width", [7, 1024, 1500])
def test_the_gate_and_its_gradient(kernels: ModuleType, dtype: torch.dtype, width: int) -> None:
    both, upstream = _drawn(3, 2, 2 * width, dtype=dtype), _drawn(3, 2, width, dtype=dtype)
    _close(kernels.gate(both), plain_kernels.gate(both), dtype)
    _close(kernels.gate_gradient(upstream, both), plain_kernels.gate_gradient(upstream, both), dtype)


@DTYPES
@pytest.mark.parametrize(("heads", "width"), [(1, 4), (8, 64), (11, 24)])
def test_heads_are_turned_wherever_they_lie(kernels: ModuleType, dtype: torch.dtype, heads: int, width: int) -> None:
    angles = torch.rand(5, 1, 1, width // 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    # a part of a linear's output, and what attention gives back: heads before positions
    among_others = _drawn(5, 3, heads, width + 8, dtype=dtype)[..., 8:]
    heads_first = _drawn(3, heads, 5, width, dtype=dtype).permute(2, 0, 1, 3)
    for given in (among_others, heads_first):
        turned = kernels.turn(given, cosines, sines)
        assert turned.is_contiguous()
        _close(turned, plain_kernels.turn(given, cosines, sines), dtype)


@DTYPES
@pytest.mark.parametrize("vocabulary", [5, 8192, 20_001])
def test_targets_are_scored_and_the_gradient_takes_the_logits_place(
    kernels: ModuleType, dtype: torch.dtype, vocabulary: int
) -> None:
    logits = _drawn(4, vocabulary, dtype=dtype)
    targets = torch.tensor([0, vocabulary - 1, vocabulary // 2, 1])
    leaf = logits.float().requires_grad_()
    expected = F.cross_entropy(leaf, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)

    left = logits.clone()
    _close(kernels.score(left, targets, gradient=False), expected.detach(), torch.float32)
    assert torch.equal(left, logits)
    _close(kernels.score(left, targets, gradient=True), expected.detach(), torch.float32)
    _close(left, gradient, dtype)


def test_large_and_lost_logits(kernels: ModuleType) -> None:
    logits = torch.tensor([[3e4, -3e4, 3e4, 0.0], [float("-inf"), 1.0, 1.0, -1e30], [float("nan"), 0.0, 0.0, 0.0]])
    nll = kernels.score(logits, torch.tensor([0, 1, 1]), gradient=True)
    torch.testing.assert_close(nll[:2], torch.full((2,), 2.0).log())
    torch.testing.assert_close(logits[0], torch.tensor([-0.5, 0.0, 0.5, 0.0]))
    torch.testing.assert_close(logits[1], torch.tensor([0.0, -0.5, 0.5, 0.0]))
    # the trainer refuses what is not finite: it must not look finite
    assert nll[2].isnan()
    assert logits[2].isnan().any()


@pytest.mark.parametrize(("base", "recompute"), [("qwen3", True), ("llama", False)])
def test_a_whole_pass_is_that_of_the_plain_operations(
    base: str,
    recompute: bool,
    kernels: ModuleType,
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from backends.megatron_train import engine, gated, head, rotary

    # the interpreter reduces a number at a time
    monkeypatch.setattr(kernels, "_LOGITS", 128)
    seen: list[torch.Tensor] = []
    check = engine.Engine._refuse_if_not_finite
    monkeypatch.setattr(
        engine.Engine,
        "_refuse_if_not_finite",
        lambda self, tensors: (seen.append(torch.cat([each.flatten() for each in tensors])), check(self, tensors))[1],
    )
    with resident(bases[base], tmp_path / "scratch", recompute=recompute) as rank:
        rank.answer(CreatePolicy(spec=PolicySpec(policy="one", rank=8)))
        rank.answer(ForwardBackward(policy="one", batch=sft_batch(count=2)))
        for module in (gated, rotary):
            monkeypatch.setattr(module, "kernels_of", lambda _: kernels)
        monkeypatch.setattr(head, "_scored", head._scored_on_cuda)
        rank.answer(ForwardBackward(policy="one", batch=sft_batch(count=2)))
    plain, ours = seen
    assert plain.norm() > 0
    assert not torch.equal(plain, ours)
    assert (ours - plain).norm() < 1e-5 * plain.norm()
