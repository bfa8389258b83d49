"""What the journal keeps: typed MessagePack, positional, so a field is only ever added at the end."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Base of all records."""


class SessionRecord(Record, frozen=True):
    """One client's beginning. Everything in it is ``tenant``'s; ``key_id`` is who made it.

    ``finished`` says how it ended, once its client has said so.
    """

    session_id: str
    tenant: str
    key_id: str
    created_ms: int
    metadata: dict[str, str] = {}
    finished: str = ""


class RunRecord(Record, frozen=True):
    """A run: one adapter in training, which is ``policy`` in the catalog.

    ``next_seq`` is the first operation that has no result yet; ``number`` the last change that the trainer was asked
    for and answered; ``step`` counts optimiser steps. ``targets`` is empty until the run was made. ``inflight`` is the
    revision that sampling sessions which follow the run use. ``ended``: the trainer has it no more.
    """

    model_id: str
    session_id: str
    tenant: str
    key_id: str
    policy: str
    base: str
    rank: int
    alpha: float
    seed: int
    attention: bool
    mlp: bool
    created_ms: int
    targets: tuple[str, ...] = ()
    next_seq: int = 0
    number: int = 0
    step: int = 0
    inflight: int = 0
    ended: bool = False


class OperationRecord(Record, frozen=True):
    """An operation that was accepted. ``owner`` is a run or a sampling session; ``seq`` its place there."""

    request_id: str
    owner: str
    seq: int
    tenant: str
    fingerprint: bytes
    nbytes: int
    accepted_ms: int
    resolved_ms: int = 0


class SamplerRecord(Record, frozen=True):
    """A sampling session: on ``policy``'s ``revision``, on what ``follows`` (a run) saved last, or on the base."""

    sampler_id: str
    tenant: str
    base: str
    policy: str = ""
    revision: int = 0
    path: str = ""
    follows: str = ""

    @property
    def session_id(self) -> str:
        """The client's session that it belongs to."""
        return self.sampler_id.partition(":")[0]


class SavedRecord(Record, frozen=True):
    """What a path names: a checkpoint in ``folder``, or ``policy``'s ``revision``. ``expires_ms`` 0: never.

    ``size`` is in bytes, 0 where it was not noted. Once there is a ``removed_ms`` nobody sees it any more, and once its
    bytes are gone too ``folder`` is empty.
    """

    path: str
    model_id: str
    tenant: str
    policy: str
    base: str
    created_ms: int
    expires_ms: int = 0
    revision: int = 0
    folder: str = ""
    step: int = 0
    rank: int = 0
    alpha: float = 0.0
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    targets: tuple[str, ...] = ()
    size: int = 0
    removed_ms: int = 0
