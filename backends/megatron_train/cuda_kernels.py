"""The passes over memory that a model makes between its linears, each one Triton kernel. The CPU never imports this.

``gate``, ``gate_gradient`` and ``turn`` compute what those of ``plain_kernels.py`` do, in fp32 within.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024
_HEADS = 8
# a row of logits is read by one program: many warps keep its loads in flight
_LOGITS, _LOGIT_WARPS = 8192, 32


def gate(both: torch.Tensor) -> torch.Tensor:
    width = both.shape[-1] // 2
    both = both.contiguous()
    inner = both.new_empty(*both.shape[:-1], width)
    rows = inner.numel() // width
    _gate[rows, triton.cdiv(width, _COLUMNS)](both, inner, width, columns=_COLUMNS)
    return inner


def gate_gradient(upstream: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    width = both.shape[-1] // 2
    upstream, both = upstream.contiguous(), both.contiguous()
    gradient = torch.empty_like(both)
    rows = upstream.numel() // width
    _gate_gradient[rows, triton.cdiv(width, _COLUMNS)](upstream, both, gradient, width, columns=_COLUMNS)
    return gradient


def turn(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    if heads.stride(-1) != 1:
        heads = heads.contiguous()
    positions, batch, count, width = heads.shape
    half = width // 2
    if cosines.shape != (positions, 1, 1, half) or sines.shape != cosines.shape:
        raise ValueError(f"heads {tuple(heads.shape)} can't be turned by {tuple(cosines.shape)}")
    turned = torch.empty_like(heads, memory_format=torch.contiguous_format)
    _turn[positions * batch, triton.cdiv(count, _HEADS)](
        heads, cosines.contiguous(), sines.contiguous(), turned, batch, count, half, *heads.stride()[:3],
        heads_at_once=_HEADS, columns=triton.next_power_of_2(half),
    )  # fmt: skip
    return turned


def score(logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool) -> torch.Tensor:
    """``logits`` (n, vocabulary), contiguous -> -log p of ``targets`` (n,) in fp32, each of which is in the vocabulary.

    With ``gradient``, the gradient of their sum is left in ``logits``' place.
    """
    nll = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _score[(len(logits),)](
        logits, targets, nll, logits.shape[1], logits.stride(0), gradient, columns=_LOGITS, num_warps=_LOGIT_WARPS
    )
    return nll


@triton.jit  # type: ignore[untyped-decorator]
def _gate(both, inner, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    there = column < width
    kind = inner.dtype.element_ty
    gates = tl.load(both + row * 2 * width + column, mask=there, other=0.0).to(tl.float32)
    ups = tl.load(both + row * 2 * width + width + column, mask=there, other=0.0).to(tl.float32)
    opened = (gates / (1 + tl.exp(-gates))).to(kind).to(tl.float32)
    tl.store(inner + row * width + column, (opened * ups).to(kind), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_gradient(upstream, both, gradient, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    there = column < width
    kind = gradient.dtype.element_ty
    at = row * 2 * width + column
    gates = tl.load(both + at, mask=there, other=0.0).to(tl.float32)
    ups = tl.load(both + at + width, mask=there, other=0.0).to(tl.float32)
    given = tl.load(upstream + row * width + column, mask=there, other=0.0).to(tl.float32)
    open_by = 1 / (1 + tl.exp(-gates))
    of_gates = given * ups * open_by * (1 + gates * (1 - open_by))
    tl.store(gradient + at, of_gates.to(kind), mask=there)
    tl.store(gradient + at + width, (given * gates * open_by).to(kind), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    heads, cosines, sines, turned, batch, count, half, position_stride, batch_stride, head_stride,
    heads_at_once: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position, sequence = row // batch, row % batch
    head = (tl.program_id(1) * heads_at_once + tl.arange(0, heads_at_once)).to(tl.int64)[:, None]
    column = tl.arange(0, columns)[None, :]
    in_half = column < half
    there = (head < count) & in_half
    kind = turned.dtype.element_ty
    cos = tl.load(cosines + position * half + column, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sines + position * half + column, mask=in_half, other=0.0).to(tl.float32)
    source = heads + position * position_stride + sequence * batch_stride + head * head_stride + column
    first = tl.load(source, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=there, other=0.0).to(tl.float32)
    destination = turned + (row * count + head) * 2 * half + column
    tl.store(destination, (first * cos - second * sin).to(kind), mask=there)
    tl.store(destination + half, (second * cos + first * sin).to(kind), mask=there)


# what tl.max and tl.sum are made of: the interpreter can run those only that were defined while it was on
@triton.jit
def _larger(one, other):  # type: ignore[no-untyped-def]
    return tl.maximum(one, other)


@triton.jit
def _sum(one, other):  # type: ignore[no-untyped-def]
    return one + other


@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    logits, targets, nll, vocabulary, stride, gradient: tl.constexpr, columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    target = tl.load(targets + row)
    of_target = tl.load(begin + target).to(tl.float32)
    # in each lane the largest so far, and the sum of exponentials relative to it; all else is relative to the largest
    largest = tl.full((columns,), -3.0e38, tl.float32)
    total = tl.full((columns,), 0.0, tl.float32)
    for start in range(0, vocabulary, columns):
        column = start + tl.arange(0, columns)
        values = tl.load(begin + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        now = tl.maximum(largest, values)
        total = total * tl.exp(largest - now) + tl.exp(values - now)
        largest = now
    most = tl.reduce(largest, 0, _larger)
    log_sum = tl.log(tl.reduce(total * tl.exp(largest - most), 0, _sum))
    tl.store(nll + row, log_sum + (most - of_target))
    if gradient:
        for start in range(0, vocabulary, columns):
            column = start + tl.arange(0, columns)
            there = column < vocabulary
            values = tl.load(begin + column, mask=there, other=0.0).to(tl.float32)
            share = tl.exp(values - most - log_sum) - tl.where(column == target, 1.0, 0.0)
            tl.store(begin + column, share.to(logits.dtype.element_ty), mask=there)
