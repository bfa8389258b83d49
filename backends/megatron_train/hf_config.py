"""What a trainer must know of a base: its ``config.json``, checked, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from backends.dtypes import computed_in
from backends.trainer import TrainerSettings
from packer.folder import confined, read_bounded
from packer.modules import ORDER, Place
from packer.shape import MAX_CONFIG_BYTES, BaseShape
from packer.strict_json import parse_object
from wire.outcomes import InvalidRequest, Unfit

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
# what our LoRA layer adapts; a base has some of them
TRAINABLE = ("q", "k", "v", "o", "gate", "up", "down", "experts.gate", "experts.up", "experts.down")
# what a base is kept in
KEPT_IN = ("float32", "bfloat16")
_ROPE_KINDS = (None, "default")


class BaseConfig(msgspec.Struct, frozen=True, eq=False):
    """A base of one of ``ARCHITECTURES``, equal to none but itself, so that what follows from it can be remembered.
    ``moe_layers`` has a truth value a layer: whether its MLP is of experts."""

    shape: BaseShape
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    norm_eps: float
    rope_base: float
    tied: bool
    qk_norm: bool
    dense_inner: int
    moe_layers: tuple[bool, ...]
    experts: int = 0
    experts_per_token: int = 0
    expert_inner: int = 0
    normalised_routing: bool = True

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def targets(self) -> tuple[str, ...]:
        """The modules of this base that can be trained, in the order of a revision file."""
        present = {module for layer in self.shape.modules for module in layer}
        return tuple(sorted(present & set(TRAINABLE), key=ORDER.__getitem__))

    def places(self, targets: tuple[str, ...]) -> list[Place]:
        """Every module that ``targets`` name, in the order of a revision file."""
        return [place for place, _ in self.shape.places() if place.module in targets]


def read_base(folder: Path) -> BaseConfig:
    """Read ``config.json`` of a base's folder. Raises InvalidRequest or Unfit that name the field."""
    raw = read_bounded(confined(folder, "config.json"), MAX_CONFIG_BYTES)
    shape = BaseShape.from_config(raw)
    if shape.architecture not in ARCHITECTURES:
        raise Unfit(
            f"{shape.architecture} can't be trained here; known are {', '.join(ARCHITECTURES)}", field="architectures"
        )
    fields = parse_object(raw, "config.json")
    _check_supported(fields)
    first = shape.modules[0]
    heads = _number(fields, "num_attention_heads")
    head_dim = first["q"].outputs // heads
    moe = tuple("experts.gate" in layer for layer in shape.modules)
    expert = next((layer["experts.gate"] for layer in shape.modules if "experts.gate" in layer), None)
    dense = next((layer["gate"] for layer in shape.modules if "gate" in layer), None)
    return BaseConfig(
        shape=shape,
        hidden=first["q"].inputs,
        heads=heads,
        kv_heads=first["k"].outputs // head_dim,
        head_dim=head_dim,
        vocabulary=_number(fields, "vocab_size"),
        context=_number(fields, "max_position_embeddings"),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope_base=_rope_base(fields),
        tied=bool(fields.get("tie_word_embeddings", False)),
        qk_norm=shape.architecture.startswith("Qwen3"),
        dense_inner=dense.outputs if dense else expert.outputs if expert else 0,
        moe_layers=moe,
        experts=expert.experts if expert else 0,
        experts_per_token=_number(fields, "num_experts_per_tok") if expert else 0,
        expert_inner=expert.outputs if expert else 0,
        normalised_routing=bool(fields.get("norm_topk_prob", False)),
    )


def dtype_of(settings: TrainerSettings) -> str:
    """What the base is kept in: what an engine with the same setting computes in. Raises InvalidRequest as
    ``computed_in`` does, and Unfit for what a base can't be kept in here.
    """
    try:
        dtype = computed_in(settings.dtype, Path(settings.model_path))
    except InvalidRequest as error:
        raise InvalidRequest(f"trainer {settings.name}: {error.message}", field=error.field) from error
    if dtype not in KEPT_IN:
        raise Unfit(
            f"trainer {settings.name}: dtype {settings.dtype} makes the base {dtype}, and it is trained in "
            f"{' or '.join(KEPT_IN)} only: set the trainer's dtype",
            field="dtype",
        )
    return dtype


def context_of(settings: TrainerSettings, base: BaseConfig) -> int:
    """The longest sequence that is taken. Raises Unfit where the base can't have so long ones."""
    if settings.max_context > base.context:
        raise Unfit(
            f"trainer {settings.name}: max_context {settings.max_context} is above the base's {base.context}",
            field="max_context",
        )
    return settings.max_context or base.context


def _number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"config.json: {name} is {value!r}, not a whole number above 0", field=name)
    return value


def _check_supported(fields: dict[str, Any]) -> None:
    """Raises Unfit for what the field says and our model would compute otherwise."""
    if fields.get("hidden_act", "silu") != "silu":
        raise Unfit(f"config.json: hidden_act {fields['hidden_act']!r} is not supported, only silu", field="hidden_act")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if fields.get(name):
            raise Unfit(f"config.json: {name} is not supported", field=name)
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else scaling
    if kind not in _ROPE_KINDS:
        raise Unfit(f"config.json: rope of type {kind!r} is not supported, only the default", field="rope_scaling")


def _rope_base(fields: dict[str, Any]) -> float:
    parameters = fields.get("rope_parameters")
    value = fields.get("rope_theta", parameters.get("rope_theta") if isinstance(parameters, dict) else None)
    if value is None:
        value = 10_000.0
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise InvalidRequest(f"config.json: rope_theta is {value!r}, not a positive number", field="rope_theta")
    return float(value)
