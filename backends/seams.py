"""Whether an engine has the functions that we replace, by name and parameters: looked at before any is touched."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from operator import attrgetter


def complaint(seams: Mapping[str, tuple[str, ...]]) -> str:
    """What is wrong with the first ``module:name`` that is missing or has other parameters; "" if all are there."""
    for seam, expected in seams.items():
        module, _, name = seam.partition(":")
        try:
            found = tuple(inspect.signature(attrgetter(name)(importlib.import_module(module))).parameters)
        except (ImportError, AttributeError) as error:
            return f"there is no {seam}: {error}"
        if found != expected:
            return f"{seam} takes {found}, not {expected}"
    return ""
