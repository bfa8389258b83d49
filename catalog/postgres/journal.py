"""The statements: what is read from the journal's tables and written to them, within the caller's transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import asyncpg
import msgspec

from wire.events import Event
from wire.outcomes import JournalUnavailable
from wire.registrar import Committed

from ..layout import artifact_of, digest_key
from .connection import Connection
from .rows import Changes, Key, KnownRows, Page
from .schema import CHANNEL, LATEST, LOCK_KEY, Versions

# events are read a page at a time, and a page of large ones ends sooner
PAGE_EVENTS = 5000
PAGE_BYTES = 16 << 20
REVISIONS = "revisions"
# where a revision's artifact is, or was: a revision is never read without it
ARTIFACTS = ("artifacts", "former_artifacts")

_decode_event = msgspec.msgpack.Decoder(Event).decode
_decode_answer = msgspec.msgpack.Decoder(Committed).decode

_HEAD = """
    SELECT coalesce((SELECT max(seq) FROM roost.journal), 0) AS position,
           floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms,
           schema, layout,
           ARRAY(SELECT digest FROM roost.sweeping WHERE NOT over AND until > clock_timestamp()) AS sweeping,
           ARRAY(SELECT sweep || ' ' || digest FROM roost.sweeping WHERE over AND until > clock_timestamp()) AS swept
    FROM roost.version
"""
_ROWS = """
    SELECT kind, key, record FROM roost.records
    JOIN unnest($1::text[], $2::bytea[]) AS wanted (kind, key) USING (kind, key)
"""
_PAGES = """
    SELECT number, page.key, page.record
    FROM unnest($1::text[], $2::bytea[], $3::bigint[]) WITH ORDINALITY AS wanted (kind, start, count, number),
    LATERAL (
        SELECT key, record FROM roost.records WHERE records.kind = wanted.kind AND key >= wanted.start
        ORDER BY key LIMIT wanted.count
    ) AS page
    ORDER BY number, page.key
"""
# and of each the row behind, which says where it ends
_PREFIXES = """
    SELECT number, page.key, page.record
    FROM unnest($1::text[], $2::bytea[], $3::bytea[]) WITH ORDINALITY AS wanted (kind, start, behind, number),
    LATERAL (
        (SELECT key, record FROM roost.records
         WHERE records.kind = wanted.kind AND key >= wanted.start AND key < wanted.behind)
        UNION ALL
        (SELECT key, record FROM roost.records WHERE records.kind = wanted.kind AND key >= wanted.behind
         ORDER BY key LIMIT 1)
    ) AS page
    ORDER BY number, page.key
"""
_APPEND = "INSERT INTO roost.journal (seq, event) SELECT * FROM unnest($1::bigint[], $2::bytea[])"
_INSERT = "INSERT INTO roost.records (kind, key, record) SELECT * FROM unnest($1::text[], $2::bytea[], $3::bytea[])"
_UPSERT = _INSERT + " ON CONFLICT (kind, key) DO UPDATE SET record = excluded.record"
_DELETE = """
    DELETE FROM roost.records USING unnest($1::text[], $2::bytea[]) AS gone (kind, key)
    WHERE records.kind = gone.kind AND records.key = gone.key
"""
_REMEMBER = """
    INSERT INTO roost.commands (id, command, answer) SELECT * FROM unnest($1::text[], $2::bytea[], $3::bytea[])
"""
_BEGIN_SWEEP = """
    INSERT INTO roost.sweeping (sweep, digest, until)
    SELECT $1, digest, clock_timestamp() + make_interval(secs => $3) FROM unnest($2::text[]) AS digest
"""
_END_SWEEP = """
    UPDATE roost.sweeping SET over = true, until = clock_timestamp() + make_interval(secs => $2) WHERE sweep = $1
"""
# the sum says where a page has enough bytes; its first event is always in it
_EVENTS = """
    SELECT seq, event FROM (
        SELECT seq, event, sum(octet_length(event)) OVER (ORDER BY seq) AS bytes
        FROM (SELECT seq, event FROM roost.journal WHERE seq > $1 ORDER BY seq LIMIT $2) AS page
    ) AS summed WHERE bytes <= $3 OR bytes = octet_length(event) ORDER BY seq
