"""The tables in PostgreSQL: all in a schema of our own, made and migrated by whichever registrar comes first.

journal   every event, as the wire has it. ``seq`` has no gaps, and its order is the order of commits.
records   what decisions need of the view: the rows of LMDB's databases (layout.py), by database and key.
commands  what commands came to, by the id that their asker gave them, for an hour.
sweeping  artifacts that a registrar is removing from the store or, once ``over``, has removed a moment ago.
version   one row: the version of this schema, and of the layout that the records have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from wire.outcomes import JournalUnavailable

from ..layout import LAYOUT_VERSION

if TYPE_CHECKING:
    from .connection import Connection

# the lock under which everything is written; it lasts as long as the transaction that takes it
LOCK_KEY = 0x726F6F7374
CHANNEL = "roost_journal"

# Each makes the next version of the schema out of the one before. A step that was released is never changed.
_STEPS = (
    """
    CREATE TABLE roost.journal (
        seq bigint PRIMARY KEY CHECK (seq > 0),
        event bytea NOT NULL
    );
    CREATE TABLE roost.records (
        kind text COLLATE "C" NOT NULL,
        key bytea NOT NULL,
        record bytea NOT NULL,
        PRIMARY KEY (kind, key)
    );
    CREATE TABLE roost.commands (
        id text COLLATE "C" PRIMARY KEY,
        command bytea NOT NULL,
        answer bytea NOT NULL,
        at timestamptz NOT NULL DEFAULT now()
    );
    CREATE INDEX commands_at ON roost.commands (at);
    """,
    """
    CREATE TABLE roost.sweeping (
        sweep text COLLATE "C" NOT NULL,
        digest text COLLATE "C" NOT NULL,
        over boolean NOT NULL DEFAULT false,
        until timestamptz NOT NULL,
        PRIMARY KEY (sweep, digest)
    );
    """,
)
VERSION = len(_STEPS)


class Versions(NamedTuple):
    """Of the schema, and of the layout of its records."""

    schema: int
    layout: int

    def __str__(self) -> str:
        return f"{self.schema}.{self.layout}"


LATEST = Versions(VERSION, LAYOUT_VERSION)


async def migrate(connection: Connection) -> None:
    """Bring the schema to this release's version. Raises JournalUnavailable for one of a later release."""
    if await versions(connection) == LATEST:
        return
    async with connection.transaction(isolation="read_committed"):
        await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK_KEY)
        found = await versions(connection)
        if found is None:
            # whoever may not make schemas may be given one
            if not await connection.fetchval("SELECT to_regnamespace('roost') IS NOT NULL"):
                await connection.execute("CREATE SCHEMA roost")
            await connection.execute("CREATE TABLE roost.version (schema integer NOT NULL, layout integer NOT NULL)")
            await connection.execute("INSERT INTO roost.version VALUES (0, $1)", LAYOUT_VERSION)
            found = Versions(0, LAYOUT_VERSION)
        if found.schema > VERSION or found.layout > LAYOUT_VERSION:
            raise JournalUnavailable(
                f"the journal in PostgreSQL has version {found}, and this release writes {LATEST}: a later release has "
                "migrated it"
            )
        for step in _STEPS[found.schema :]:
            await connection.execute(step)
        if found.layout != LAYOUT_VERSION:
            from .rebuild import rebuild_records

            await rebuild_records(connection)
        await connection.execute("UPDATE roost.version SET schema = $1, layout = $2", VERSION, LAYOUT_VERSION)


async def versions(connection: Connection) -> Versions | None:
    """None where there is no schema of ours yet."""
    if await connection.fetchval("SELECT to_regclass('roost.version') IS NULL"):
        return None
    row = await connection.fetchrow("SELECT schema, layout FROM roost.version")
    return None if row is None else Versions(row["schema"], row["layout"])
