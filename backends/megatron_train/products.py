"""LoRA products added into the output of a linear that computes several projections, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Columns(NamedTuple):
    """The columns of one projection in an output of ``groups`` equal blocks: in each ``width`` from ``start`` on."""

    start: int
    width: int


class Product(NamedTuple):
    """``middle`` (..., rank) times ``b`` (groups * width, rank) transposed, for the columns ``at``."""

    at: Columns
    middle: torch.Tensor
    b: torch.Tensor


def add_products(output: torch.Tensor, groups: int, products: Sequence[Product]) -> torch.Tensor:
    """``output`` (..., columns) with the products added, each within the kernel that makes it: what they add is never
    written down by itself, which for wide linears is most of what LoRA costs. ``output`` itself is changed."""
    columns = tuple(product.at for product in products)
    factors = [factor for product in products for factor in (product.middle, product.b)]
    added: torch.Tensor = _AddProducts.apply(output, groups, columns, *factors)  # type: ignore[no-untyped-call]
    return added


class _AddProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, groups: int, columns: tuple[Columns, ...], *factors: torch.Tensor
    ) -> torch.Tensor:
        blocks = output.view(-1, groups, output.shape[-1] // groups)
        for at, middle, b in zip(columns, factors[::2], factors[1::2], strict=True):
            rank = b.shape[-1]
            part = blocks.narrow(2, *at).transpose(0, 1)
            part.baddbmm_(
                middle.reshape(1, -1, rank).expand(groups, -1, -1), b.view(groups, at.width, rank).transpose(1, 2)
            )
        ctx.mark_dirty(output)
        ctx.groups, ctx.columns = groups, columns
        ctx.save_for_backward(*factors)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = upstream[0]
        blocks = gradient.reshape(-1, ctx.groups, gradient.shape[-1] // ctx.groups)
        factors = ctx.saved_tensors
        gradients: list[torch.Tensor | None] = []
        for at, middle, b in zip(ctx.columns, factors[::2], factors[1::2], strict=True):
            part = blocks.narrow(2, *at).reshape(len(blocks), -1)
            gradients.append((part @ b).view_as(middle))
            gradients.append(part.t() @ middle.reshape(len(part), -1))
        return gradient, None, None, *gradients
