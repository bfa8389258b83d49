"""The kernel configurations that are tried: few, spread over what has won on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

# in the form of vLLM's files
Configuration: TypeAlias = dict[str, int | None]

_SMALLEST_BLOCK = 16
_LARGEST_RANK_BLOCK = 64
_NARROW = 16
# block_m, whether a block has the whole rank, block_k, split_k, num_stages
_SHRINKS = (
    (16, True, 128, 32, 2), (16, True, 256, 16, 2), (32, True, 128, 4, 3), (32, True, 128, 8, 3),
    (32, True, 128, 16, 2), (32, True, 256, 8, 2), (32, True, 256, 16, 2), (32, False, 32, 8, 2),
    (32, False, 256, 64, 2), (64, True, 64, 1, 4), (64, True, 64, 16, 3), (64, True, 128, 4, 3),
    (64, True, 128, 8, 3), (64, True, 128, 16, 2),
)  # fmt: skip
# block_m, block_n, num_warps, num_stages
_EXPANDS = (
    (16, 128, 4, 1), (16, 256, 4, 1), (32, 128, 4, 1), (32, 256, 4, 1), (32, 256, 8, 1), (32, 512, 8, 1),
    (64, 64, 4, 1), (64, 64, 4, 2), (64, 128, 4, 1), (64, 128, 4, 2), (64, 256, 4, 1), (64, 256, 8, 1),
    (64, 512, 8, 1),
)  # fmt: skip
_SHORT = {
    "block_m": "m", "block_n": "n", "block_k": "k", "split_k": "split", "num_warps": "warps", "num_ctas": "ctas",
    "group_size_m": "group", "num_stages": "stages", "max_nreg": "registers",
}  # fmt: skip


def candidates(op: str, rank: int) -> list[Configuration]:
    """All that are tried of ``shrink`` or ``expand`` for adapters of ``rank``, each once."""
    block = rank_block(rank)
    if op == "expand":
        return [
            {"block_m": m, "block_n": n, "block_k": block, "num_warps": warps, "num_ctas": 1, "num_stages": stages,
             "max_nreg": None}
            for m, n, warps, stages in _EXPANDS
        ]  # fmt: skip
    return _each_once(
        {"block_m": m, "block_n": block if whole else _NARROW, "block_k": k, "split_k": split, "num_warps": 4,
         "num_ctas": 1, "group_size_m": 8, "num_stages": stages, "max_nreg": None}
        for m, whole, k, split, stages in _SHRINKS
    )  # fmt: skip


def rank_block(rank: int) -> int:
    """A power of two that holds the rank, within what a block may have."""
    return max(_SMALLEST_BLOCK, min(_LARGEST_RANK_BLOCK, 1 << (rank - 1).bit_length()))


def label(configuration: Configuration) -> str:
    """Its name in a report: ``m32 n16 k256 split64 warps4 stages2``; what is one or nothing is left out."""
    named = ((_SHORT.get(name, name), value) for name, value in configuration.items())
    return " ".join(f"{name}{value}" for name, value in named if value is not None and value != 1)


def _each_once(configurations: Iterable[Configuration]) -> list[Configuration]:
    return list({tuple(one.values()): one for one in configurations}.values())
