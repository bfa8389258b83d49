"""From a PEFT folder to a revision file: every tensor accounted for, every byte kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from catalog.names import shown
from packer import adapter_config
from packer.adapter_config import AdapterConfig
from packer.copying import DTYPES, CopyPlan, Progress, Sink
from packer.folder import confined, map_file, read_bounded
from packer.modules import PATHS, PEFT_PREFIX, PEFT_PREFIXES, Place
from packer.revision import Content, Pair, check_pair, make_content, write_revision
from packer.safetensors_header import Header, TensorSpec, parse_header
from packer.shape import BaseShape
from wire.events import ArtifactFacts
from wire.outcomes import InvalidRequest, Unfit

TENSORS_NAME = "adapter_model.safetensors"
# what a module's name begins with for the trainer that saw the whole model or the bare one
_WRAPPER = "base_model.model."
_PICKLED = ("adapter_model.bin", "adapter_model.pt")
# what a tensor's name gives away about the feature that wrote it
_FEATURES = {
    "lora_magnitude_vector": "DoRA is not served",
    "lora_embedding_": "adapted embeddings are not served",
    "modules_to_save": "modules_to_save is not served",
    "embed_tokens": "embeddings saved with an adapter are not served",
    "lm_head": "an adapted output layer is not served",
    ".bias": "biases are not served",
    "token_adapter": "trainable tokens are not served",
    ".experts.": "expert layers are not read",
}


class PeftFolder(msgspec.Struct, frozen=True):
    """A PEFT folder, opened: its configuration, its tensors' header, and the whole file's mapped bytes."""

    config: AdapterConfig
    header: Header
    file: memoryview

    @property
    def prefix(self) -> str:
        """What the names of the tensors begin with: the longest known prefix that the first one has."""
        first = next(iter(self.header.tensors))
        return next((prefix for prefix in PEFT_PREFIXES if first.startswith(f"{prefix}layers.")), PEFT_PREFIX)

    @property
    def dtype(self) -> str:
        """The one dtype of all tensors. Raises InvalidRequest where they have several, or one that is not read."""
        first_of: dict[str, str] = {}
        for name, spec in self.header.tensors.items():
            first_of.setdefault(spec.dtype, name)
        if len(first_of) > 1:
            examples = ", ".join(f"{dtype} ({shown(name)})" for dtype, name in first_of.items())
            raise InvalidRequest(f"{TENSORS_NAME} mixes dtypes: {examples}", field=TENSORS_NAME)
        (dtype,) = first_of
        if dtype not in DTYPES:
            raise InvalidRequest(
                f"{TENSORS_NAME} has the dtype {dtype}; read are {', '.join(DTYPES)}", field=TENSORS_NAME
            )
        return dtype


def open_peft(folder: Path) -> PeftFolder:
    """Read a folder's configuration and header. Raises InvalidRequest or Unfit that name the field and the reason."""
    if not folder.is_dir():
        raise InvalidRequest(f"{folder} is not a folder", field="folder")
    config = AdapterConfig.parse(read_bounded(confined(folder, adapter_config.NAME), adapter_config.MAX_CONFIG_BYTES))
    if not (folder / TENSORS_NAME).exists():
        for name in _PICKLED:
            if (folder / name).exists():
                raise InvalidRequest(
                    f"{folder} holds {name}, a pickle that could run code: save the adapter as safetensors", field=name
                )
    file = map_file(confined(folder, TENSORS_NAME))
    header = parse_header(file, TENSORS_NAME)
    if not header.tensors:
        raise InvalidRequest(f"{TENSORS_NAME} holds no tensors", field=TENSORS_NAME)
    return PeftFolder(config, header, file)


def pack_peft(folder: Path, shape: BaseShape, out: Sink, *, progress: Progress | None = None) -> ArtifactFacts:
    """Write the revision file of the PEFT adapter in ``folder``, trained on a base of ``shape``, to ``out``.

    Memory is bounded by a few blocks beside the mapped input. Raises InvalidRequest or Unfit that name the tensor or
    the field: what was written until then is worth nothing.
    """
    return pack_opened(open_peft(folder), shape, out, progress=progress)


def pack_opened(source: PeftFolder, shape: BaseShape, out: Sink, *, progress: Progress | None = None) -> ArtifactFacts:
    """``pack_peft`` for a folder that ``open_peft`` has read."""
    content = account(source, shape)
    return write_revision(content, _plan(source, content), source.dtype, out, progress)


def peft_name(place: Place, path: str, factor: str, prefix: str) -> str:
    """What PEFT calls a factor of the module at ``path`` inside its layer."""
    return f"{prefix}layers.{place.layer}.{path}.lora_{factor}.weight"


