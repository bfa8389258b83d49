"""Regular expressions from outside, matched within a time limit.

PEFT's configuration selects modules by regular expression, and a hostile one can run for years. Python's matcher can't
be interrupted, so anything beyond a plain name is matched in a child process that is killed at the limit.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from catalog.names import shown
from wire.outcomes import InvalidRequest

MAX_PATTERN_LENGTH = 4096
MAX_PATTERNS = 4096
TIME_LIMIT_S = 10.0
_MEMORY_LIMIT_BYTES = 1 << 30

# nothing that repeats or branches: such a pattern is matched in linear time
_PLAIN_RE = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?", re.ASCII)

# prints, for every pattern, what the group (or "") of each name is that it matches, null for the others
_CHILD = """
import json, re, resource, sys
memory = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
patterns, names, whole, group = json.load(sys.stdin)
answers = []
for pattern in patterns:
    try:
        matcher = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        json.dump({"error": str(error), "pattern": pattern}, sys.stdout)
        sys.exit()
    matches = map(matcher.fullmatch if whole else matcher.match, names)
    answers.append([match and (match[group] if group else "") for match in matches])
json.dump({"answers": answers}, sys.stdout)
"""

Answers = list[list[str | None]]


class _Reply(msgspec.Struct):
    answers: Answers = []
    error: str = ""
    pattern: str = ""


def match_all(
    patterns: Sequence[str], names: Sequence[str], field: str, *, wrap: str = "{}", whole: bool = False, group: str = ""
) -> Answers:
    """Match each pattern, set into ``wrap``, against each name: the named ``group`` (or ""), None without a match.

    ``whole`` demands that the pattern matches the name to its end. Raises InvalidRequest naming ``field`` for an
    invalid, oversized or too slow pattern.
    """
    if len(patterns) > MAX_PATTERNS:
        raise InvalidRequest(f"{field} holds {len(patterns)} patterns; at most {MAX_PATTERNS}", field=field)
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise InvalidRequest(f"{field}: the pattern {shown(pattern)} is too long", field=field)
    wrapped = [wrap.replace("{}", pattern) for pattern in patterns]
    if not all(_PLAIN_RE.fullmatch(pattern) for pattern in patterns):
        return _match_in_child(wrapped, names, field, whole=whole, group=group)
    return [match_trusted(re.compile(pattern), names, whole=whole, group=group) for pattern in wrapped]


def match_trusted(
    matcher: re.Pattern[str], names: Sequence[str], *, whole: bool = False, group: str = ""
) -> list[str | None]:
    """The same for one pattern that is known to be harmless."""
    matches = map(matcher.fullmatch if whole else matcher.match, names)
    return [match and (match[group] if group else "") for match in matches]


def _match_in_child(patterns: Sequence[str], names: Sequence[str], field: str, *, whole: bool, group: str) -> Answers:
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD, str(_MEMORY_LIMIT_BYTES)],
            input=msgspec.json.encode([patterns, names, whole, group]),
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidRequest(f"{field}: matching it takes more than {TIME_LIMIT_S:g} s", field=field) from None
    if child.returncode != 0:
        raise InvalidRequest(f"{field}: matching it failed (too much memory?)", field=field)
    reply = msgspec.json.decode(child.stdout, type=_Reply)
    if reply.error:
        raise InvalidRequest(
            f"{field}: {shown(reply.pattern)} is no regular expression: {shown(reply.error)}", field=field
        )
    return reply.answers
