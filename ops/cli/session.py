"""What all commands share: which state folder, which gateway, which key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..config import DEFAULT_FILE, load
from ..layout import Layout
from ..supervise.state import MeshState, read_state
from .client import ApiClient

DEFAULT_URL = "http://127.0.0.1:8080"

StateDir = Annotated[
    str | None,
    typer.Option("--state-dir", metavar="FOLDER", help="State folder.  [default: what roost.toml says, else .roost]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for scripts.")]


@dataclass(frozen=True)
class Session:
    """The options in front of the command; empty ones are looked up."""

    url: str = ""
    key: str = ""
    state_dir: str = ""

    def layout(self, state_dir: str | None = None) -> Layout:
        """The state folder: the option, ROOST_STATE_DIR, ``roost.toml`` here, else ``.roost``."""
        asked = state_dir or self.state_dir
        if asked:
            return Layout.of(asked)
        return Layout.of(load(default_file(), os.environ).state_dir)

    def mesh(self) -> MeshState | None:
        """The mesh of the state folder, if one was started there."""
        return read_state(self.layout().state_file)

    def client(self) -> ApiClient:
        """The gateway of --url or ROOST_URL, else of the state folder's mesh, whose admin key is then used too.

        That key is never sent anywhere else.
        """
        mesh = self.mesh()
        local = mesh.url if mesh is not None else DEFAULT_URL
        url = self.url or local
        key = self.key
        admin_key = self.layout().admin_key
        if not key and mesh is not None and url.rstrip("/") == local and admin_key.is_file():
            key = admin_key.read_text().strip()
        return ApiClient(url, key)


def default_file() -> Path | None:
    """``roost.toml`` of the current folder, if there is one."""
    file = Path(DEFAULT_FILE)
    return file if file.is_file() else None


def session(context: typer.Context) -> Session:
    found = context.find_object(Session)
    return found if found is not None else Session()