def account(source: PeftFolder, shape: BaseShape) -> Content:
    """What the folder holds, once every tensor that its configuration asks for is there, and no other.

    Raises InvalidRequest or Unfit that name the tensor or the field.
    """
    dtype = source.dtype
    config = source.config
    expected = _expected(source, shape)
    missing = [name for names in expected.values() for name in names if name not in source.header.tensors]
    wanted = {name for names in expected.values() for name in names}
    extra = [name for name in source.header.tensors if name not in wanted]
    if extra:
        raise _extra(extra, shape, source.prefix)
    if missing:
        raise InvalidRequest(
            f"{TENSORS_NAME} lacks {_listed(missing)}, which target_modules asks for", field=missing[0]
        )
    module_names = [_module_name(names[0]) for names in expected.values()]
    settings = config.ranks_and_alphas(module_names)
    pairs = []
    for (place, names), (rank, alpha) in zip(expected.items(), settings, strict=True):
        pair = _pair(place, names, rank, alpha, source.header.tensors)
        check_pair(pair, shape)
        pairs.append(pair)
    prefix = "" if source.prefix == PEFT_PREFIX else source.prefix
    return make_content(pairs, dtype, rank=config.rank, alpha=config.alpha, rslora=config.rslora, prefix=prefix)


def _expected(source: PeftFolder, shape: BaseShape) -> dict[Place, tuple[str, str]]:
    """The names of A and B of every module that the configuration adapts, in file order."""
    names_of = {
        place: (peft_name(place, module.path, "A", source.prefix), peft_name(place, module.path, "B", source.prefix))
        for place, module in shape.places()
    }
    place_of = {_module_name(names[0]): place for place, names in names_of.items()}
    linear = tuple(place_of)
    chosen = source.config.selected((*linear, *shape.elsewhere), linear=linear)
    for name in chosen:
        if name not in place_of:
            raise Unfit(f"target_modules adapts {name}, which is not served", field="target_modules")
    if not chosen:
        raise Unfit(f"target_modules matches no module of the base ({shape.architecture})", field="target_modules")
    return {place_of[name]: names_of[place_of[name]] for name in chosen}


def _module_name(tensor: str) -> str:
    """A module's name as the trainer saw it, from the name of its A or B."""
    return tensor.removeprefix(_WRAPPER).removesuffix(".weight").removesuffix(".lora_A").removesuffix(".lora_B")


def _pair(
    place: Place, names: tuple[str, str], rank: int, alpha: int | float, tensors: Mapping[str, TensorSpec]
) -> Pair:
    for name in names:
        if len(tensors[name].shape) != 2 or 0 in tensors[name].shape:
            raise InvalidRequest(
                f"tensor {name} has the shape {list(tensors[name].shape)}, not two dimensions", field=name
            )
    (rows, inputs), (outputs, columns) = (tensors[name].shape for name in names)
    for name, found in zip(names, (rows, columns), strict=True):
        if found != rank:
            raise InvalidRequest(f"tensor {name} has rank {found}, but the configuration says {rank}", field=name)
    return Pair(place, rank, alpha, inputs, outputs)


def _extra(names: list[str], shape: BaseShape, prefix: str) -> InvalidRequest | Unfit:
    """Why the first of the tensors that nothing accounts for is refused."""
    known = {peft_name(place, module.path, factor, prefix) for place, module in shape.places() for factor in "AB"}
    name = names[0]
    for mark, reason in _FEATURES.items():
        if mark in name:
            return Unfit(f"{TENSORS_NAME} holds {_listed(names)}: {reason}", field=shown(name))
    if name in known:
        return InvalidRequest(
            f"{TENSORS_NAME} holds {_listed(names)}, which the configuration does not ask for", field=name
        )
    return Unfit(
        f"{TENSORS_NAME} holds {_listed(names)}: no such module in the base "
        f"({shape.architecture}, {shape.layers} layers)",
        field=shown(name),
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {shown(names[0])}{more}"


def _plan(source: PeftFolder, content: Content) -> CopyPlan:
    """Which bytes of the folder's file follow each other in the revision file."""
    prefix = content.manifest.prefix or PEFT_PREFIX
    names = [
        peft_name(pair.place, PATHS[pair.place.module], factor, prefix) for pair in content.pairs for factor in "AB"
    ]
    return plan_by_name(source.file, source.header, names)


def plan_by_name(file: memoryview, header: Header, names: Iterable[str]) -> CopyPlan:
    """Copy the named tensors of a safetensors file in that order."""
    ordered = list(names)
    spans = [header.tensors[name].data_offsets for name in ordered]
    offsets = [header.data_start + start for start, _ in spans]
    lengths = [end - start for start, end in spans]
    return CopyPlan(np.frombuffer(file, dtype=np.uint8), offsets, lengths, ordered)
