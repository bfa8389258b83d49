"""A base's safetensors into this rank's Megatron parameters: read in slices, never whole tensors of other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import SafetensorError, safe_open

from catalog.names import shown
from packer.folder import confined, read_bounded
from wire.outcomes import ArtifactUnavailable, InvalidRequest

from .hf_config import BaseConfig
from .topology import Topology

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_EMBEDDING, _HEAD, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Checkpoint:
    """The tensors of a folder's safetensors files, by name. Raises InvalidRequest, ArtifactUnavailable."""

    def __init__(self, folder: Path) -> None:
        self._files = {name: self._open(confined(folder, name)) for name in _file_names(folder)}
        self._where = {name: file for file in self._files.values() for name in file.keys()}  # noqa: SIM118

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            return safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ArtifactUnavailable(f"cannot read {path.name}: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str, shape: tuple[int, ...], *slices: slice) -> torch.Tensor:
        """A part of tensor ``name``, whose whole shape must be ``shape``."""
        file = self._where.get(name)
        if file is None:
            raise InvalidRequest(f"the base's weights have no tensor {name}", field=name)
        view = file.get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise InvalidRequest(f"{name} has the shape {view.get_shape()}, not {list(shape)}", field=name)
        part: torch.Tensor = view[slices or slice(None)]
        return part


def _file_names(folder: Path) -> list[str]:
    if not (folder / _INDEX).is_file():
        return [_SINGLE]
    try:
        index = msgspec.json.decode(read_bounded(confined(folder, _INDEX), _MAX_INDEX_BYTES), type=_Index)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"{_INDEX} is malformed: {shown(str(error))}", field=_INDEX) from None
    return sorted(set(index.weight_map.values()))


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def load_weights(model: GPTModel, base: BaseConfig, topology: Topology, folder: Path) -> int:
    """Fill every parameter of ``model``. Returns the bytes that they take.

    Raises InvalidRequest that names the tensor which is missing or of another shape.
    """
    loader = _Loader(Checkpoint(folder), base, topology)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in loader.tensors():
            target = parameters.pop(name)
            if target.shape != tensor.shape:
                raise InvalidRequest(f"{name} is {list(target.shape)} in the model, not {list(tensor.shape)}")
            target.copy_(tensor)
    if parameters:
        raise InvalidRequest(f"nothing was loaded for {next(iter(parameters))}")
    if base.tied and topology.pipeline == 1:
        model.output_layer.weight = model.embedding.word_embeddings.weight
    return sum(parameter.nbytes for parameter in model.parameters())


class _Loader:
    """Yields what this rank's parameters hold."""

    def __init__(self, checkpoint: Checkpoint, base: BaseConfig, topology: Topology) -> None:
        self._read = checkpoint.read
        self._has = checkpoint.__contains__
        self._base = base
        self._topology = topology

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        base, topology = self._base, self._topology
        vocabulary = (base.vocabulary, base.hidden)
        if topology.first_stage:
            yield "embedding.word_embeddings.weight", self._rows(_EMBEDDING, vocabulary)
        for place, layer in enumerate(topology.layers(base.layers)):
            source, target = f"model.layers.{layer}.", f"decoder.layers.{place}."
            yield from self._attention(source, target)
            yield from self._experts(layer, source, target) if base.moe_layers[layer] else self._mlp(source, target)
        if topology.last_stage:
            yield "decoder.final_layernorm.weight", self._read(_FINAL_NORM, (base.hidden,))
            yield "output_layer.weight", self._rows(_EMBEDDING if base.tied else _HEAD, vocabulary)

    def _attention(self, source: str, target: str) -> Iterator[tuple[str, torch.Tensor]]:
        base = self._base
        attention = f"{source}self_attn."
        yield f"{target}input_layernorm.weight", self._read(f"{source}input_layernorm.weight", (base.hidden,))
        yield (
            f"{target}pre_mlp_layernorm.weight",
            self._read(f"{source}post_attention_layernorm.weight", (base.hidden,)),
        )
        yield f"{target}self_attention.linear_qkv.weight", self._qkv(attention)
        outputs = (base.hidden, base.heads * base.head_dim)
        yield f"{target}self_attention.linear_proj.weight", self._columns(f"{attention}o_proj.weight", outputs)
        if base.qk_norm:
            for name in "qk":
                norm = self._read(f"{attention}{name}_norm.weight", (base.head_dim,))
                yield f"{target}self_attention.{name}_layernorm.weight", norm

    def _qkv(self, attention: str) -> torch.Tensor:
        """For each key head: its queries' rows, its key's, its value's."""
        base = self._base
        groups = base.kv_heads // self._topology.tensor
        parts = []
        for name, heads in (("q", base.heads), ("k", base.kv_heads), ("v", base.kv_heads)):
            rows = self._rows(f"{attention}{name}_proj.weight", (heads * base.head_dim, base.hidden))
            parts.append(rows.reshape(groups, -1, base.hidden))
        return torch.cat(parts, dim=1).reshape(-1, base.hidden)

    def _mlp(self, source: str, target: str) -> Iterator[tuple[str, torch.Tensor]]:
        inner, hidden = self._base.dense_inner, self._base.hidden
        halves = [self._rows(f"{source}mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")]
        yield f"{target}mlp.linear_fc1.weight", torch.cat(halves)
        yield f"{target}mlp.linear_fc2.weight", self._columns(f"{source}mlp.down_proj.weight", (hidden, inner))

    def _experts(self, layer: int, source: str, target: str) -> Iterator[tuple[str, torch.Tensor]]:
        base = self._base
        inner, hidden = base.expert_inner, base.hidden
        local = self._topology.experts(base.experts)
        yield f"{target}mlp.router.weight", self._read(f"{source}mlp.gate.weight", (base.experts, hidden))
        experts = f"{source}mlp.experts."
        if self._has(f"{experts}gate_up_proj"):
            part = slice(local.start, local.stop)
            yield (
                f"{target}mlp.experts.gate_up",
                self._read(f"{experts}gate_up_proj", (base.experts, 2 * inner, hidden), part),
            )
            yield f"{target}mlp.experts.down", self._read(f"{experts}down_proj", (base.experts, hidden, inner), part)
            return

        def one(expert: int, name: str, shape: tuple[int, int]) -> torch.Tensor:
            return self._read(f"{experts}{expert}.{name}_proj.weight", shape)

        both = [torch.cat([one(expert, name, (inner, hidden)) for name in ("gate", "up")]) for expert in local]
        yield f"{target}mlp.experts.gate_up", torch.stack(both)
        yield f"{target}mlp.experts.down", torch.stack([one(expert, "down", (hidden, inner)) for expert in local])

    def _rows(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self._read(name, shape, self._part(shape[0]))

    def _columns(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self._read(name, shape, slice(None), self._part(shape[1]))

    def _part(self, size: int) -> slice:
        each = size // self._topology.tensor
        return slice(self._topology.tensor_rank * each, (self._topology.tensor_rank + 1) * each)
