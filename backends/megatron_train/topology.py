"""How a trainer's ranks share the work, and whether a base can be shared out like that. Imports no torch.

World size is tensor x pipeline x data. Experts are spread over the ranks of tensor and data parallelism together: each
is whole on its ranks (expert tensor parallelism is 1), so ``expert`` divides tensor x data.
"""

from __future__ import annotations

from typing import NamedTuple

from backends.trainer import TrainerSettings
from wire.outcomes import InvalidRequest, Unfit

from .hf_config import BaseConfig


class Topology(NamedTuple):
    """Sizes of the groups, and this rank's place in each."""

    tensor: int = 1
    tensor_rank: int = 0
    pipeline: int = 1
    pipeline_rank: int = 0
    data: int = 1
    data_rank: int = 0
    expert: int = 1
    expert_rank: int = 0
    expert_data: int = 1
    expert_data_rank: int = 0
    sequence: bool = False
    rank: int = 0
    world: int = 1

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    def layers(self, total: int) -> range:
        """The layers of this rank's stage, as the whole base numbers them."""
        size = total // self.pipeline
        return range(self.pipeline_rank * size, (self.pipeline_rank + 1) * size)

    def experts(self, total: int) -> range:
        """The experts that this rank holds, as the base numbers them."""
        size = total // self.expert
        return range(self.expert_rank * size, (self.expert_rank + 1) * size)


def check_topology(settings: TrainerSettings, base: BaseConfig) -> None:
    """Raises InvalidRequest (sizes that fit no base) or Unfit (sizes that don't fit this one) that name the field."""
    sizes = {name: getattr(settings, name) for name in ("tensor", "pipeline", "expert", "data")}
    for name, size in sizes.items():
        if size < 1:
            raise InvalidRequest(f"trainer {settings.name}: {name} is {size}, not at least 1", field=name)
    if settings.expert_tensor != 1:
        raise InvalidRequest(
            f"trainer {settings.name}: expert_tensor is {settings.expert_tensor}: an expert is whole on its ranks, and "
            "experts are spread with expert",
            field="expert_tensor",
        )
    if settings.tensor * settings.data % settings.expert:
        raise InvalidRequest(
            f"trainer {settings.name}: expert {settings.expert} does not divide tensor x data "
            f"({settings.tensor * settings.data}), over which experts are spread",
            field="expert",
        )
    for what, total, name in (
        ("key and value heads", base.kv_heads, "tensor"),
        ("attention heads", base.heads, "tensor"),
        ("vocabulary entries", base.vocabulary, "tensor"),
        ("dense MLP columns", base.dense_inner, "tensor"),
        ("layers", base.layers, "pipeline"),
    ):
        _check_divides(settings, name, total, what)
    if base.experts:
        _check_divides(settings, "expert", base.experts, "experts")
        if settings.tensor > 1 and not settings.sequence_parallel:
            raise InvalidRequest(
                f"trainer {settings.name}: experts with tensor parallelism need sequence_parallel",
                field="sequence_parallel",
            )
    elif settings.expert > 1:
        raise Unfit(f"trainer {settings.name}: the base has no experts to spread", field="expert")


def _check_divides(settings: TrainerSettings, name: str, total: int, what: str) -> None:
    size = getattr(settings, name)
    if total % size:
        raise Unfit(f"trainer {settings.name}: {name} {size} does not divide the base's {total} {what}", field=name)
