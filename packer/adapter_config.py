"""PEFT's ``adapter_config.json``: what it computes, and a refusal by name of everything that we don't compute."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from catalog.names import shown
from packer.manifest import MAX_ALPHA, MAX_RANK
from packer.patterns import match_all, match_trusted
from packer.strict_json import brief, parse_object
from wire.outcomes import InvalidRequest, Unfit

NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
EXPERT_ORDERS = ("fastest", "block")
_ALL_LINEAR = "all-linear"
# where PEFT finds a layer's number if layers_pattern doesn't say
_LAYER_RE = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

# a name no part of which could be an expert's or a layer's number
_NUMBERLESS_RE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)

# what only says where an adapter came from, or how it was trained or initialised
_INFORMATIONAL = frozenset({
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping",
    "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "eva_config", "ensure_weight_tying",
})  # fmt: skip
# initialisations that leave the base's weights as they are
_HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_COMPUTING = frozenset({
    "peft_type", "peft_version", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters", "expert_order", "exclude_modules", "layers_to_transform", "layers_pattern", "bias",
    "init_lora_weights",
})  # fmt: skip
# field: why an adapter that uses it is refused
_UNSUPPORTED = {
    "modules_to_save": "it replaces whole modules of the base",
    "use_dora": "DoRA's magnitudes are not served",
    "trainable_token_indices": "it changes embeddings",
    "lora_bias": "biases are not served",
    "fan_in_fan_out": "transposed weights are not served",
    "layer_replication": "it repeats layers of the base",
    "megatron_config": "Megatron's parallel layers are not read",
    "loftq_config": "LoftQ changes the base's weights",
    "corda_config": "CorDA changes the base's weights",
    "lora_ga_config": "LoRA-GA changes the base's weights",
    "alora_invocation_tokens": "activated LoRA is not served",
    "use_qalora": "QALoRA is not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "arrow_config": "Arrow routing is not served",
    "kasa_config": "KaSA's singular values are not served",
    "monteclora_config": "Monte Carlo LoRA is not served",
    "velora_config": "VeLoRA is not served",
}


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter's configuration says about its computation.

    ``targets`` is a list of names, or one regular expression, or "all-linear". Pattern order matters: the first
    match counts. ``parameters`` are PEFT's target_parameters. ``expert_order`` is a field of ours, which PEFT's own
    files need not have: how the columns of a stacked B run ("fastest" or "block", empty if nothing is said).
    ``base_model`` and ``task`` are informational.
    """

    rank: int
    alpha: int | float
    rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, int | float]
    targets: tuple[str, ...] | str
    parameters: tuple[str, ...]
    expert_order: str
    peft_version: str
    exclude: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    base_model: str
    task: str

    @classmethod
    def parse(cls, raw: bytes) -> AdapterConfig:
        """Raises InvalidRequest (malformed) or Unfit (a feature that we would not compute); both name the field."""
        if len(raw) > MAX_CONFIG_BYTES:
            raise InvalidRequest(f"{NAME} is {len(raw)} bytes; at most {MAX_CONFIG_BYTES}", field=NAME)
        fields = parse_object(raw, NAME)
        _refuse_unsupported(fields)
        targets = _names(fields, "target_modules")
        parameters = _names(fields, "target_parameters")
        if isinstance(parameters, str):
            raise InvalidRequest(f"{NAME}: target_parameters is text, not a list of names", field="target_parameters")
        if not targets and not parameters:
            raise InvalidRequest(f"{NAME}: target_modules names no module", field="target_modules")
        order = _text(fields, "expert_order")
        if order not in ("", *EXPERT_ORDERS):
            raise InvalidRequest(f"{NAME}: expert_order is {shown(order)}, not fastest or block", field="expert_order")
        layers = _layers(fields.get("layers_to_transform"))
        if isinstance(targets, str) and layers is not None:
            raise InvalidRequest(
                f"{NAME}: layers_to_transform can't go with a target_modules that is one string",
                field="layers_to_transform",
            )
        layers_pattern = _names(fields, "layers_pattern")
        return cls(
            rank=_rank(fields.get("r"), "r"),
            alpha=_alpha(fields.get("lora_alpha"), "lora_alpha"),
            rslora=_flag(fields, "use_rslora"),
            rank_pattern={key: _rank(value, "rank_pattern") for key, value in _map(fields, "rank_pattern").items()},
            alpha_pattern={key: _alpha(value, "alpha_pattern") for key, value in _map(fields, "alpha_pattern").items()},
            targets=targets,
            parameters=parameters,
            expert_order=order,
            peft_version=_text(fields, "peft_version"),
            exclude=_names(fields, "exclude_modules"),
            layers=layers,
            layers_pattern=(layers_pattern,)
            if isinstance(layers_pattern, str) and layers_pattern
            else tuple(layers_pattern),
            base_model=_text(fields, "base_model_name_or_path"),
            task=_text(fields, "task_type"),
        )

    def selected(self, names: Sequence[str], *, linear: Sequence[str]) -> list[str]:
        """Those of ``names`` (a model's modules, as the trainer saw them) that PEFT adapts, in their order.

        ``linear`` are the ones that "all-linear" stands for.
        """
        excluded = _matching(self.exclude, names, "exclude_modules")
        if isinstance(self.targets, str) and self.targets.lower() == _ALL_LINEAR:
            chosen = set(linear)
        else:
            chosen = _matching(self.targets, names, "target_modules")
        if self.layers is not None:
            # PEFT does not apply the choice of layers to a module that is named in full
            in_full = set(self.targets) & chosen
            chosen = in_full | self._in_layers([name for name in names if name in chosen])
        return [name for name in names if name in chosen and name not in excluded]

    def adapts_parameter(self, name: str) -> bool:
        """Whether PEFT adapts the parameter of that full name: it, or a suffix of it, is in target_parameters."""
        return name in self.parameters or name.endswith(tuple(f".{parameter}" for parameter in self.parameters))

    @property
    def alike(self) -> bool:
        """Whether all experts of a layer share one fate, because nothing here could tell their numbers apart."""
        words = [*self.rank_pattern, *self.alpha_pattern, *self.layers_pattern, *self.exclude]
        words += () if isinstance(self.targets, str) else self.targets
        by_name = not isinstance(self.targets, str) or self.targets.lower() == _ALL_LINEAR
        return by_name and not self.layers_pattern and all(_NUMBERLESS_RE.fullmatch(word) for word in words)

    def ranks_and_alphas(self, names: Sequence[str]) -> list[tuple[int, int | float]]:
        """(rank, alpha) of each module in ``names``, by PEFT's rule: the first pattern that is a suffix counts."""
        ranks = _first_matching(self.rank_pattern, names, self.rank, "rank_pattern")
        alphas = _first_matching(self.alpha_pattern, names, self.alpha, "alpha_pattern")
        return [(int(rank), alpha) for rank, alpha in zip(ranks, alphas, strict=True)]

    def _in_layers(self, names: Sequence[str]) -> set[str]:
        if self.layers_pattern:
            wrap = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
            answers = match_all(self.layers_pattern, names, "layers_pattern", wrap=wrap, group="idx")
        else:
            answers = [match_trusted(_LAYER_RE, names, group="idx")]
        found = set()
        for place, name in enumerate(names):
            index = next((row[place] for row in answers if row[place] is not None), None)
            if index and self.layers is not None and int(index) in self.layers:
                found.add(name)
        return found


