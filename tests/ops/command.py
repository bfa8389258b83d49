"""The command as a person runs it, and what it talks to: what tests of it share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol

from ops.layout import Layout, write_private
from ops.supervise.state import (
    Identity,
    MeshState,
    Phase,
    ProcessState,
    write_state,
)

POLICY = {
    "policy": "acme/support",
    "base": "smol",
    "latest": 2,
    "version": 3,
    "channels": {
        "stable": [{"revision": 1, "weight": 1}],
        "canary": [{"revision": 1, "weight": 9}, {"revision": 2, "weight": 1}],
    },
    "seeds": {},
    "labels": {"team": "search"},
    "former": ["acme/help"],
    "writer": "5e55:train:0",
    "retention": {"keep_last": 5},
    "retired": False,
    "created_ms": 0,
}
COMMITTED = {
    "seq": 9, "changed": True, "policy": "acme/support", "revision": 2, "digest": "00", "version": 3, "count": 4,
}  # fmt: skip


class Done(NamedTuple):
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Roost(Protocol):
    """Runs the command as a person would, in a folder of their own."""

    def __call__(self, *arguments: str, cwd: Path, url: str = "", stdin: str = "", **environment: str) -> Done: ...


def running_here(folder: Path, url: str) -> Layout:
    """A state folder as a running mesh leaves it, with an admin key."""
    layout = Layout.of(str(folder / ".roost"))
    layout.make()
    identity = Identity.of(os.getpid())
    assert identity is not None
    process = ProcessState("gateway", Phase.READY, identity)
    write_state(layout.state_file, MeshState(Phase.READY, identity, url, processes=(process,)))
    write_private(layout.admin_key, b"tml-local\n")
    return layout
