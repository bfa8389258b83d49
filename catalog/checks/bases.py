"""Decisions on bases."""

from __future__ import annotations

from wire.events import BaseAdded
from wire.outcomes import VersionConflict
from wire.registrar import AddBase

from .. import inputs
from .decision import Context, Decision


def add(command: AddBase, context: Context) -> Decision:
    inputs.check_new_base(command)
    body = BaseAdded(command.name, command.fingerprint, command.path, command.config, command.group)
    known = context.view.base(command.name)
    if known is None:
        return Decision((body,))
    if known.fingerprint != command.fingerprint:
        raise VersionConflict(
            f"base {command.name} is registered with another fingerprint: another model needs another name",
            field="fingerprint",
        )
    same = (known.path, known.config, known.group) == (command.path, command.config, command.group)
    return Decision() if same else Decision((body,))