def _matching(wanted: tuple[str, ...] | str, names: Sequence[str], field: str) -> set[str]:
    if isinstance(wanted, str):
        if not wanted:
            return set()
        (answers,) = match_all([wanted], names, field, whole=True)
        return {name for name, answer in zip(names, answers, strict=True) if answer is not None}
    exact = set(wanted)
    suffixes = tuple(f".{name}" for name in wanted)
    return {name for name in names if name in exact or name.endswith(suffixes)}


def _first_matching(
    patterns: dict[str, Any], names: Sequence[str], default: int | float, field: str
) -> list[int | float]:
    if not patterns:
        return [default] * len(names)
    answers = match_all(tuple(patterns), names, field, wrap=r"(.*\.)?({})$")
    values = tuple(patterns.values())
    return [
        next((value for value, row in zip(values, answers, strict=True) if row[place] is not None), default)
        for place in range(len(names))
    ]


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise Unfit(f"{NAME}: peft_type is {brief(kind)}; only LORA is served", field="peft_type")
    if fields.get("bias", "none") != "none":
        raise Unfit(f"{NAME}: bias is {brief(fields['bias'])}; biases are not served", field="bias")
    for name, value in fields.items():
        if value in (None, False, "", [], {}) or name in _COMPUTING or name in _INFORMATIONAL:
            continue
        reason = _UNSUPPORTED.get(name, "Roost doesn't know this field, and ignoring it might serve another model")
        raise Unfit(f"{NAME}: {shown(name)} is {brief(value)}: {reason}", field=name[:80])
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _HARMLESS_INITS:
        raise Unfit(
            f"{NAME}: init_lora_weights {shown(init)} changes the base's weights; convert the adapter when saving it "
            "with PEFT (path_initial_model_for_weight_conversion)",
            field="init_lora_weights",
        )


def _rank(value: Any, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise InvalidRequest(f"{NAME}: {field} is {brief(value)}, not a rank from 1 to {MAX_RANK}", field=field)
    return value


def _alpha(value: Any, field: str) -> int | float:
    """A finite number; one that is whole becomes an int, so that 16 and 16.0 are one configuration."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_ALPHA:
        raise InvalidRequest(f"{NAME}: {field} is {brief(value)}, not a usable number", field=field)
    return int(value) if math.floor(value) == value else value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise InvalidRequest(f"{NAME}: {name} is {brief(value)}, not true or false", field=name)
    return bool(value)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _map(fields: dict[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    if not isinstance(value, dict | None):
        raise InvalidRequest(f"{NAME}: {name} is {brief(value)}, not a map", field=name)
    return value or {}


def _names(fields: dict[str, Any], name: str) -> tuple[str, ...] | str:
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise InvalidRequest(f"{NAME}: {name} is {brief(value)}, neither names nor a pattern", field=name)
    return tuple(value)


def _layers(value: Any) -> tuple[int, ...] | None:
    if value is None or value == []:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise InvalidRequest(
            f"{NAME}: layers_to_transform is {brief(value)}, not layer numbers", field="layers_to_transform"
        )
    return tuple(numbers)
