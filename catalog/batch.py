"""What is the same for a batch of commands wherever the journal lies: in LMDB alone, or in PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from wire.events import Event
from wire.outcomes import NotFound, RoostError
from wire.registrar import CollectOrphans, Committed, JournalSlice, ReadJournal, Refusal

from . import inputs
from .apply import append_all
from .blobs import Swept
from .checks import ArtifactSizes, WriteCommand, decide
from .snapshot import Snapshot

# below the wire's bound of a message, with room for one large event more
_SLICE_BYTES = 4 << 20

BatchCommand = WriteCommand | ReadJournal
BatchAnswer = Committed | JournalSlice | Refusal
Written = Committed | Refusal
Clock = Callable[[], int]


class Batch(msgspec.Struct, frozen=True):
    """What a batch came to: an answer for each command, in order, and the events that this host's view has now."""

    answers: list[BatchAnswer]
    events: list[Event]


class BatchLedger(Protocol):
    """Where commands become events. One thread at a time uses it; an answer exists only once it is durable."""

    def run(self, commands: Sequence[BatchCommand]) -> Batch:
        """Raises JournalUnavailable where the journal can't be trusted any more: the process must end."""

    def sweep(self, command: CollectOrphans) -> Iterator[Swept]:
        """Clean the store up, a folder at each step; batches may run between steps."""

    def housekeep(self) -> None:
        """Called now and then."""

    def position(self) -> int:
        """The newest sequence number of this host's view."""


def refusal(error: RoostError) -> Refusal:
    """What is sent for ``error``."""
    return Refusal(outcome=error.outcome, message=error.message, field=error.field, retry_after_s=error.retry_after_s)


def clock_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


def write(command: WriteCommand, view: Snapshot, store: ArtifactSizes, now_ms: Clock, events: list[Event]) -> Written:
    """Decide on ``command`` and apply what it comes to within ``view``'s transaction; its events go to ``events``."""
    try:
        inputs.check_command_id(command.command_id)
        decision = decide(command, view, store, now_ms())
    except RoostError as error:
        return refusal(error)
    position = view.position()
    decided = [Event(seq, now_ms(), command.actor, body) for seq, body in enumerate(decision.events, position + 1)]
    append_all(view, decided)
    events += decided
    record = view.policy(decision.policy)
    return Committed(
        seq=position + len(decision.events),
        changed=bool(decision.events),
        policy=decision.policy,
        revision=decision.revision,
        digest=decision.digest,
        version=record.version if record else 0,
        count=decision.count,
    )


def read_journal(command: ReadJournal, view: Snapshot) -> JournalSlice | Refusal:
    """The slice that is asked for, bounded in number and bytes."""
    try:
        inputs.check_slice(command)
    except RoostError as error:
        return refusal(error)
    events: list[Event] = []
    size = 0
    for event in view.journal(after=command.after):
        if not events and event.seq != command.after + 1:
            compacted = f"events up to {event.seq - 1} were compacted away: begin from a snapshot of the catalog"
            return refusal(NotFound(compacted, field="after"))
        size += len(msgspec.msgpack.encode(event))
        if len(events) == command.limit or (events and size > _SLICE_BYTES):
            break
        events.append(event)
    return JournalSlice(events=tuple(events), last=view.position())
