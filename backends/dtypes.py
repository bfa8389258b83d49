"""What a base is computed in where nobody says: one rule, for engines and trainers of every backend alike.

It is vLLM's own for the bases that the packer knows, on devices that have bfloat16: what config.json says, else what
its parts say, else what the weights are stored in, else float32; and float32, or what can't be computed in, becomes
bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from packer.folder import map_file, read_bounded
from packer.safetensors_header import MAX_HEADER_BYTES, PREFIX_BYTES, header_of
from packer.shape import MAX_CONFIG_BYTES
from packer.strict_json import brief, parse_object
from wire.outcomes import ArtifactUnavailable, InvalidRequest

AUTO = "auto"
_CONFIG = "config.json"
_PARTS = ("text_config", "vision_config", "encoder_config")
# the newer name goes first where both are said
_FIELDS = ("dtype", "torch_dtype")
# what a dtype may be called, and what it is
NAMES = {
    "half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32",
}  # fmt: skip
_DEFAULT = "bfloat16"
# what a config may say besides: weights are stored so, and can't be computed with
_STORED_ONLY = ("float64", "double", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
# what float16 does not hold without loss
_WIDER = frozenset({"BF16", "F32", "F64", "C64"})


def computed_in(dtype: str, base: Path) -> str:
    """``float16``, ``bfloat16`` or ``float32``: what the base in this folder is computed in under a setting ``dtype``.

    Raises InvalidRequest for a setting or a base that says no dtype: it names the setting, the field of config.json or
    the file.
    """
    if dtype == AUTO:
        return _auto(base)
    if dtype not in NAMES:
        raise InvalidRequest(f"dtype {dtype!r} is not {AUTO} or one of {', '.join(NAMES)}", field="dtype")
    return NAMES[dtype]


def _auto(base: Path) -> str:
    try:
        config = read_bounded(base / _CONFIG, MAX_CONFIG_BYTES)
    except ArtifactUnavailable as error:
        raise InvalidRequest(error.message, field=_CONFIG) from error
    said = _said(parse_object(config, _CONFIG))
    if said is not None:
        return said if said != "float32" else _DEFAULT
    stored = _stored(base)
    return "float16" if "F16" in stored and not stored & _WIDER else _DEFAULT


def _said(config: dict[str, Any]) -> str | None:
    """What the config says itself, or else the first of its parts that says anything."""
    for path, value in _mentions(config):
        if value in _STORED_ONLY:
            return _DEFAULT
        if not isinstance(value, str) or value not in NAMES:
            raise InvalidRequest(f"{_CONFIG}: {path} is {brief(value)}, which is no known dtype", field=path)
        return NAMES[value]
    return None


def _mentions(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for part in ("", *_PARTS):
        fields = config.get(part) if part else config
        if not isinstance(fields, dict):
            continue
        for name in _FIELDS:
            if fields.get(name) is not None:
                yield f"{part}.{name}" if part else name, fields[name]


class _Tensor(msgspec.Struct):
    dtype: str = ""


_HEADER = msgspec.json.Decoder(dict[str, _Tensor])


def _stored(base: Path) -> frozenset[str]:
    """The dtypes, as safetensors calls them, of all tensors in the folder's files; only headers are read."""
    found: set[str] = set()
    left = MAX_HEADER_BYTES
    for path in sorted(base.glob("*.safetensors")):
        if not path.is_file():
            continue
        header = _header(path)
        left -= len(header)
        if left < 0:
            raise InvalidRequest(
                f"the headers of the base's safetensors files are larger than {MAX_HEADER_BYTES} bytes together",
                field=path.name,
            )
        try:
            tensors = _HEADER.decode(header[PREFIX_BYTES:])
            tensors.pop("__metadata__", None)
            found |= {tensor.dtype for tensor in tensors.values()}
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidRequest(f"{path.name} has a malformed header: {error}", field=path.name) from None
    return frozenset(found)


def _header(path: Path) -> memoryview:
    try:
        return header_of(map_file(path), path.name)
    except ArtifactUnavailable as error:
        raise InvalidRequest(error.message, field=path.name) from error
