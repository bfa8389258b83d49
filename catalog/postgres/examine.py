"""A look at the journal's database that changes nothing, for whoever sets a fleet up."""

from __future__ import annotations

from wire.outcomes import JournalUnavailable, RoostError

from .connection import TROUBLE, reach, said
from .schema import LATEST, versions


async def examine(url: str) -> str:
    """What is there, in a few words. Raises JournalUnavailable where no registrar could use it."""
    try:
        connection = await reach(url)
        try:
            server = await connection.fetchval("SELECT current_setting('server_version')")
            found = await versions(connection)
            if found is None:
                return f"PostgreSQL {server}, no journal yet"
            if found.schema > LATEST.schema or found.layout > LATEST.layout:
                raise JournalUnavailable(f"its journal has version {found}, and this release writes {LATEST}")
            position = await connection.fetchval("SELECT coalesce(max(seq), 0) FROM roost.journal")
            return f"PostgreSQL {server}, {position} events"
        finally:
            connection.terminate()
    except RoostError:
        raise
    except TROUBLE as error:
        raise JournalUnavailable(said(error)) from error
