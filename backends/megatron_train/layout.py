"""Where each tensor of a policy lies: in the whole adapter, on this rank, and in the policy's flat buffer.

Everything that is done with a policy's tensors (first values, gradients' reduction, norms, checkpoints, export) reads
this one table. Tensors are those of a revision file (``packer.modules``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from packer.manifest import MAX_RANK, is_alpha
from packer.modules import ORDER, Place, tensor_name
from packer.revision import Pair
from wire.outcomes import InvalidRequest, Unfit
from wire.trainer import PolicySpec

from .hf_config import BaseConfig
from .topology import Topology

COLUMN_PARALLEL = ("q", "k", "v", "gate", "up")
# in elements: 64 bytes, so that what a kernel does never depends on where a policy happens to lie
_ALIGN = 16
_MAX_NAME = 200
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-")


class Slot(NamedTuple):
    """One tensor. ``shape`` is the whole one's; this rank has ``start`` to ``stop`` of it along ``axis``, if any.

    ``offset`` counts elements in the flat buffer. ``owned``: among the ranks that hold the same part, this is the one
    that counts it in a norm, saves it and exports it.
    """

    place: Place
    factor: str
    shape: tuple[int, ...]
    axis: int | None
    start: int
    stop: int
    offset: int
    owned: bool

    @property
    def name(self) -> str:
        return tensor_name(self.place, self.factor)

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], self.stop - self.start, *self.shape[self.axis + 1 :])

    @property
    def size(self) -> int:
        return math.prod(self.local_shape)


class Layout(NamedTuple):
    """The slots of one policy on this rank, in three runs of the flat buffer.

    Gradients of ``[0, partial)`` are partial over the tensor ranks (under sequence parallelism), those of
    ``[0, dense)`` are summed over data ranks, those of ``[dense, size)`` (experts) over the ranks that have the same.
    """

    slots: tuple[Slot, ...]
    partial: int
    dense: int
    size: int


def check_spec(spec: PolicySpec, base: BaseConfig, max_rank: int) -> PolicySpec:
    """The spec with its targets spelt out in order. Raises InvalidRequest or Unfit that name the field."""
    if not 0 < len(spec.policy) <= _MAX_NAME or not _NAME_CHARACTERS.issuperset(spec.policy):
        raise InvalidRequest("a policy's name has 1 to 200 letters, digits and ._:-", field="policy")
    if spec.policy.startswith("."):
        raise InvalidRequest("a policy's name begins with a letter or a digit", field="policy")
    if not 1 <= spec.rank <= min(max_rank, MAX_RANK):
        raise Unfit(f"rank {spec.rank} is not within 1 to {max_rank}, the largest trained here", field="rank")
    if not math.isfinite(spec.alpha) or not spec.alpha > 0 or not is_alpha(revision_alpha(spec.alpha)):
        raise InvalidRequest(f"alpha {spec.alpha} is not a usable positive number", field="alpha")
    unknown = sorted(set(spec.targets) - set(base.targets))
    if unknown:
        raise Unfit(f"the base has no trainable module {unknown[0]}; it has {', '.join(base.targets)}", field="targets")
    chosen = tuple(sorted(set(spec.targets) or set(base.targets), key=ORDER.__getitem__))
    return PolicySpec(policy=spec.policy, rank=spec.rank, alpha=spec.alpha, targets=chosen, seed=spec.seed)


def revision_alpha(alpha: float) -> int | float:
    """As a revision's manifest spells it: a whole number as an int."""
    return int(alpha) if float(alpha).is_integer() else alpha


def pairs_of(spec: PolicySpec, base: BaseConfig) -> list[Pair]:
    """The whole adapter's pairs, in the order of a revision file."""
    pairs = []
    for place in base.places(spec.targets):
        module = base.shape.modules[place.layer][place.module]
        experts = (module.experts, module.experts) if place.expert else (0, 0)
        alpha = revision_alpha(spec.alpha)
        pairs.append(Pair(place, spec.rank, alpha, module.inputs, module.outputs, experts))
    return pairs


def make_layout(spec: PolicySpec, base: BaseConfig, topology: Topology) -> Layout:
    """This rank's table for a checked ``spec``."""
    layers = topology.layers(base.layers)
    runs: tuple[list[Slot], ...] = ([], [], [])
    for pair in pairs_of(spec, base):
        if pair.place.layer in layers:
            for factor, shape in zip("AB", pair.shapes, strict=True):
                slot = _slot(pair.place, factor, shape, topology)
                which = 2 if pair.place.expert else 0 if topology.sequence and slot.axis is None else 1
                runs[which].append(slot)
    slots: list[Slot] = []
    ends = []
    offset = 0
    for run in runs:
        for slot in run:
            slots.append(slot._replace(offset=offset))
            offset += -(-slot.size // _ALIGN) * _ALIGN
        ends.append(offset)
    return Layout(tuple(slots), *ends)


def _slot(place: Place, factor: str, shape: tuple[int, ...], topology: Topology) -> Slot:
    axis: int | None = None
    parts, part = 1, 0
    if place.expert:
        axis, parts, part = 0, topology.expert, topology.expert_rank
    elif topology.tensor > 1:
        split = "B" if place.module in COLUMN_PARALLEL else "A"
        if factor == split:
            axis = 0 if factor == "B" else 1
            parts, part = topology.tensor, topology.tensor_rank
    first = topology.expert_data_rank == 0 if place.expert else topology.data_rank == 0
    owned = first and (axis is not None or topology.tensor_rank == 0)
    size = shape[axis] // parts if axis is not None else 0
    return Slot(place, factor, shape, axis, part * size, (part + 1) * size, 0, owned)
