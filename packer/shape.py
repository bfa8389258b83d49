"""A base's shape, from its ``config.json`` alone: which modules every layer has, and their dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from catalog.names import shown
from packer.architectures import ARCHITECTURES, Fields, Layer, ModuleShape
from packer.modules import ORDER, Place
from packer.strict_json import parse_object
from wire.outcomes import InvalidRequest, Unfit

__all__ = ["MAX_CONFIG_BYTES", "BaseShape", "ModuleShape"]

MAX_CONFIG_BYTES = 4 << 20


class BaseShape(msgspec.Struct, frozen=True):
    """``modules[i]`` maps our module names to what layer ``i`` has, in the order of a revision file.

    A layer of experts has both their separate modules and the fused one: an adapter holds either. ``elsewhere`` names
    the modules outside the layers that a trainer could adapt but no engine does here. The last ``mtp`` layers predict
    further tokens; most trainers don't build them.
    """

    architecture: str
    modules: tuple[Layer, ...]
    elsewhere: tuple[str, ...]
    mtp: int = 0

    @property
    def layers(self) -> int:
        return len(self.modules)

    @classmethod
    def from_config(cls, config: bytes) -> BaseShape:
        """Read a ``config.json``. Raises InvalidRequest (malformed) or Unfit (an architecture that we don't know)."""
        if len(config) > MAX_CONFIG_BYTES:
            raise InvalidRequest(f"config.json is {len(config)} bytes; at most {MAX_CONFIG_BYTES}", field="config.json")
        fields = Fields(parse_object(config, "config.json"))
        architecture = fields.architecture()
        build = ARCHITECTURES.get(architecture)
        if build is None:
            known = ", ".join(ARCHITECTURES)
            raise Unfit(
                f"the architecture {shown(architecture)} is not supported; known are {known}", field="config.json"
            )
        layers = build(fields)
        ordered = {id(layer): _in_file_order(layer) for layer in layers.modules}
        modules = tuple(ordered[id(layer)] for layer in layers.modules)
        return cls(architecture, modules, ("model.embed_tokens", "lm_head"), layers.mtp)

    def get(self, place: Place) -> ModuleShape | None:
        """The module at ``place``; None where the base has none."""
        return self.modules[place.layer].get(place.module) if 0 <= place.layer < self.layers else None

    def places(self) -> Iterator[tuple[Place, ModuleShape]]:
        """Every adaptable module, in the order of a revision file."""
        for layer, modules in enumerate(self.modules):
            for name, module in modules.items():
                yield Place(layer, name), module


def _in_file_order(layer: Layer) -> Layer:
    return dict(sorted(layer.items(), key=lambda entry: ORDER[entry[0]]))
