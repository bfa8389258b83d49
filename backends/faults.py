"""Whose fault a failed load is. Imports no vLLM."""

from __future__ import annotations

import re

# what safetensors says of a file that is none
_ADAPTERS_FAULTS = ("SafetensorError",)
# torch, of a matrix that does not fit where it is copied to
_SHAPES = re.compile(r"The size of tensor|must match|shape .* is invalid|shapes cannot be multiplied")


def is_adapters_fault(error: Exception) -> bool:
    """Whether trying again can't help: only what is known to be said of an adapter.

    Of memory, files, devices and whatever else is not known, an engine may think otherwise the next time.
    """
    if isinstance(error, ValueError) or type(error).__name__ in _ADAPTERS_FAULTS:
        return True
    return isinstance(error, RuntimeError) and bool(_SHAPES.search(str(error)))
