"""A base's shape, from its ``config.json`` alone: which modules every layer has, and their dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from catalog.names import shown
from packer.modules import DENSE_PATHS, MAX_LAYERS, Place
from packer.strict_json import brief, parse_object
from wire.outcomes import InvalidRequest, Unfit

MAX_CONFIG_BYTES = 4 << 20
_MAX_DIMENSION = 1 << 24
# Qwen3's own default where its config.json leaves the field out
_QWEN3_HEAD_DIM = 128


class ModuleShape(msgspec.Struct, frozen=True):
    """A linear module: its path inside a layer and its input and output dimension."""

    path: str
    inputs: int
    outputs: int


class BaseShape(msgspec.Struct, frozen=True):
    """``modules[i]`` maps our module names to what layer ``i`` has, in the order of a revision file.

    ``elsewhere`` names the modules outside the layers that a trainer could adapt but no engine does here.
    """

    architecture: str
    modules: tuple[Mapping[str, ModuleShape], ...]
    elsewhere: tuple[str, ...]

    @property
    def layers(self) -> int:
        return len(self.modules)

    @classmethod
    def from_config(cls, config: bytes) -> BaseShape:
        """Read a ``config.json``. Raises InvalidRequest (malformed) or Unfit (an architecture that we don't know)."""
        if len(config) > MAX_CONFIG_BYTES:
            raise InvalidRequest(f"config.json is {len(config)} bytes; at most {MAX_CONFIG_BYTES}", field="config.json")
        fields = _Fields(parse_object(config, "config.json"))
        architecture = fields.architecture()
        build = _ARCHITECTURES.get(architecture)
        if build is None:
            known = ", ".join(_ARCHITECTURES)
            raise Unfit(
                f"the architecture {shown(architecture)} is not supported; known are {known}", field="config.json"
            )
        return cls(architecture, build(fields), ("model.embed_tokens", "lm_head"))

    def get(self, place: Place) -> ModuleShape | None:
        """The module at ``place``; None where the base has none."""
        return self.modules[place.layer].get(place.module) if 0 <= place.layer < self.layers else None

    def places(self) -> Iterator[tuple[Place, ModuleShape]]:
        """Every adaptable module, in the order of a revision file."""
        for layer, modules in enumerate(self.modules):
            for name, module in modules.items():
                yield Place(layer, name), module


class _Fields:
    """Typed access to a config's fields; what is missing or absurd is refused by name."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def architecture(self) -> str:
        names = self._values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise InvalidRequest("config.json must name exactly one architecture", field="architectures")
        return names[0]

    def size(self, name: str, default: int | None = None, *, most: int = _MAX_DIMENSION) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise InvalidRequest(f"config.json lacks {name}", field=name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise InvalidRequest(f"config.json: {name} is {brief(value)}, not between 1 and {most}", field=name)
        return value


_Layers = tuple[Mapping[str, ModuleShape], ...]


def _dense(fields: _Fields, *, kv_heads: int | None, head_dim: int) -> _Layers:
    hidden = fields.size("hidden_size")
    inner = fields.size("intermediate_size")
    queries = fields.size("num_attention_heads") * fields.size("head_dim", head_dim)
    keys = fields.size("num_key_value_heads", kv_heads) * fields.size("head_dim", head_dim)
    sizes = {
        "q": (hidden, queries),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "o": (queries, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "down": (inner, hidden),
    }
    layer = {name: ModuleShape(path, *sizes[name]) for name, path in DENSE_PATHS.items()}
    return (layer,) * fields.size("num_hidden_layers", most=MAX_LAYERS)


def _split_heads(fields: _Fields) -> int:
    return fields.size("hidden_size") // fields.size("num_attention_heads")


def _llama(fields: _Fields) -> _Layers:
    return _dense(fields, kv_heads=fields.size("num_attention_heads"), head_dim=_split_heads(fields))


def _qwen2(fields: _Fields) -> _Layers:
    return _dense(fields, kv_heads=None, head_dim=_split_heads(fields))


def _qwen3(fields: _Fields) -> _Layers:
    return _dense(fields, kv_heads=None, head_dim=_QWEN3_HEAD_DIM)


_ARCHITECTURES: dict[str, Callable[[_Fields], _Layers]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
