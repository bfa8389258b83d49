"""Whose fault a failed load is, told inside the engine: what may pass must not be held against the adapter."""

from __future__ import annotations

import pytest
from safetensors import SafetensorError

from backends.faults import is_adapters_fault


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the adapter has no tensors"),
        SafetensorError("Error while deserializing header: header too large"),
        RuntimeError("The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 0"),
    ],
)
def test_the_adapters_fault(error: Exception) -> None:
    assert is_adapters_fault(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("NCCL error: unhandled system error"),
        AttributeError("'NoneType' object has no attribute 'shape'"),
        KeyError("model.layers.0"),
        TimeoutError(),
    ],
)
def test_what_may_pass(error: Exception) -> None:
    assert not is_adapters_fault(error)
