"""The node's log: one line for what changes where bytes and adapters are, nothing for every request."""

from __future__ import annotations

import logging

from wire.node import Refused

from .effects import (
    Answer,
    AnyEffect,
    CancelFetch,
    CancelPull,
    ClearExtent,
    StartFetch,
    StartInstall,
    StartPull,
    StartRemove,
)
from .events import (
    AnyEvent,
    FetchCancelled,
    FetchDone,
    FetchFailed,
    FetchOverdue,
    InstallBroke,
    InstallDone,
    InstallRejected,
    InstallUnsure,
    PeerFailed,
    PullDone,
    PullFailed,
    RemoveDone,
    RemoveUnsure,
    TransferBound,
)

_log = logging.getLogger(__name__)


def log_event(event: AnyEvent) -> None:
    if isinstance(event, FetchDone):
        _log.info("fetched %s from %s", event.digest, f"node {event.peer}" if event.peer else f"the {event.source}")
    elif isinstance(event, FetchOverdue):
        _log.warning("fetch of %s hangs: %s", event.digest, event.message)
    elif isinstance(event, FetchFailed):
        _log.warning("fetch of %s failed (%s): %s", event.digest, event.outcome, event.message)
    elif isinstance(event, FetchCancelled):
        _log.info("fetch of %s was cancelled", event.digest)
    elif isinstance(event, PeerFailed):
        _log.warning("node %s %s: %s", event.node, "gave wrong bytes" if event.wrong else "gave nothing", event.message)
    elif isinstance(event, TransferBound):
        _log.info("transfer %s is %s", event.transfer, event.digest)
    elif isinstance(event, PullDone):
        _log.info("pulled %s, which is %s", event.transfer, event.digest)
    elif isinstance(event, PullFailed):
        # whoever needs the bytes has them from the store
        _log.info("the pull of %s ended: %s", event.transfer, event.message)
    elif isinstance(event, InstallDone):
        _log.info("call %d: installed on %s", event.op, event.engine)
    elif isinstance(event, InstallRejected | InstallBroke | InstallUnsure | RemoveUnsure):
        _log.warning("call %d: %s on %s: %s", event.op, type(event).__name__, event.engine, event.message)
    elif isinstance(event, RemoveDone):
        _log.info("call %d: %s on %s", event.op, event.removal, event.engine)


def log_effect(effect: AnyEffect) -> None:
    if isinstance(effect, Answer):
        if isinstance(effect.answer, Refused):
            _log.debug("refused (%s): %s", effect.answer.outcome, effect.answer.message)
    elif isinstance(effect, StartFetch):
        _log.info("fetch %s, %d bytes", effect.digest, effect.extent.length)
    elif isinstance(effect, CancelFetch):
        _log.info("cancel the fetch of %s", effect.digest)
    elif isinstance(effect, StartPull):
        _log.info("pull %s, %d bytes", effect.transfer, effect.extent.length)
    elif isinstance(effect, CancelPull):
        _log.info("cancel the pull of %s", effect.transfer)
    elif isinstance(effect, ClearExtent):
        _log.info("evict %s from the arena", effect.digest)
    elif isinstance(effect, StartInstall):
        _log.info("call %d: install %s on %s", effect.op, effect.adapter, effect.engine)
    elif isinstance(effect, StartRemove):
        _log.info("call %d: remove %s from %s", effect.op, effect.adapter, effect.engine)
