"""Asking the registrar, from any process."""

from __future__ import annotations

from typing import overload

from wire.outcomes import DeadlinePassed, JournalUnavailable, error_for
from wire.registrar import (
    AnyAnswer,
    AnyCommand,
    AwaitPosition,
    Collected,
    CollectOrphans,
    Committed,
    JournalSlice,
    Noted,
    PublishRevision,
    Reached,
    ReadJournal,
    Refusal,
    ReportInUse,
    Rollback,
)
from wire.sockets import Requester

from .checks import WriteCommand
from .settings import CurveSettings


class OutcomeUnknown(JournalUnavailable):
    """The command was sent and its answer never came: it may have had its effect or not."""

    public = True


class RegistrarClient:
    """Made and used on one event loop. Outlives any number of restarts of the registrar."""

    def __init__(self, endpoint: str, *, curve: CurveSettings | None = None, server_public: str = "") -> None:
        self._requester: Requester[AnyCommand, AnyAnswer] = Requester(
            endpoint,
            AnyCommand,
            AnyAnswer,
            peer="the registrar",
            curve=curve,
            server_public=server_public,
            gone=JournalUnavailable,
            lost=OutcomeUnknown,
        )

    @overload
    async def run(self, command: WriteCommand, *, timeout_s: float = 10.0) -> Committed: ...

    @overload
    async def run(self, command: CollectOrphans, *, timeout_s: float = 10.0) -> Collected: ...

    @overload
    async def run(self, command: ReadJournal, *, timeout_s: float = 10.0) -> JournalSlice: ...

    @overload
    async def run(self, command: AwaitPosition, *, timeout_s: float = 10.0) -> Reached: ...

    @overload
    async def run(self, command: ReportInUse, *, timeout_s: float = 10.0) -> Noted: ...

    async def run(
        self, command: AnyCommand, *, timeout_s: float = 10.0
    ) -> Committed | Collected | JournalSlice | Reached | Noted:
        """The answer, once its effect is durable. Raises the RoostError that the registrar refused it with.

        Raises JournalUnavailable where nobody answers, and OutcomeUnknown where the command was sent. Asking again as
        it was does no harm while nobody else changes the policy, but for a relative rollback, which goes back twice.
        Behind somebody else's change it may undo that: a repeated publish is one more revision, which takes latest
        back. ``expected_version`` prevents both, and with the journal in PostgreSQL a ``command_id`` too.
        """
        try:
            answer = await self._requester.request(command, timeout_s=timeout_s)
        except (DeadlinePassed, OutcomeUnknown) as error:
            raise OutcomeUnknown(
                f"{error.message}: the command may have had its effect or not; {_advice(command)}", retry_after_s=1.0
            ) from error
        if isinstance(answer, Refusal):
            raise error_for(answer.outcome, answer.message, field=answer.field, retry_after_s=answer.retry_after_s)
        return answer

    def close(self) -> None:
        self._requester.close()


def _advice(command: AnyCommand) -> str:
    if isinstance(command, Rollback) and not command.to and command.expected_version is None:
        return "look where the channel points before repeating it"
    if isinstance(command, PublishRevision) and command.expected_version is None:
        return "repeating it is safe unless somebody else has published since, from whom it would take latest"
    return "repeating it is safe"
