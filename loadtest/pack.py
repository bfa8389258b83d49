"""What packing costs: a rank-1 adapter of every expert of Qwen3-30B-A3B, at full size, 37,248 tensors.

Rounds interleave six things: reading the raw file into fresh memory, packing it into fresh memory (read, accounted
for, permuted, checked, hashed), mapping the packed file with a view of each tensor, its header never seen before and
seen before, and the stock library's read of the raw file, tensor by tensor. Reading is what a program does that just
reads a file, into the ordinary pages that it gets for it; the packer takes large ones, so the read into such pages is
measured too, as ``read_large_pages_s`` among the samples. Ratios are medians of the rounds' own ratios.
"""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from packer.memory import FreshMemory
from packer.modules import PEFT_PREFIX
from packer.peft import TENSORS_NAME, pack_peft
from packer.revision import RevisionFile, kept_header
from packer.safetensors_header import TensorSpec, encode_header
from packer.shape import BaseShape
from packer.unpack import write_peft

from .report import environment, write_report

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_hidden_layers": 48,
}  # fmt: skip
_LEFT_OUT = ("router", "experts.gate_up")
_RANK = 1


def run(file: Path, *, small: bool, seed: int, plot: Path | None = None) -> dict[str, Any]:
    """Measure and write the report; returns the summary. ``small`` takes fewer rounds of the same adapter."""
    shape = BaseShape.from_config(msgspec.json.encode(QWEN3_30B_A3B))
    with tempfile.TemporaryDirectory(prefix="roost-loadtest-") as scratch:
        folder = Path(scratch) / "raw"
        write_adapter(folder, shape, seed)
        packed = Path(scratch) / "packed.safetensors"
        with packed.open("wb") as out:
            facts = pack_peft(folder, shape, out)
        samples = _measure(folder, packed, shape, rounds=7 if small else 31)
        write_peft(RevisionFile.open(packed).buffer, Path(scratch) / "back")
        equal = (folder / TENSORS_NAME).read_bytes() == (Path(scratch) / "back" / TENSORS_NAME).read_bytes()
        raw_bytes = (folder / TENSORS_NAME).stat().st_size
    summary: dict[str, Any] = {
        "tensors_in": _tensors(shape), "tensors_out": facts.tensors, "bytes_in": raw_bytes, "bytes_out": facts.size,
        "pack_s": round(statistics.median(samples["pack_s"]), 4),
        "pack_over_read": round(_ratio(samples["pack_s"], samples["read_s"]), 3),
        "map_views_ms": round(statistics.median(samples["map_views_ms"]), 3),
        "map_views_known_ms": round(statistics.median(samples["map_views_known_ms"]), 3),
        "round_trip_equal": equal,
    }  # fmt: skip
    if "stock_read_ms" in samples:
        summary["stock_read_ms"] = round(statistics.median(samples["stock_read_ms"]), 1)
    rounded = {name: [round(value, 5) for value in values] for name, values in samples.items()}
    write_report(file, environment(seed=seed, engine="none"), rounded, summary)
    if plot is not None:
        _draw(plot, summary, statistics.median(samples["read_s"]))
    return summary


def write_adapter(folder: Path, shape: BaseShape, seed: int) -> None:
    """A PEFT folder with one tensor for each factor of each expert, as the stock writer orders them, in bf16."""
    shapes: dict[str, tuple[int, int]] = {}
    for place, module in shape.places():
        if place.module in _LEFT_OUT:
            continue
        for expert in range(module.experts or 1):
            stem = f"{PEFT_PREFIX}layers.{place.layer}.{module.path.replace('{}', str(expert))}.lora_"
            shapes[f"{stem}A.weight"] = (_RANK, module.inputs)
            shapes[f"{stem}B.weight"] = (module.outputs, _RANK)
    tensors, position = {}, 0
    for name in sorted(shapes):
        end = position + 2 * shapes[name][0] * shapes[name][1]
        tensors[name] = TensorSpec("BF16", shapes[name], (position, end))
        position = end
    numbers = np.random.default_rng(seed).standard_normal(position // 2, np.float32)
    folder.mkdir(parents=True)
    with (folder / TENSORS_NAME).open("wb") as out:
        out.write(encode_header(tensors, {"format": "pt"}))
        out.write((numbers.view(np.uint32) >> 16).astype(np.uint16).data)
    targets = {module.path.rpartition(".")[2] for place, module in shape.places() if place.module not in _LEFT_OUT}
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2, "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(config))


def _measure(folder: Path, packed: Path, shape: BaseShape, rounds: int) -> dict[str, list[float]]:
    raw = folder / TENSORS_NAME
    parts: dict[str, tuple[Callable[[], object], float]] = {
        "read_s": (raw.read_bytes, 1.0),
        "read_large_pages_s": (lambda: _read_large_pages(raw), 1.0),
        "pack_s": (lambda: _pack(folder, raw.stat().st_size, shape), 1.0),
        "map_views_ms": (lambda: _views(packed), 1e3),
        "map_views_known_ms": (lambda: _views(packed), 1e3),
    }
    stock = _stock_reader(raw)
    if stock is not None:
        parts["stock_read_ms"] = (stock, 1e3)
    samples: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(rounds + 1):
        kept_header.cache_clear()
        for name, (part, unit) in parts.items():
            begun = time.perf_counter()
            kept = part()
            taken = (time.perf_counter() - begun) * unit
            del kept
            # the first round brings files into the page cache and code into being
            if number:
                samples[name].append(taken)
    return samples


def _read_large_pages(file: Path) -> mmap.mmap:
    memory = mmap.mmap(-1, file.stat().st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    with file.open("rb") as source:
        source.readinto(memory)
    return memory


def _pack(folder: Path, capacity: int, shape: BaseShape) -> FreshMemory:
    out = FreshMemory(capacity)
    pack_peft(folder, shape, out)
    return out


def _views(packed: Path) -> list[memoryview]:
    file = RevisionFile.open(packed)
    return [file.tensor(name) for name in file.specs]


def _stock_reader(raw: Path) -> Callable[[], object] | None:
    """The stock library's read, where torch is there to hold bf16."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return None
    from safetensors import safe_open

    def read() -> list[Any]:
        with safe_open(raw, framework="pt") as file:
            names = file.keys()
            return [file.get_tensor(name) for name in names]

    return read


def _ratio(ours: list[float], baseline: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, baseline, strict=True))


def _tensors(shape: BaseShape) -> int:
    return sum(2 * (module.experts or 1) for place, module in shape.places() if place.module not in _LEFT_OUT)


def _draw(file: Path, summary: Mapping[str, Any], read_s: float) -> None:
    """Milliseconds on a logarithmic axis, ours beside what they stand against."""
    from matplotlib.figure import Figure

    bars = {
        "read the raw file": read_s * 1e3,
        "pack it": summary["pack_s"] * 1e3,
        "stock read, tensor by tensor": summary.get("stock_read_ms"),
        "map the packed file, all views": summary["map_views_ms"],
    }
    known = {name: value for name, value in bars.items() if value is not None}
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    colours = ["tab:blue" if name.startswith(("pack", "map")) else "tab:grey" for name in known]
    drawn = axes.barh(list(known), list(known.values()), color=colours)
    axes.bar_label(drawn, fmt="%.1f ms", padding=3)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"Rank-1 adapter of Qwen3-30B-A3B: {summary['tensors_in']:,} tensors into {summary['tensors_out']:,}"
    )
    axes.invert_yaxis()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
