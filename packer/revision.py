"""The revision file: one safetensors file that a stock library reads, with one spelling for equal content.

Tensors are named for the base's modules (``layers.3.q.A`` of shape (rank, in), ``layers.3.q.B`` of shape (out, rank),
experts stacked as ``packer.modules`` says), in the order of the layers, so that a layer's bytes are one range. Their
dtype is BF16 or F32 throughout. The manifest
is in the metadata. The header's bytes follow from the content alone, and a reader refuses any others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from blake3 import blake3

from catalog.names import shown
from packer.copying import BLOCK_BYTES, DTYPES, HashingSink, Progress, Sink, check_finite, copy, narrow
from packer.folder import map_file
from packer.layouts import PER_EXPERT
from packer.manifest import MAX_RANK, METADATA_KEY, Manifest, compress, value_at
from packer.modules import ORDER, PATHS, Place, parse_tensor_name, tensor_name
from packer.plan import CopyPlan
from packer.safetensors_header import (
    ITEM_BYTES,
    TensorSpec,
    check_header,
    decode_header,
    encode_header,
    header_of,
)
from packer.scaling import scale
from packer.shape import BaseShape
from wire.events import ArtifactFacts
from wire.outcomes import InvalidRequest, Unfit

WHAT = "revision file"
ALIGN = 64
_HALVES = ("gate", "up")
# how many headers that were read are kept, of how many bytes at the most
_KEPT_HEADERS = 16
KEPT_HEADER_BYTES = 512 << 10
DTYPE_NAMES = {"BF16": "bfloat16", "F32": "float32"}


class Pair(msgspec.Struct, frozen=True):
    """The two factors of one adapted module: A is (rank, inputs), B is (outputs, rank).

    A stack of experts has ``experts`` of A and of B, 1 for a factor that all of them share; (0, 0) is no stack.
    """

    place: Place
    rank: int
    alpha: int | float
    inputs: int
    outputs: int
    experts: tuple[int, int] = (0, 0)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B in a revision file."""
        a, b = (self.rank, self.inputs), (self.outputs, self.rank)
        return ((self.experts[0], *a), (self.experts[1], *b)) if self.place.expert else (a, b)

    @property
    def elements(self) -> tuple[int, int]:
        """How many numbers A and B hold."""
        a, b = self.shapes
        return math.prod(a), math.prod(b)


class Content(msgspec.Struct, frozen=True):
    """All that a header says: ``pairs`` in file order, the dtype of the tensors, and the manifest."""

    pairs: tuple[Pair, ...]
    dtype: str
    manifest: Manifest

    def header(self) -> bytes:
        """The file's bytes up to its first tensor."""
        return encode_header(self.tensors(), self.metadata(), ALIGN)

    def metadata(self) -> dict[str, str]:
        return {METADATA_KEY: self.manifest.encode()}

    def tensors(self) -> dict[str, TensorSpec]:
        """All tensors by name, in file order."""
        item = ITEM_BYTES[self.dtype]
        tensors = {}
        position = 0
        for pair in self.pairs:
            for factor, shape in zip("AB", pair.shapes, strict=True):
                end = position + math.prod(shape) * item
                tensors[tensor_name(pair.place, factor)] = TensorSpec(self.dtype, shape, (position, end))
                position = end
        return tensors

    def facts(self, digest: str, size: int) -> ArtifactFacts:
        return ArtifactFacts(
            digest=digest,
            size=size,
            rank=max(pair.rank for pair in self.pairs),
            targets=self.manifest.targets,
            dtype=DTYPE_NAMES[self.dtype],
            tensors=2 * len(self.pairs),
            parameters=sum(sum(pair.elements) for pair in self.pairs),
        )


def make_content(
    pairs: Sequence[Pair],
    dtype: str,
    *,
    rank: int,
    alpha: int | float,
    rslora: bool,
    prefix: str = "",
    layout: str = PER_EXPERT,
    paths: Mapping[str, str] | None = None,
) -> Content:
    """Order ``pairs`` and write down what differs from ``rank`` and ``alpha``. F16 is kept as F32, which is exact.

    ``paths`` says where the base keeps the modules; what is unusual of it is written down too.
    """
    ordered = tuple(sorted(pairs, key=lambda pair: pair.place.order))
    manifest = Manifest(
        rank=rank,
        alpha=alpha,
        rslora=rslora,
        ranks=compress({pair.place: pair.rank for pair in ordered}, rank),
        alphas=compress({pair.place: pair.alpha for pair in ordered}, alpha),
        targets=tuple(sorted({pair.place.module for pair in ordered}, key=ORDER.__getitem__)),
        source="F16" if dtype == "F16" else "",
        prefix=prefix,
        layout=layout,
        paths={module: path for module, path in (paths or {}).items() if path != PATHS[module]},
    )
    return Content(ordered, "F32" if dtype == "F16" else dtype, manifest)


