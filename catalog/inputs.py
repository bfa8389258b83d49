"""What the fields of a command may hold, whatever the catalog's state: names, digests, and the bounds of everything."""

from __future__ import annotations

import functools
import re

from wire.events import ArtifactFacts, Provenance, Retention, Split, TrainingRecord
from wire.outcomes import InvalidRequest, TooLarge
from wire.registrar import AddBase, AwaitPosition, CollectOrphans, CreateKey, ReadJournal, ReportInUse

from .blobs import check_digest
from .names import LATEST, check_base, check_part, shown

MAX_CONFIG_BYTES = 1 << 20
MAX_TEXT = 1024
MAX_TARGETS = 256
MAX_ARMS = 16
MAX_CHANNELS = 64
MAX_WEIGHT = 1_000_000
MAX_SEED = (1 << 63) - 1
MAX_JOURNAL_EVENTS = 1000
MAX_LABELS = 32
MAX_FORWARDS = 16
MAX_TRAINING_RECORDS = 1000
MAX_STEP = 1000
MAX_IMPORTED = 2000
MAX_DAYS = 36_500
# half a message's bound
MAX_DIGESTS = 100_000
MAX_PARTS = 100
MAX_WAIT_S = 600.0
# sizes, ranks and counts are far below it, and it fits every integer on the way
MAX_NUMBER = 1 << 53
ALL_TENANTS = "*"

_LABEL_KEY_RE = re.compile(r"[a-z0-9][a-z0-9._/-]{0,62}", re.ASCII)
_LABEL_VALUE_RE = re.compile(r"[A-Za-z0-9._/-]{0,63}", re.ASCII)
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
    _check_targets(facts.targets)


# an import brings thousands from one source
@functools.lru_cache(maxsize=1024)
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


def check_split(target: tuple[Split, ...], seed: int | None = None) -> None:
    """Raises InvalidRequest for a split with too many arms, a revision twice, or a weight or seed out of bounds."""
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise InvalidRequest(f"seed is {seed}: expected 0 to {MAX_SEED}", field="seed")
    if seed and len(target) < 2:
        raise InvalidRequest("a seed decides between the arms of a split, and this target has none", field="seed")
    if len(target) > MAX_ARMS:
        raise InvalidRequest(f"the target has {len(target)} arms, at most {MAX_ARMS} are taken", field="target")
    if len({split.revision for split in target}) != len(target):
        raise InvalidRequest("the target names a revision twice", field="target")
    for split in target:
        if not 0 < split.weight <= MAX_WEIGHT:
            raise InvalidRequest(f"weight {split.weight} is not within 1 to {MAX_WEIGHT}", field="target")


def check_label(key: str, value: str, field: str = "labels") -> None:
    """Raises InvalidRequest."""
    if _LABEL_KEY_RE.fullmatch(key) is None:
        raise InvalidRequest(f"label {shown(key)} does not match {_LABEL_KEY_RE.pattern}", field=field)
    if _LABEL_VALUE_RE.fullmatch(value) is None:
        raise InvalidRequest(
            f"the value {shown(value)} of label {key} does not match {_LABEL_VALUE_RE.pattern}", field=field
        )


def check_labels(labels: dict[str, str], removed: tuple[str, ...]) -> None:
    """Labels to set and keys to remove. Raises InvalidRequest."""
    if not labels and not removed:
        raise InvalidRequest("no label is named", field="labels")
    if len(labels) > MAX_LABELS or len(removed) > MAX_LABELS:
        raise InvalidRequest(f"a policy may have {MAX_LABELS} labels", field="labels")
    for key, value in labels.items():
        check_label(key, value)
    for key in removed:
        check_label(key, "", "remove")
        if key in labels:
            raise InvalidRequest(f"label {key} is to be set and to be removed", field="remove")


def check_retention(retention: Retention) -> None:
    """Raises InvalidRequest."""
    if not 1 <= retention.keep_last < MAX_NUMBER:
        raise InvalidRequest(f"keep_last is {retention.keep_last}: expected 1 or more", field="keep_last")
    if not 0 <= retention.keep_days <= MAX_DAYS:
        raise InvalidRequest(f"keep_days is {retention.keep_days}: expected 0 to {MAX_DAYS}", field="keep_days")


