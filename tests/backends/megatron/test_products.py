"""LoRA products that are added within an output, against the same in plain operations."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.megatron_train.products import Columns, Product, add_products

_WIDTHS = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@settings(deadline=None)
@given(groups=st.integers(1, 3), widths=_WIDTHS, ranks=st.data(), seed=st.integers(0, 1000))
def test_products_and_their_gradients_are_those_of_plain_operations(
    groups: int, widths: list[int], ranks: st.DataObject, seed: int
) -> None:
    numbers = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64).requires_grad_()

    base = drawn(3, 2, groups * sum(widths))
    present = ranks.draw(st.lists(st.booleans(), min_size=len(widths), max_size=len(widths)).filter(any))
    products, deltas, start = [], [], 0
    for width, adapted in zip(widths, present, strict=True):
        if adapted:
            rank = ranks.draw(st.integers(1, 4))
            middle, b = drawn(3, 2, rank), drawn(groups * width, rank)
            products.append(Product(Columns(start, width), middle, b))
            deltas.append((middle @ b.T).view(3, 2, groups, width))
        else:
            deltas.append(torch.zeros(3, 2, groups, width, dtype=torch.float64))
        start += width
    upstream = drawn(3, 2, groups * sum(widths)).detach()
    plain = base + torch.cat(deltas, -1).view_as(base)
    leaves = [base, *(factor for product in products for factor in (product.middle, product.b))]
    expected = torch.autograd.grad(plain, leaves, upstream)

    # an output, as a linear gives it, is no leaf
    added = add_products(base * 1, groups, products)

    torch.testing.assert_close(added, plain)
    torch.testing.assert_close(torch.autograd.grad(added, leaves, upstream), expected)