def write_revision(
    content: Content, plan: CopyPlan, dtype: str, out: Sink, progress: Progress | None = None
) -> ArtifactFacts:
    """Write header and tensors; ``plan`` follows the content's order, its bytes are of ``dtype``.

    Raises InvalidRequest on a value that is not finite: what was written until then is worth nothing.
    """
    sink = HashingSink(out)
    sink.write(content.header())
    copy(plan, dtype, content.dtype, sink, progress)
    return content.facts(sink.hexdigest(), sink.size)


class RevisionFile:
    """A checked view of a revision file's bytes, which it does not copy.

    Raises InvalidRequest unless the bytes are exactly what ``write_revision`` would have written for some content;
    values are looked at by ``check_fit`` alone.
    """

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self.buffer = memoryview(buffer).cast("B").toreadonly()
        header = bytes(header_of(self.buffer, WHAT))
        read = kept_header if len(header) <= KEPT_HEADER_BYTES else read_header
        self.content, self.specs = read(header, self.buffer.nbytes - len(header))
        self.data_start = len(header)

    @classmethod
    def open(cls, path: Path) -> RevisionFile:
        """Map a file; it stays mapped for as long as a view of it lives. Raises ArtifactUnavailable, InvalidRequest."""
        return cls(map_file(path))

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return self.content.pairs

    @property
    def manifest(self) -> Manifest:
        return self.content.manifest

    @property
    def dtype(self) -> str:
        """BF16 or F32."""
        return self.content.dtype

    @property
    def data(self) -> memoryview:
        """The bytes of all tensors, in file order."""
        return self.buffer[self.data_start :]

    def tensor(self, name: str) -> memoryview:
        """The bytes of one tensor (row-major, little-endian). Raises KeyError."""
        start, end = self.specs[name].data_offsets
        return self.buffer[self.data_start + start : self.data_start + end]

    def scale(self, pair: Pair) -> float:
        """By how much the product of the pair's factors counts."""
        return scale(pair.alpha, pair.rank, rslora=self.manifest.rslora)

    def digest(self) -> str:
        """blake3 of the whole file, in hex."""
        return blake3(self.buffer, max_threads=blake3.AUTO).hexdigest()

    def facts(self, digest: str | None = None) -> ArtifactFacts:
        """What the catalog keeps. ``digest``, where the caller has verified it, saves reading the file."""
        return self.content.facts(digest or self.digest(), self.buffer.nbytes)


def check_fit(file: RevisionFile, shape: BaseShape, *, max_rank: int | None = None) -> None:
    """Check a revision against a base: its modules, their dimensions, its ranks, and that all values are finite.

    Raises Unfit (another base, too large a rank) or InvalidRequest (a value that is no number); both name the tensor.
    """
    for pair in file.pairs:
        check_pair(pair, shape)
        if max_rank is not None and pair.rank > max_rank:
            raise Unfit(
                f"{pair.place} has rank {pair.rank}, above the largest served: {max_rank}", field=str(pair.place)
            )
    names = list(file.specs)
    ends = np.asarray([spec.data_offsets[1] for spec in file.specs.values()])
    for start in range(0, file.data.nbytes, BLOCK_BYTES):
        values = np.frombuffer(file.data[start : start + BLOCK_BYTES], dtype=DTYPES[file.dtype])

        def name_at(position: int, start: int = start) -> str:
            return names[int(np.searchsorted(ends, start + position, side="right"))]

        check_finite(values, file.dtype, name_at)
        if file.manifest.source:
            narrow(values, file.manifest.source, name_at)


def check_pair(pair: Pair, shape: BaseShape) -> None:
    """Raises Unfit unless the base has the pair's module with the pair's dimensions."""
    module = shape.get(pair.place)
    if module is None:
        raise Unfit(
            f"{pair.place} is no module of the base ({shape.architecture}, {shape.layers} layers)",
            field=str(pair.place),
        )
    if (module.inputs, module.outputs) != (pair.inputs, pair.outputs):
        raise Unfit(
            f"{pair.place} adapts {pair.inputs} -> {pair.outputs}, but the base's module is "
            f"{module.inputs} -> {module.outputs}: the adapter is for another base",
            field=str(pair.place),
        )
    if not {*pair.experts} <= ({1, module.experts} if module.experts else {0}):
        raise Unfit(
            f"{pair.place} is for {max(pair.experts)} experts, but the base has {module.experts}: the adapter is for "
            "another base",
            field=str(pair.place),
        )


