"""Connections to the journal's database, and what is demanded of it before anything is trusted to it."""

from __future__ import annotations

from typing import TypeAlias

import asyncpg

from wire.outcomes import JournalUnavailable

from .schema import migrate

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

CONNECT_S = 5.0
STATEMENT_S = 30.0
# a registrar that stands still in a transaction would keep every other one from writing
_SESSION = {
    "application_name": "roost",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "10s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
# each of them has the commit flushed to disk here before it is confirmed
_DURABLE = frozenset({"on", "local", "remote_write", "remote_apply"})

# What a database that is away, stopping, starting or overloaded is met with. Some RoostErrors are OSErrors too: who
# lets them pass catches them first. The last is what asyncpg says of a connection on which it did not expect to hear
# that the server is ending.
TROUBLE = (
    OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError,
)  # fmt: skip


async def connect(url: str) -> Connection:
    """A connection to a database that flushes what it confirms, with our schema as this release has it.

    Raises what is in TROUBLE where it can't be reached, and JournalUnavailable where waiting would not help.
    """
    connection = await reach(url)
    try:
        await migrate(connection)
    except BaseException:
        connection.terminate()
        raise
    return connection


async def reach(url: str) -> Connection:
    """The same with whatever schema there is."""
    try:
        connection: Connection = await asyncpg.connect(
            url, timeout=CONNECT_S, command_timeout=STATEMENT_S, server_settings=_SESSION
        )
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError, ValueError) as error:
        raise JournalUnavailable(f"the journal's database refuses the connection: {error}") from error
    try:
        await _check_durable(connection)
    except BaseException:
        connection.terminate()
        raise
    return connection


async def _check_durable(connection: Connection) -> None:
    for name, accepted in (("synchronous_commit", _DURABLE), ("fsync", frozenset({"on"}))):
        value = await connection.fetchval("SELECT current_setting($1)", name)
        if value not in accepted:
            raise JournalUnavailable(
                f"PostgreSQL has {name} = {value}: it would confirm commits that a power cut loses; set it to on"
            )


def said(error: BaseException) -> str:
    """What PostgreSQL, or the way to it, has to say."""
    return str(error) or type(error).__name__
