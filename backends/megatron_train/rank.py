"""The process of one rank: loads the base, then answers the control's messages one after another.

Started by torchrun (``agent.py``). An error that is none of ours ends the process: the other ranks may wait for this
one in the middle of a collective, and the control starts all of them anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from backends.trainer import TrainerSettings
from wire.outcomes import RoostError
from wire.responder import Reply, Responder
from wire.trainer import MAX_TRAINER_BYTES, AnswerOfRank, AskOfRank, Done, EndRank, Failed

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_FATAL = 70


class RankSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all ranks of a host are started with. ``sockets`` and ``scratch`` are folders of this start alone."""

    trainer: TrainerSettings
    sockets: str
    scratch: str


def endpoint_of(sockets: str, rank: int) -> str:
    """Where a rank answers."""
    return f"ipc://{sockets}/rank-{rank}"


def die_with_parent(parent: int = 0) -> None:
    """Be killed when the process that started this one ends, however it ends. ``parent`` is its id, where it is known:
    it may have ended before this was called."""
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


async def serve(settings: RankSettings, rank: int) -> None:
    """Answer until told to end."""
    from .resident import Resident

    resident = Resident(settings.trainer, Path(settings.scratch) / f"rank-{rank}")
    ended = asyncio.Event()

    def handle(ask: AskOfRank, reply: Reply[AnswerOfRank]) -> None:
        if isinstance(ask, EndRank):
            reply(Done())
            ended.set()
            return
        try:
            reply(resident.answer(ask))
        except RoostError as error:
            reply(Failed(outcome=error.outcome, message=error.message, field=error.field))
        except BaseException:
            _log.exception("rank %d failed on %s", rank, type(ask).__name__)
            _end_now()

    responder: Responder[AskOfRank, AnswerOfRank] = Responder(
        endpoint_of(settings.sockets, rank), AskOfRank, AnswerOfRank, handle, max_bytes=MAX_TRAINER_BYTES
    )
    _log.info("rank %d is ready", rank)
    with contextlib.closing(responder):
        await ended.wait()
        # the answer leaves before the socket does
        await asyncio.sleep(0.05)


def _end_now() -> NoReturn:
    logging.shutdown()
    os._exit(_FATAL)


def main() -> None:
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RankSettings)
    try:
        asyncio.run(serve(settings, int(os.environ["RANK"])))
    except RoostError as error:
        _log.error("the rank can't start: %s", error.message)
        _end_now()


if __name__ == "__main__":
    main()