def read_header(header: bytes, data_bytes: int) -> tuple[Content, Mapping[str, TensorSpec]]:
    """What a revision's header says, checked, and right for so many bytes of data. Raises InvalidRequest."""
    own = decode_header(header, ALIGN)
    if own is None:
        parsed = check_header(header, data_bytes, WHAT)
        specs, metadata = parsed.tensors.as_dict(), parsed.metadata
    else:
        specs, metadata = own
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise InvalidRequest(f"{WHAT}: its metadata has no {METADATA_KEY!r}: not a revision file", field=WHAT)
    content = _read_content(specs, Manifest.decode(text))
    tensors = content.tensors()
    *_, last = tensors.values()
    alike = list(specs.items()) == list(tensors.items()) and metadata == content.metadata()
    if own is None or not alike or last.data_offsets[1] != data_bytes:
        # there may be more to say about it
        check_header(header, data_bytes, WHAT)
        raise InvalidRequest(f"{WHAT}: its header is not spelt as a revision's is", field=WHAT)
    return content, MappingProxyType(specs)


# thousands of adapters have one header: those of a base that differ in their numbers alone
kept_header = lru_cache(_KEPT_HEADERS)(read_header)


def _read_content(tensors: Mapping[str, TensorSpec], manifest: Manifest) -> Content:
    """What the header says, checked in itself; that it is spelt the one right way is for the caller to compare."""
    factors: dict[Place, dict[str, tuple[int, ...]]] = {}
    dtypes = {spec.dtype for spec in tensors.values()}
    for name, spec in tensors.items():
        parsed = parse_tensor_name(name)
        if parsed is None:
            raise InvalidRequest(f"{WHAT}: {shown(name)} names no tensor of a revision", field=WHAT)
        place, factor = parsed
        dimensions = 3 if place.expert else 2
        if len(spec.shape) != dimensions or min(spec.shape) < 1:
            raise InvalidRequest(
                f"{WHAT}: {name} has the shape {list(spec.shape)}, not {dimensions} dimensions", field=name
            )
        factors.setdefault(place, {})[factor] = spec.shape
    if not factors:
        raise InvalidRequest(f"{WHAT} holds no tensors", field=WHAT)
    if manifest.source and dtypes != {"F32"}:
        raise InvalidRequest(f"{WHAT}: it says that it came in {manifest.source}, yet is not F32", field="source")
    if len(dtypes) != 1 or not dtypes <= DTYPE_NAMES.keys():
        raise InvalidRequest(f"{WHAT}: its dtypes are {sorted(dtypes)}, not BF16 or F32 throughout", field=WHAT)
    pairs = [_read_pair(place, shapes, manifest) for place, shapes in factors.items()]
    for place in factors:
        if place.module == "experts.gate_up" and ({*factors} & {Place(place.layer, f"experts.{x}") for x in _HALVES}):
            raise InvalidRequest(f"{WHAT}: {place} adapts gate and up a second time", field=str(place))
    return make_content(
        pairs,
        manifest.source or dtypes.pop(),
        rank=manifest.rank,
        alpha=manifest.alpha,
        rslora=manifest.rslora,
        prefix=manifest.prefix,
        layout=manifest.layout,
        paths=manifest.paths,
    )


def _read_pair(place: Place, shapes: Mapping[str, tuple[int, ...]], manifest: Manifest) -> Pair:
    if len(shapes) != 2:
        missing = next(iter({"A", "B"} - shapes.keys()))
        raise InvalidRequest(f"{WHAT}: {tensor_name(place, missing)} is missing", field=tensor_name(place, missing))
    *a_experts, rank, inputs = shapes["A"]
    *b_experts, outputs, columns = shapes["B"]
    if not rank == columns <= MAX_RANK or value_at(place, manifest.ranks, manifest.rank) != rank:
        raise InvalidRequest(f"{WHAT}: {place} has factors of unlike rank, or a rank unlike the manifest's", field=WHAT)
    alpha = value_at(place, manifest.alphas, manifest.alpha)
    experts = (a_experts[0], b_experts[0]) if place.expert else (0, 0)
    return Pair(place, rank, alpha, inputs, outputs, experts)