def check_training_record(record: TrainingRecord) -> None:
    """Raises InvalidRequest."""
    check_uri(record.uri)
    _check_text(record.digest, "digest")
    for name in ("step", "revision"):
        value = getattr(record, name)
        if not 0 <= value < MAX_NUMBER:
            raise InvalidRequest(f"{name} is {value}: expected zero or more", field=name)


def check_uri(uri: str) -> None:
    """Raises InvalidRequest."""
    if not uri:
        raise InvalidRequest("uri is empty: it says where the bytes are", field="uri")
    _check_text(uri, "uri")


def check_writer(writer: str) -> None:
    """Raises InvalidRequest."""
    if not writer:
        raise InvalidRequest("writer is empty: it names a training run", field="writer")
    _check_text(writer, "writer")


def check_digests(digests: tuple[str, ...]) -> None:
    """Raises InvalidRequest and TooLarge."""
    if len(digests) > MAX_DIGESTS:
        raise TooLarge(f"in_use has {len(digests)} digests, at most {MAX_DIGESTS} are taken", field="in_use")
    for digest in digests:
        check_digest(digest, "in_use")


def check_report(command: ReportInUse) -> None:
    """Raises InvalidRequest and TooLarge."""
    _check_word(command.gateway, "gateway")
    if not 0 <= command.part < command.parts <= MAX_PARTS:
        raise InvalidRequest(f"part {command.part} of {command.parts}: expected at most {MAX_PARTS}", field="part")
    check_digests(command.digests)


def check_step(limit: int) -> None:
    """Raises InvalidRequest."""
    if not 0 < limit <= MAX_STEP:
        raise InvalidRequest(f"limit is {limit}: expected 1 to {MAX_STEP}", field="limit")


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
    """Raises InvalidRequest."""
    check_seconds(command.older_than_s, "older_than_s")


def check_seconds(seconds: float, field: str) -> None:
    """Raises InvalidRequest. Not a number compares as neither, and is refused."""
    if not 0 <= seconds < MAX_NUMBER:
        raise InvalidRequest(f"{field} is {seconds}: expected seconds", field=field)


def check_wait(command: AwaitPosition, *, most: int) -> None:
    """``most`` is the furthest position that can come in time. Raises InvalidRequest.

    Not a number compares as neither, and is refused.
    """
    if not 0 <= command.seq <= most:
        raise InvalidRequest(f"seq is {command.seq}: expected a journal position up to {most}", field="seq")
    if not 0 <= command.timeout_s <= MAX_WAIT_S:
        raise InvalidRequest(f"timeout_s is {command.timeout_s}: expected 0 to {MAX_WAIT_S:g}", field="timeout_s")


def check_command_id(command_id: str) -> None:
    """Raises InvalidRequest."""
    if command_id:
        _check_word(command_id, "command_id")


def may_be_command_id(text: str) -> bool:
    """Whether a command can ever have been taken under this id."""
    return _WORD_RE.fullmatch(text) is not None


def check_slice(command: ReadJournal) -> None:
    """Raises InvalidRequest."""
    if command.after < 0:
        raise InvalidRequest(f"after is {command.after}: expected a journal position", field="after")
    if not 0 < command.limit <= MAX_JOURNAL_EVENTS:
        raise InvalidRequest(f"limit is {command.limit}: expected 1 to {MAX_JOURNAL_EVENTS}", field="limit")


# most adapters are over the same few modules
@functools.lru_cache(maxsize=1024)
def _check_targets(targets: tuple[str, ...]) -> None:
    if not 0 < len(targets) <= MAX_TARGETS:
        raise InvalidRequest(f"targets names {len(targets)} modules: expected 1 to {MAX_TARGETS}", field="targets")
    for target in targets:
        _check_word(target, "targets")


def _check_word(text: str, field: str) -> None:
    if _WORD_RE.fullmatch(text) is None:
        raise InvalidRequest(f"{field} {shown(text)} does not match {_WORD_RE.pattern}", field=field)


def _check_text(text: str, field: str) -> None:
    if len(text) > MAX_TEXT:
        raise InvalidRequest(f"{field} has {len(text)} characters, at most {MAX_TEXT} are taken", field=field)
    if not text.isprintable():
        raise InvalidRequest(f"{field} {shown(text)} has characters that can't be shown", field=field)
