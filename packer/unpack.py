"""From a revision file back to PEFT folders: the adapter as it came, or an equivalent for engines that know less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from packer import adapter_config
from packer.copying import DTYPES, CopyPlan, Progress, copy
from packer.folder import new_folder
from packer.modules import PATHS, PEFT_PREFIX, Place
from packer.peft import TENSORS_NAME, peft_name
from packer.revision import Pair, RevisionFile
from packer.safetensors_header import ITEM_BYTES, TensorSpec, encode_header
from packer.scaling import fold, round_as, widen

_METADATA = {"format": "pt"}


def write_peft(
    buffer: bytes | memoryview, folder: Path, *, base_model: str = "", progress: Progress | None = None
) -> None:
    """Write the adapter as it was packed: tensors bit for bit, their names, and what its configuration computed.

    Patterns come back resolved, module by module. ``folder`` appears whole or not at all. Raises InvalidRequest,
    StorageFull, ArtifactUnavailable.
    """
    file = RevisionFile(buffer)
    prefix = file.manifest.prefix or PEFT_PREFIX
    _write_exact(file, folder, prefix, base_model, progress)


def write_engine_peft(buffer: bytes | memoryview, folder: Path, *, dtype: str = "") -> None:
    """Write what an engine is to load, so that it computes what PEFT computes.

    An adapter of one rank and one alpha is written as ``write_peft`` would, under the usual names. One with
    exceptions becomes a plain adapter that any engine understands: each module's scale is folded into B, in fp32,
    and ranks are filled up with zeros to one. ``dtype`` (bfloat16, float16) is the engine's: B is rounded to it
    before the product, as the engine itself does, so that the outcome is the same to the last bit.
    """
    file = RevisionFile(buffer)
    if file.manifest.ranks or file.manifest.alphas:
        _write_plain(file, folder, dtype)
    else:
        _write_exact(file, folder, PEFT_PREFIX, "", None)


def _write_exact(file: RevisionFile, folder: Path, prefix: str, base_model: str, progress: Progress | None) -> None:
    dtype = file.manifest.source or file.dtype
    tensors = []
    for pair in file.pairs:
        for factor, shape in (("A", (pair.rank, pair.inputs)), ("B", (pair.outputs, pair.rank))):
            start, end = file.specs[f"{pair.place}.{factor}"].data_offsets
            name = peft_name(pair.place, PATHS[pair.place.module], factor, prefix)
            tensors.append((name, shape, file.data_start + start, end - start))
    tensors.sort()
    header = _header([(name, dtype, shape) for name, shape, _, _ in tensors])
    plan = CopyPlan(
        np.frombuffer(file.buffer, dtype=np.uint8),
        [offset for _, _, offset, _ in tensors],
        [length for _, _, _, length in tensors],
        [name for name, _, _, _ in tensors],
    )
    manifest = file.manifest
    config = _config(
        file,
        prefix,
        base_model,
        r=manifest.rank,
        lora_alpha=manifest.alpha,
        use_rslora=manifest.rslora,
        rank_pattern={_pattern(key, prefix): rank for key, rank in manifest.ranks.items()},
        alpha_pattern={_pattern(key, prefix): alpha for key, alpha in manifest.alphas.items()},
    )
    with new_folder(folder) as draft:
        (draft / adapter_config.NAME).write_bytes(config)
        with (draft / TENSORS_NAME).open("wb") as out:
            out.write(header)
            copy(plan, file.dtype, dtype, out, progress)


def _write_plain(file: RevisionFile, folder: Path, dtype: str) -> None:
    rank = max(pair.rank for pair in file.pairs)
    pairs = sorted(file.pairs, key=lambda pair: peft_name(pair.place, PATHS[pair.place.module], "A", PEFT_PREFIX))
    described = []
    for pair in pairs:
        path = PATHS[pair.place.module]
        described.append((peft_name(pair.place, path, "A", PEFT_PREFIX), file.dtype, (rank, pair.inputs)))
        described.append((peft_name(pair.place, path, "B", PEFT_PREFIX), "F32", (pair.outputs, rank)))
    config = _config(
        file, PEFT_PREFIX, "", r=rank, lora_alpha=rank, use_rslora=False, rank_pattern={}, alpha_pattern={}
    )
    with new_folder(folder) as draft:
        (draft / adapter_config.NAME).write_bytes(config)
        with (draft / TENSORS_NAME).open("wb") as out:
            out.write(_header(described))
            for pair in pairs:
                for factor in _plain_factors(file, pair, rank, dtype):
                    out.write(factor.reshape(-1).view(np.uint8).data)


def _plain_factors(file: RevisionFile, pair: Pair, rank: int, dtype: str) -> Iterator[npt.NDArray[Any]]:
    """A with zero rows below it, and B with its scale folded in and zero columns beside it."""
    a = np.zeros((rank, pair.inputs), DTYPES[file.dtype])
    a[: pair.rank] = _factor(file, pair.place, "A").reshape(pair.rank, pair.inputs)
    yield a
    b = np.zeros((pair.outputs, rank), np.dtype("<f4"))
    values = round_as(widen(_factor(file, pair.place, "B"), file.dtype), dtype)
    b[:, : pair.rank] = fold(values, file.scale(pair)).reshape(pair.outputs, pair.rank)
    yield b


def _factor(file: RevisionFile, place: Place, factor: str) -> npt.NDArray[Any]:
    return np.frombuffer(file.tensor(f"{place}.{factor}"), DTYPES[file.dtype])


def _header(described: list[tuple[str, str, tuple[int, int]]]) -> bytes:
    """A safetensors header as the stock writer makes it, of (name, dtype, shape) in order of their bytes."""
    tensors = {}
    position = 0
    for name, dtype, (rows, columns) in described:
        end = position + rows * columns * ITEM_BYTES[dtype]
        tensors[name] = TensorSpec(dtype, (rows, columns), (position, end))
        position = end
    return encode_header(tensors, _METADATA)


def _config(file: RevisionFile, prefix: str, base_model: str, **computing: Any) -> bytes:
    body = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        **_targets(file, prefix),
        "use_dora": False,
        **computing,
    }
    return msgspec.json.format(msgspec.json.encode(body, order="sorted"), indent=2) + b"\n"


def _targets(file: RevisionFile, prefix: str) -> dict[str, Any]:
    """Exactly the adapted modules: names and layers where every such layer has all of them, else in full.

    The layers are always said, since the base may have more of them than the adapter.
    """
    layers = sorted({pair.place.layer for pair in file.pairs})
    modules = file.manifest.targets
    if len(file.pairs) == len(layers) * len(modules):
        names = [PATHS[module].rpartition(".")[2] for module in modules]
        return {"target_modules": names, "layers_to_transform": layers, "layers_pattern": "layers"}
    return {"target_modules": [_pattern(str(pair.place), prefix) for pair in file.pairs]}


def _pattern(key: str, prefix: str) -> str:
    """What a PEFT configuration calls a manifest's key: a module's path, or one module's full name."""
    layers, _, rest = key.partition(".")
    if layers != "layers":
        return PATHS[key]
    layer, _, module = rest.partition(".")
    return f"{prefix.removeprefix('base_model.model.')}layers.{layer}.{PATHS[module]}"
