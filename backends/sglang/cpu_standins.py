"""What SGLang lacks on CPU, stood in for: imports of CUDA packages, pinned memory, and experts with adapters.

Used by the CPU profile alone (``launch``); whatever is measured or shown with it must say so. Everything else on CPU is
SGLang's own: its loader, its memory pool of adapters, its dense layers and their adapters.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

LABEL = "SGLang on CPU with stand-ins: import stubs of torchvision and sgl_kernel, no pinned memory, experts in torch"

# imported without condition by modules that a text model on CPU loads, and not used by it
_STUBBED = ("torchvision", "sgl_kernel")
# libraries that do without torchvision ask for it this way: they shall
_HIDDEN = "torchvision"
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "rand", "randn")


def install_import_stubs() -> None:
    """Let the stubbed packages be imported. Call it before anything of SGLang is."""
    sys.meta_path.append(_StubFinder())
    stock = importlib.util.find_spec

    @functools.wraps(stock)
    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        return None if name.partition(".")[0] == _HIDDEN else stock(name, package)

    importlib.util.find_spec = find_spec


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _STUBBED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


class _Stub(ModuleType):
    """A module with every name in it, none of which can be used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (_Unusable,), {"__module__": self.__name__})


class _Named(type):
    """A class with every name in it: some are read while modules are imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (_Unusable,), {"__module__": f"{cls.__module__}.{cls.__name__}"})


class _Unusable:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError(f"{type(self).__module__}.{type(self).__name__} is not on CPU")


def drop_pinned_memory() -> None:
    """SGLang asks for pinned memory on CPU too, which torch refuses without CUDA."""
    import torch

    for name in _FACTORIES:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]


def _without_pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make
