"""Looking for artifacts before the command that names them takes its turn on the ledger's thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from wire.outcomes import ArtifactUnavailable, DeadlinePassed, JournalUnavailable, Outcome, RoostError
from wire.registrar import AnyAnswer, AnyCommand, ImportRevisions, PublishRevision, Refusal, RestoreRevision

from .batch import refusal
from .registrar import Reply

_log = logging.getLogger(__name__)

# looks at a time: others wait here, where they hold up nobody else's commit
_LOOKS = 16
# artifacts that wait to be looked for: more than a bulk import has on its way
_WAITING_MOST = 32_768
# how often a command is handed on whose artifacts turn out not to have been looked for
_TURNS = 3


class Lookahead:
    """Stands before a registrar. ``look`` may take moments, and raises a RoostError where it finds no answer.

    A command whose artifacts can't be looked for is refused; all that name none go on at once. ``missed`` says what a
    command was refused for because nobody had looked for it, or too long ago: that is made up for.
    """

    def __init__(
        self,
        take: Callable[[AnyCommand, Reply], None],
        look: Callable[[str], object],
        missed: Callable[[], Collection[str]],
    ) -> None:
        self._take = take
        self._look = look
        self._missed = missed
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_LOOKS, thread_name_prefix="look")
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, command: AnyCommand, reply: Reply) -> None:
        """Hand the command on, now or once its artifacts were looked for; ``reply`` is called once, later."""
        digests = named_by(command)
        if not digests and not isinstance(command, RestoreRevision):
            self._take(command, reply)
        elif self._waiting + len(digests) > _WAITING_MOST:
            reply(refusal(JournalUnavailable(f"{self._waiting} artifacts wait to be looked for", retry_after_s=1.0)))
        else:
            self._waiting += len(digests)
            task = self._loop.create_task(self._take_later(command, digests, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Refuse what is under way, and free the threads."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def _take_later(self, command: AnyCommand, digests: Collection[str], reply: Reply) -> None:
        try:
            answer = await self._answered(command, digests, reply)
        except RoostError as error:
            answer = refusal(error)
        except asyncio.CancelledError:
            answer = refusal(JournalUnavailable("the registrar is stopping", retry_after_s=1.0))
        except Exception as error:
            # whoever asked must hear of it, whatever it is
            _log.exception("looking for artifacts failed")
            answer = refusal(ArtifactUnavailable(f"the store can't be asked: {error!r}", retry_after_s=1.0))
        finally:
            self._waiting -= len(digests)
        reply(answer)

    async def _answered(self, command: AnyCommand, digests: Collection[str], reply: Reply) -> AnyAnswer:
        for _ in range(_TURNS):
            if reply.expired:
                raise DeadlinePassed("the deadline passed before the command's artifacts were looked for")
            await self._look_for(digests)
            turn = _Turn(reply, self._loop.create_future())
            self._take(command, turn)
            answer = await turn.answered
            digests = self._missed() if _is_of_artifact(answer) else ()
            if not digests:
                break
        return answer

    async def _look_for(self, digests: Collection[str]) -> None:
        looks = [self._loop.run_in_executor(self._threads, self._look, digest) for digest in digests]
        if not looks:
            return
        try:
            await asyncio.wait(looks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for look in looks:
                look.cancel()
        for error in [look.exception() for look in looks if not look.cancelled()]:
            if error is not None:
                raise error


class _Turn:
    """Stands for a reply during one turn of its command."""

    def __init__(self, reply: Reply, answered: asyncio.Future[AnyAnswer]) -> None:
        self.answered = answered
        self._reply = reply

    @property
    def expired(self) -> bool:
        return self._reply.expired

    def __call__(self, answer: AnyAnswer, /) -> None:
        # nobody waits for it any more where the registrar is stopping
        if not self.answered.done():
            self.answered.set_result(answer)


def named_by(command: AnyCommand) -> Collection[str]:
    """The artifacts that must lie in the store for ``command``, as far as it tells by itself."""
    match command:
        case PublishRevision():
            return {command.artifact.digest}
        case ImportRevisions(external=False):
            return {imported.artifact.digest for imported in command.revisions}
        case _:
            return ()


def _is_of_artifact(answer: AnyAnswer) -> bool:
    return isinstance(answer, Refusal) and answer.outcome is Outcome.ARTIFACT_UNAVAILABLE
