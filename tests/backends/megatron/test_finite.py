"""One value that is no number is found wherever it stands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.megatron_train.finite import is_finite


@given(st.integers(0, 5000), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_what_is_no_number_is_found(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = (torch.linspace(-1, 1, size) * 3e38).to(dtype)
    assert bool(is_finite(tensor))
    if size:
        tensor[data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
        assert not bool(is_finite(tensor))


@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 4)])
def test_any_shape_will_do(shape: tuple[int, ...]) -> None:
    assert bool(is_finite(torch.ones(shape)))
