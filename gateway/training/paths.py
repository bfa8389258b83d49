"""``tinker://RUN/weights/NAME`` and ``tinker://RUN/sampler_weights/NAME``: what runs have saved, as clients name it."""

from __future__ import annotations

import re
from typing import NamedTuple

from catalog.names import shown
from wire.outcomes import InvalidRequest

WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME_RE = re.compile(_NAME, re.ASCII)
_PATH_RE = re.compile(rf"tinker://([A-Za-z0-9._:-]{{1,120}})/({WEIGHTS}|{SAMPLER_WEIGHTS})/({_NAME})", re.ASCII)


class SavedPath(NamedTuple):
    """``kind`` is WEIGHTS (a checkpoint to train on from) or SAMPLER_WEIGHTS (a revision to sample from)."""

    run: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def parse_saved(text: str, kinds: str = f"({WEIGHTS}|{SAMPLER_WEIGHTS})", field: str = "path") -> SavedPath:
    """Of either kind. Raises InvalidRequest for what is no path."""
    match = _PATH_RE.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{field} {shown(text)} is not tinker://RUN/{kinds}/NAME", field=field)
    return SavedPath(*match.groups())


def parse_path(text: str, kind: str, field: str = "path") -> SavedPath:
    """Raises InvalidRequest for what is no path, or one of the other kind."""
    path = parse_saved(text, kind, field)
    if path.kind != kind:
        raise InvalidRequest(f"{field} {text} names {path.kind}, and {kind} are needed here", field=field)
    return path


def check_name(text: str) -> str:
    """``text`` if something saved may be called so. Raises InvalidRequest."""
    if _NAME_RE.fullmatch(text) is None:
        raise InvalidRequest(f"path {shown(text)} is not a name that matches {_NAME}", field="path")
    return text
