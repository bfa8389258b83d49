"""Why an engine did not start, out of a log that says it many times over."""

from __future__ import annotations

import re
from pathlib import Path

MAX_LOG_BYTES = 4 << 20
MAX_CAUSE_CHARACTERS = 500
# an exception at the beginning of a line or of a log record's message, as in "... [core.py:1510] ValueError: no memory"
_CAUSE = re.compile(r"(?:^|\] )((?:[A-Za-z_]+\.)*[A-Z][A-Za-z]*(?:Error|Exception): .+)$", re.MULTILINE)


def root_cause(text: str) -> str:
    """The first exception that ``text`` tells; those that follow only say that something failed. Empty if none."""
    found = _CAUSE.search(text)
    if found is None:
        return ""
    cause = found[1]
    if "validation error" in cause:
        # pydantic tells what is wrong on the line after the next
        cause = " ".join([cause, *(line.strip() for line in text[found.end() :].splitlines()[1:3])])
    return cause[:MAX_CAUSE_CHARACTERS].strip()


def engine_cause(log: Path) -> str:
    """The root cause of an engine's end: from its log, or the one before where it has been started anew since."""
    for path in (log, log.with_suffix(".log.1")):
        try:
            with path.open("rb") as file:
                cause = root_cause(file.read(MAX_LOG_BYTES).decode(errors="replace"))
        except FileNotFoundError:
            continue
        if cause:
            return cause
    return ""
