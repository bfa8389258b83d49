"""What commands print: tables for people, JSON for scripts, one clear line for an error."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wire.outcomes import Outcome, RoostError

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


class Unreachable(RoostError, ConnectionError):
    """Nothing answers at the gateway's address."""


EXIT_CODES = {
    Outcome.INVALID_REQUEST: 2,
    Outcome.TOO_LARGE: 2,
    Outcome.UNAUTHENTICATED: 4,
    Outcome.FORBIDDEN: 4,
    Outcome.NOT_FOUND: 5,
    Outcome.UNFIT: 6,
    Outcome.VERSION_CONFLICT: 6,
    Outcome.RETIRED: 6,
    Outcome.COLD_LOAD_BOUND: 7,
    Outcome.QUOTA: 7,
    Outcome.BASE_NOT_DEPLOYED: 7,
    Outcome.NO_HEALTHY_NODE: 7,
    Outcome.JOURNAL_UNAVAILABLE: 7,
    Outcome.KNOWN_BAD: 7,
    Outcome.DEADLINE: 7,
}
EXIT_OTHER = 1
EXIT_UNREACHABLE = 3
EXIT_LATER = 7


def exit_code(error: RoostError) -> int:
    """2 wrong input, 3 nothing answers, 4 not allowed, 5 not there, 6 conflict, 7 try again later, 1 all else."""
    if isinstance(error, Unreachable):
        return EXIT_UNREACHABLE
    # an object store that does not answer may do so soon; an artifact that it lacks stays away
    if error.outcome is Outcome.ARTIFACT_UNAVAILABLE and error.retry_after_s is not None:
        return EXIT_LATER
    return EXIT_CODES.get(error.outcome, EXIT_OTHER)


def tell_error(error: RoostError) -> None:
    """One line on stderr."""
    retry = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s else ""
    ERR.print(Text.assemble(("error: ", "bold red"), error.message, retry), soft_wrap=True)


def tell_json(document: Any) -> None:
    """``document`` on stdout, indented, with nothing else around it."""
    typer.echo(msgspec.json.format(msgspec.json.encode(document)).decode())


def tell(*parts: str | tuple[str, str] | Text) -> None:
    """A line on stdout; a (text, style) pair is coloured where a terminal shows it. Never read as markup."""
    OUT.print(Text.assemble(*parts), soft_wrap=True)


def tell_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Rows under headings; ``empty`` is said instead where there are none."""
    listed = list(rows)
    if not listed:
        tell((empty, "dim"))
        return
    OUT.print(make_table(columns, listed))


def make_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) if not isinstance(cell, Text) else cell for cell in row))
    return table


def size_of(count: int) -> str:
    """A number of bytes for a person: ``1.5 MiB``."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def time_of(unix_ms: int) -> str:
    """A moment in local time."""
    return datetime.datetime.fromtimestamp(unix_ms / 1000).strftime("%Y-%m-%d %H:%M:%S")
