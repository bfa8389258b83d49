"""What a revision file says of itself beside its tensors: rank, alpha, scaling rule, and where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from catalog.names import shown
from packer.layouts import LAYOUTS, PER_EXPERT
from packer.modules import EXPERT_PATHS, PATHS, PEFT_PREFIXES, Place, is_path
from wire.outcomes import InvalidRequest

METADATA_KEY = "roost"
FORMAT = 1
MAX_RANK = 4096
MAX_ALPHA = 1e9

Value = TypeVar("Value", int, int | float)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Written as JSON into the file's metadata.

    ``rank`` and ``alpha`` hold where ``ranks`` and ``alphas`` don't say otherwise. Their keys are a module ("q": the
    same in every layer that has it) or a place ("layers.3.q"). ``source`` is the dtype that the adapter came in where
    the file keeps a wider one; ``prefix`` what its PEFT names began with where that is not the usual one; ``layout``
    how its experts were laid out (``packer.layouts``); ``paths`` where the base keeps the modules that have unusual
    names. The last three change nothing that is computed: they are what unpacking needs.
    """

    format: int = FORMAT
    rank: int
    alpha: int | float
    rslora: bool
    ranks: dict[str, int] = {}
    alphas: dict[str, int | float] = {}
    targets: tuple[str, ...]
    source: str = ""
    prefix: str = ""
    layout: str = PER_EXPERT
    paths: dict[str, str] = {}

    def path(self, module: str) -> str:
        """Where the base that this was trained on keeps ``module`` inside a layer."""
        return self.paths.get(module, PATHS[module])

    def encode(self) -> str:
        """The one text that stands for this manifest."""
        # always written, default or not, so that a reader of any version can tell
        body = {"format": self.format, **msgspec.to_builtins(self)}
        return msgspec.json.encode(body, order="deterministic").decode()

    @classmethod
    def decode(cls, text: str) -> Manifest:
        """Raises InvalidRequest."""
        try:
            manifest = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"the revision's manifest is malformed: {shown(str(error))}", field="manifest"
            ) from None
        manifest._check()
        return manifest

    def _check(self) -> None:
        if self.format != FORMAT:
            raise InvalidRequest(f"the revision has format {self.format}; known is {FORMAT}", field="format")
        if not all(1 <= rank <= MAX_RANK for rank in (self.rank, *self.ranks.values())):
            raise InvalidRequest(f"the revision's manifest has a rank outside 1 to {MAX_RANK}", field="ranks")
        if not all(is_alpha(alpha) for alpha in (self.alpha, *self.alphas.values())):
            raise InvalidRequest("the revision's manifest has an unusable alpha", field="alphas")
        if self.source not in ("", "F16"):
            raise InvalidRequest(f"the revision came in the unknown dtype {shown(self.source)}", field="source")
        if self.prefix and self.prefix not in PEFT_PREFIXES[1:]:
            raise InvalidRequest(f"the revision's PEFT prefix {shown(self.prefix)} is not known", field="prefix")
        if self.layout not in LAYOUTS:
            raise InvalidRequest(f"the revision's layout {shown(self.layout)} is not known", field="layout")
        if self.layout != PER_EXPERT and not EXPERT_PATHS.keys() & set(self.targets):
            raise InvalidRequest("the revision names a layout of experts that it has not", field="layout")
        for module, path in self.paths.items():
            if module not in self.targets or module not in PATHS or path == PATHS[module] or not is_path(module, path):
                raise InvalidRequest(f"the revision's path of {shown(module)} is none: {shown(path)}", field="paths")


def is_alpha(value: int | float) -> bool:
    """Whether ``value`` may stand as an alpha in a manifest: finite, of a sane size, and an int if it is whole."""
    return abs(value) <= MAX_ALPHA and not (isinstance(value, float) and value.is_integer())


def compress(values: Mapping[Place, Value], default: Value) -> dict[str, Value]:
    """The shortest form of what differs from ``default``: by module where all its layers agree, else by place."""
    by_module: dict[str, dict[Place, Value]] = {}
    for place, value in values.items():
        by_module.setdefault(place.module, {})[place] = value
    compressed: dict[str, Value] = {}
    for module, placed in by_module.items():
        distinct = set(placed.values())
        if len(distinct) > 1:
            compressed.update({str(place): value for place, value in placed.items() if value != default})
        elif distinct != {default}:
            compressed[module] = distinct.pop()
    return compressed


def value_at(place: Place, compressed: Mapping[str, Value], default: Value) -> Value:
    """The inverse of ``compress`` for one place."""
    return compressed.get(str(place), compressed.get(place.module, default)) if compressed else default
