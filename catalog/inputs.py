"""What the fields of a command may hold, whatever the catalog's state: names, digests, and the bounds of everything."""

from __future__ import annotations

import re

from wire.events import ArtifactFacts, Provenance, Split
from wire.outcomes import InvalidRequest, TooLarge
from wire.registrar import AddBase, AwaitPosition, CollectOrphans, CreateKey, ReadJournal

from .blobs import check_digest
from .names import LATEST, check_base, check_part, shown

MAX_CONFIG_BYTES = 1 << 20
MAX_TEXT = 1024
MAX_TARGETS = 256
MAX_ARMS = 16
MAX_CHANNELS = 64
MAX_WEIGHT = 1_000_000
MAX_JOURNAL_EVENTS = 1000
MAX_WAIT_S = 600.0
# sizes, ranks and counts are far below it, and it fits every integer on the way
MAX_NUMBER = 1 << 53
ALL_TENANTS = "*"

_WORD_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", re.ASCII)


def check_new_base(command: AddBase) -> None:
    """Raises InvalidRequest and TooLarge."""
    check_base(command.name, "name")
    check_digest(command.fingerprint, "fingerprint")
    if not command.path:
        raise InvalidRequest("path is empty: an engine could not load the base", field="path")
    _check_text(command.path, "path")
    if command.group:
        _check_word(command.group, "group")
    if len(command.config) > MAX_CONFIG_BYTES:
        raise TooLarge(f"config has {len(command.config)} bytes, at most {MAX_CONFIG_BYTES} are taken", field="config")


def check_facts(facts: ArtifactFacts) -> None:
    """Raises InvalidRequest that names the fact."""
    check_digest(facts.digest)
    for name in ("size", "rank", "tensors", "parameters"):
        value = getattr(facts, name)
        if not 0 < value < MAX_NUMBER:
            raise InvalidRequest(f"{name} is {value}: expected a positive number", field=name)
    _check_word(facts.dtype, "dtype")
    if not 0 < len(facts.targets) <= MAX_TARGETS:
        raise InvalidRequest(
            f"targets names {len(facts.targets)} modules: expected 1 to {MAX_TARGETS}", field="targets"
        )
    for target in facts.targets:
        _check_word(target, "targets")


def check_provenance(provenance: Provenance) -> None:
    """Raises InvalidRequest."""
    for name in ("source", "format", "run", "note"):
        _check_text(getattr(provenance, name), name)
    if not 0 <= provenance.step < MAX_NUMBER:
        raise InvalidRequest(f"step is {provenance.step}: expected zero or more", field="step")


def check_channel(channel: str) -> None:
    """A channel that may be moved. Raises InvalidRequest."""
    check_part(channel, "channel")
    if channel == LATEST:
        raise InvalidRequest("latest follows publishing and can't be moved", field="channel")


def check_split(target: tuple[Split, ...]) -> None:
    """Raises InvalidRequest for a split with too many arms, a revision twice, or a weight out of bounds."""
    if len(target) > MAX_ARMS:
        raise InvalidRequest(f"the target has {len(target)} arms, at most {MAX_ARMS} are taken", field="target")
    if len({split.revision for split in target}) != len(target):
        raise InvalidRequest("the target names a revision twice", field="target")
    for split in target:
        if not 0 < split.weight <= MAX_WEIGHT:
            raise InvalidRequest(f"weight {split.weight} is not within 1 to {MAX_WEIGHT}", field="target")


def check_new_key(command: CreateKey) -> None:
    """Raises InvalidRequest."""
    _check_word(command.key_id, "key_id")
    check_digest(command.key_hash, "key_hash")
    if command.tenant != ALL_TENANTS:
        check_part(command.tenant, "tenant")
    if not command.scopes or len(set(command.scopes)) != len(command.scopes):
        raise InvalidRequest("scopes must name at least one scope, and each once", field="scopes")
    _check_text(command.label, "label")


def check_actor(actor: str) -> None:
    """Raises InvalidRequest."""
    _check_text(actor, "actor")


def check_age(command: CollectOrphans) -> None:
    """Raises InvalidRequest. Not a number compares as neither, and is refused."""
    if not 0 <= command.older_than_s < MAX_NUMBER:
        raise InvalidRequest(f"older_than_s is {command.older_than_s}: expected seconds", field="older_than_s")


def check_wait(command: AwaitPosition) -> None:
    """Raises InvalidRequest. Not a number compares as neither, and is refused."""
    if not 0 <= command.seq < MAX_NUMBER:
        raise InvalidRequest(f"seq is {command.seq}: expected a journal position", field="seq")
    if not 0 <= command.timeout_s <= MAX_WAIT_S:
        raise InvalidRequest(f"timeout_s is {command.timeout_s}: expected 0 to {MAX_WAIT_S:g}", field="timeout_s")


def check_command_id(command_id: str) -> None:
    """Raises InvalidRequest."""
    if command_id:
        _check_word(command_id, "command_id")


def check_slice(command: ReadJournal) -> None:
    """Raises InvalidRequest."""
    if command.after < 0:
        raise InvalidRequest(f"after is {command.after}: expected a journal position", field="after")
    if not 0 < command.limit <= MAX_JOURNAL_EVENTS:
        raise InvalidRequest(f"limit is {command.limit}: expected 1 to {MAX_JOURNAL_EVENTS}", field="limit")


def _check_word(text: str, field: str) -> None:
    if _WORD_RE.fullmatch(text) is None:
        raise InvalidRequest(f"{field} {shown(text)} does not match {_WORD_RE.pattern}", field=field)


def _check_text(text: str, field: str) -> None:
    if len(text) > MAX_TEXT:
        raise InvalidRequest(f"{field} has {len(text)} characters, at most {MAX_TEXT} are taken", field=field)
    if not text.isprintable():
        raise InvalidRequest(f"{field} {shown(text)} has characters that can't be shown", field=field)
