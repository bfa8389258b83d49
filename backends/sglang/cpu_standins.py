"""What SGLang lacks on CPU, stood in for: imports of CUDA packages, pinned memory, the hash of seeds, and experts with
adapters.

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

LABEL = (
    "SGLang on CPU with stand-ins: import stubs of torchvision and sgl_kernel, no pinned memory, experts with adapters "
    "and the hash of seeds in torch, nothing compiled"
)

# imported without condition by modules that a text model on CPU loads, and not used by it
_STUBBED = ("torchvision", "sgl_kernel")
# libraries that do without torchvision ask for it this way: they shall
_HIDDEN = "torchvision"
_WORD = 0xFFFFFFFF
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


def compute_experts_in_torch() -> None:
    """Have experts with adapters computed by ``experts_with_adapters``: SGLang's own are CUDA kernels."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    FusedMoEWithLoRA._forward_with_lora = experts_with_adapters


def experts_with_adapters(self: Any, hidden_states: Any, topk_output: Any, lora_info: Any, **_: Any) -> Any:
    """(tokens, hidden) -> the same, expert by expert and slot by slot, in fp32.

    ``lora_info``'s B already holds the adapter's scale, and gate's rows of A end where the largest rank would.
    """
    import torch
    from torch.nn.functional import silu

    base, config = self.base_layer, self.moe_runner_config
    if config.activation != "silu" or not config.is_gated or config.gemm1_alpha is not None:
        raise RuntimeError("the stand-in for experts on CPU knows experts with a SiLU gate alone")
    ids, weights, slots = topk_output.topk_ids, topk_output.topk_weights.float(), lora_info.token_lora_mapping
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        rows, choice = torch.where(ids == expert)
        x = hidden_states[rows].float()
        changed = _changes(lora_info, expert, slots[rows])
        gate_up = x @ base.w13_weight[expert].float().T
        for mine, gate_up_a, gate_up_b, _, _ in changed:
            halves = zip(gate_up_a.chunk(2), gate_up_b.chunk(2), strict=True)
            gate_up[mine] += torch.cat([(x[mine] @ a.T) @ b.T for a, b in halves], dim=-1)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = silu(gate) * up
        down = inner @ base.w2_weight[expert].float().T
        for mine, _, _, down_a, down_b in changed:
            down[mine] += (inner[mine] @ down_a.T) @ down_b.T
        out.index_add_(0, rows, down * weights[rows, choice, None])
    return out.to(hidden_states.dtype)


def _changes(lora_info: Any, expert: int, slots: Any) -> list[tuple[Any, ...]]:
    """For each slot among ``slots``: whose rows are its, and its factors for the expert."""
    factors = (
        lora_info.gate_up_lora_a_weights, lora_info.gate_up_lora_b_weights,
        lora_info.down_lora_a_weights, lora_info.down_lora_b_weights,
    )  # fmt: skip
    present = [slot for slot in slots.unique().tolist() if slot >= 0]
    return [(slots == slot, *(factor[slot, expert].float() for factor in factors)) for slot in present]


def hash_seeds_in_torch() -> None:
    """The hash that draws a token by a request's seed is one of ``sgl_kernel``'s."""
    from sglang.srt.layers import sampler

    sampler.murmur_hash32 = murmur_hash32


def murmur_hash32(seeds: Any, positions: Any, columns: Any) -> Any:
    """MurmurHash3 of (seed, position, column) as 16 bytes: (requests,), (requests,), (columns,) -> int64 (requests,
    columns) within 32 bits.
    """
    seeds = seeds.long()[:, None]
    hashed = _mixed(_mixed(0, seeds & _WORD), (seeds >> 32) & _WORD)
    hashed = _mixed(_mixed(hashed, positions.long()[:, None]), columns.long()[None, :]) ^ 16
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _WORD
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _WORD
    return hashed ^ (hashed >> 16)


def _mixed(hashed: Any, word: Any) -> Any:
    word = (_rotated((word * 0xCC9E2D51) & _WORD, 15) * 0x1B873593) & _WORD
    return (_rotated(hashed ^ word, 13) * 5 + 0xE6546B64) & _WORD


def _rotated(word: Any, bits: int) -> Any:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