"""


class Head(NamedTuple):
    """The newest sequence number, and PostgreSQL's clock (Unix time in milliseconds): one for all registrars.

    ``sweeping`` are digests that some registrar is removing. ``swept`` were removed a moment ago: each is the sweep and
    the digest.
    """

    position: int
    now_ms: int
    sweeping: frozenset[str]
    swept: frozenset[tuple[str, str]]


class Done(NamedTuple):
    """What a command with an id came to. ``command`` is a hash of what was asked."""

    command: bytes
    answer: Committed


async def lock(connection: Connection) -> Head:
    """Wait until no other transaction appends, and keep it so until this one ends.

    Raises JournalUnavailable where another release has migrated the journal since this connection was made.
    """
    await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK_KEY)
    # a statement of its own: it sees what was committed while the lock was waited for
    row = await connection.fetchrow(_HEAD)
    found = Versions(row["schema"], row["layout"])
    if found != LATEST:
        raise JournalUnavailable(
            f"the journal in PostgreSQL was migrated to version {found}, and this release writes {LATEST}"
        )
    swept = frozenset((sweep, digest) for sweep, _, digest in (text.partition(" ") for text in row["swept"]))
    return Head(row["position"], row["now_ms"], frozenset(row["sweeping"]), swept)


async def fetch(connection: Connection, known: KnownRows) -> None:
    """Read what ``known`` wants: in at most four statements, however much it is."""
    rows, pages, prefixes = list(known.wanted_rows), dict(known.wanted_pages), list(known.wanted_prefixes)
    known.wanted_rows.clear()
    known.wanted_pages.clear()
    known.wanted_prefixes.clear()
    revisions = await _fetch_rows(connection, known, rows)
    if pages:
        found = await connection.fetch(_PAGES, *_columns(list(pages)), list(pages.values()))
        for (wanted, count), page in zip(pages.items(), _grouped(found, len(pages)), strict=True):
            known.pages[wanted] = Page(page, whole=len(page) < count)
            revisions += [record for _, record in page if wanted[0] == REVISIONS]
    if prefixes:
        behind = [prefix[:-1] + bytes((prefix[-1] + 1,)) for _, prefix in prefixes]
        found = await connection.fetch(_PREFIXES, *_columns(prefixes), behind)
        for wanted, page, end in zip(prefixes, _grouped(found, len(prefixes)), behind, strict=True):
            known.pages[wanted] = Page(page, whole=not page or page[-1][0] < end)
            revisions += [record for _, record in page if wanted[0] == REVISIONS]
    named = {(kind, artifact_of(record)) for record in revisions for kind in ARTIFACTS}
    await _fetch_rows(connection, known, [key for key in named if key not in known.rows])


async def _fetch_rows(connection: Connection, known: KnownRows, wanted: Sequence[Key]) -> list[bytes]:
    """Returns those that are revisions."""
    if not wanted:
        return []
    found = await connection.fetch(_ROWS, *_columns(wanted))
    known.rows.update(dict.fromkeys(wanted))
    known.rows.update({(row["kind"], row["key"]): row["record"] for row in found})
    return [row["record"] for row in found if row["kind"] == REVISIONS]


def _grouped(found: Sequence[asyncpg.Record], count: int) -> list[list[tuple[bytes, bytes]]]:
    """Rows by their number, which counts from 1."""
    pages: list[list[tuple[bytes, bytes]]] = [[] for _ in range(count)]
    for row in found:
        pages[row["number"] - 1].append((row["key"], row["record"]))
    return pages


async def write(connection: Connection, events: Sequence[Event], changes: Changes, known: KnownRows) -> None:
    """Append ``events`` and carry out ``changes``; whoever listens is told when it is committed.

    A row that was read as absent is inserted and nothing else: PostgreSQL itself refuses to have it twice.
    """
    if events:
        encoded = [msgspec.msgpack.encode(event) for event in events]
        await connection.execute(_APPEND, [event.seq for event in events], encoded)
        await connection.execute("SELECT pg_notify($1, $2)", CHANNEL, str(events[-1].seq))
    new: list[tuple[str, bytes, bytes]] = []
    put: list[tuple[str, bytes, bytes]] = []
    gone: list[Key] = []
    for kind, rows in changes.items():
        for key, record in rows.items():
            if record is None:
                gone.append((kind, key))
            elif known.rows.get((kind, key), b"") is None:
                new.append((kind, key, record))
            else:
                put.append((kind, key, record))
    for statement, entries in ((_DELETE, gone), (_INSERT, new), (_UPSERT, put)):
        if entries:
            await connection.execute(statement, *(list(column) for column in zip(*entries, strict=True)))


async def done_before(connection: Connection, ids: Sequence[str]) -> dict[str, Done]:
    """What those of the commands that were run already came to."""
    if not ids:
        return {}
    rows = await connection.fetch("SELECT id, command, answer FROM roost.commands WHERE id = ANY ($1::text[])", ids)
    return {row["id"]: Done(row["command"], _decode_answer(row["answer"])) for row in rows}


async def remember(connection: Connection, done: Mapping[str, Done]) -> None:
    if done:
        answers = [msgspec.msgpack.encode(one.answer) for one in done.values()]
        await connection.execute(_REMEMBER, list(done), [one.command for one in done.values()], answers)


async def forget(connection: Connection, older_than_s: float) -> None:
    await connection.execute("DELETE FROM roost.commands WHERE at < now() - make_interval(secs => $1)", older_than_s)


async def unnamed(connection: Connection, digests: Sequence[str]) -> list[str]:
    """Those that are not in the catalog."""
    keys = {digest_key(digest): digest for digest in digests}
    rows = await connection.fetch(_ROWS, ["artifacts"] * len(keys), list(keys))
    named = {row["key"] for row in rows}
    return [digest for key, digest in keys.items() if key not in named]


async def begin_sweep(connection: Connection, sweep: str, digests: Sequence[str], most_s: float) -> None:
    """Tell all registrars that these are being removed; for at most ``most_s``, should this one not live to end it."""
    await connection.execute("DELETE FROM roost.sweeping WHERE until <= clock_timestamp()")
    await connection.execute(_BEGIN_SWEEP, sweep, digests, most_s)


async def end_sweep(connection: Connection, sweep: str, told_s: float) -> None:
    """They are removed; registrars are told for ``told_s`` that what they saw of them before is no longer so."""
    await connection.execute(_END_SWEEP, sweep, told_s)


async def events_after(connection: Connection, after: int, limit: int = PAGE_EVENTS) -> list[tuple[int, bytes]]:
    """The next page of the journal: sequence numbers and encoded events."""
    return [(row["seq"], row["event"]) for row in await connection.fetch(_EVENTS, after, limit, PAGE_BYTES)]


async def event_at(connection: Connection, seq: int) -> Event | None:
    encoded = await connection.fetchval("SELECT event FROM roost.journal WHERE seq = $1", seq)
    return None if encoded is None else _decode_event(encoded)


def decode(page: Sequence[tuple[int, bytes]]) -> list[Event]:
    """The events of a page."""
    return [_decode_event(encoded) for _, encoded in page]


def _columns(keys: Sequence[Key]) -> tuple[list[str], list[bytes]]:
    return [kind for kind, _ in keys], [key for _, key in keys]
