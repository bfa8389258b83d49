"""Decisions on API keys."""

from __future__ import annotations

from wire.events import KeyCreated, KeyRevoked
from wire.outcomes import NotFound, VersionConflict
from wire.registrar import CreateKey, RevokeKey

from .. import inputs
from .decision import Context, Decision


def create(command: CreateKey, context: Context) -> Decision:
    inputs.check_new_key(command)
    view = context.view
    known = view.key_by_id(command.key_id) or view.key(command.key_hash)
    if known is None:
        return Decision((KeyCreated(command.key_id, command.key_hash, command.tenant, command.scopes, command.label),))
    asked = (command.key_id, command.key_hash, command.tenant, command.scopes, command.label, False)
    if asked != (known.key_id, known.key_hash, known.tenant, known.scopes, known.label, known.revoked):
        raise VersionConflict(f"key {known.key_id} exists already: make a new secret", field="key_id")
    return Decision()


def revoke(command: RevokeKey, context: Context) -> Decision:
    known = context.view.key_by_id(command.key_id)
    if known is None:
        raise NotFound("there is no key with that id", field="key_id")
    return Decision() if known.revoked else Decision((KeyRevoked(command.key_id),))
