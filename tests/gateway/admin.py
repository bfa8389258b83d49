"""Asking the admin API of a mesh: what its tests share."""

from __future__ import annotations

from typing import Any

from .fleet_states import BASE
from .mesh import Mesh, Told
from .revisions import digest_of

ADMIN = "/roost/v1"
# of no artifact
DIGEST = "0" * 64


async def upload(mesh: Mesh, content: bytes, **arguments: Any) -> Told:
    return await mesh.ask("PUT", f"{ADMIN}/artifacts/{digest_of(content)}", data=content, **arguments)


async def publish(mesh: Mesh, policy: str, content: bytes, **fields: Any) -> Told:
    """Upload and publish over the tiny base."""
    assert (await upload(mesh, content)).status in (200, 201)
    body = {"digest": digest_of(content), "create_over": BASE, **fields}
    return await mesh.ask("POST", f"{ADMIN}/policies/{policy}/revisions", json=body)
