"""What a rank refuses of its device before it loads anything."""

from __future__ import annotations

import pytest

from backends.megatron_train.device import check_share
from wire.outcomes import InvalidRequest


@pytest.mark.parametrize("percentage", ["", "100", "100.0"])
def test_a_whole_gpu_is_taken(percentage: str) -> None:
    check_share(percentage)


@pytest.mark.parametrize("percentage", ["60", "99.5", "0", "most"])
def test_a_part_of_a_gpu_is_refused(percentage: str) -> None:
    with pytest.raises(InvalidRequest, match=f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {percentage}: .* wrong") as refused:
        check_share(percentage)
    assert refused.value.field == "env"
