"""Enforcing retention in the background: now and then all policies that have one, a few of them at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from wire.registrar import AnyAnswer, AnyCommand, Committed, PruneNext, Refusal

from .registrar import Reply

_log = logging.getLogger(__name__)

ACTOR = "retention"
_STEP_POLICIES = 100
# other commands get their turn between steps
_PAUSE_S = 0.01


class _Answered:
    """Where the answer to one step goes."""

    expired = False

    def __init__(self) -> None:
        self.answer: asyncio.Future[AnyAnswer] = asyncio.get_running_loop().create_future()

    def __call__(self, answer: AnyAnswer, /) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Pruner:
    """Takes turns like any other asker of the registrar. ``in_use`` says what nodes hold, which is kept; None where
    that is not known, and then nothing is retired.

    The first pass begins one interval after the start: gateways have said by then what is in use.
    """

    def __init__(
        self, take: Callable[[AnyCommand, Reply], None], in_use: Callable[[], tuple[str, ...] | None], *, every_s: float
    ) -> None:
        self._take = take
        self._in_use = in_use
        self._every_s = every_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            retired = await self.prune_all()
            if retired:
                _log.info("retention retired %d revisions", retired)

    async def prune_all(self) -> int:
        """One pass; how many revisions were retired. Ends early where the registrar refuses, or nobody knows any more
        what is in use."""
        retired, after = 0, ""
        while True:
            in_use = self._in_use()
            if in_use is None:
                _log.warning("retention waits: no gateway has said lately what all of its nodes hold")
                return retired
            answered = _Answered()
            self._take(PruneNext(actor=ACTOR, after=after, limit=_STEP_POLICIES, in_use=in_use), answered)
            answer = await answered.answer
            if isinstance(answer, Refusal):
                _log.warning("retention waits: %s", answer.message)
                return retired
            if not isinstance(answer, Committed) or not answer.policy:
                return retired + (answer.count if isinstance(answer, Committed) else 0)
            retired += answer.count
            after = answer.policy
            await asyncio.sleep(_PAUSE_S)
