"""Looking for an artifact before the command that names it takes its turn on the ledger's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from wire.outcomes import RoostError
from wire.registrar import AnyCommand, PublishRevision

from .batch import refusal
from .registrar import Reply

# looks at a time: others wait here, where they hold up nobody else's commit
_LOOKS = 16


class Lookahead:
    """Stands before a registrar. ``look`` may take moments, and raises a RoostError where it finds no answer.

    A command whose artifact can't be looked for is refused; all others go on at once.
    """

    def __init__(self, take: Callable[[AnyCommand, Reply], None], look: Callable[[str], object]) -> None:
        self._take = take
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_LOOKS, thread_name_prefix="look")
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, command: AnyCommand, reply: Reply) -> None:
        """Hand the command on, now or once its artifact was looked for; ``reply`` is called once, later."""
        if isinstance(command, PublishRevision):
            task = self._loop.create_task(self._take_later(command, reply))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._take(command, reply)

    async def close(self) -> None:
        """Hand on what is under way, and free the threads."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.shutdown()

    async def _take_later(self, command: PublishRevision, reply: Reply) -> None:
        try:
            await self._loop.run_in_executor(self._threads, self._look, command.artifact.digest)
        except RoostError as error:
            reply(refusal(error))
        else:
            self._take(command, reply)
