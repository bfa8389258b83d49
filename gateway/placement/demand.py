"""What is to be placed."""

from __future__ import annotations

import msgspec

from catalog.names import adapter_name


class Demand(msgspec.Struct, frozen=True):
    """A request's needs: a base and, unless it asks for the base itself, one revision of one policy.

    Engines of the backend ``not_by`` have no way to be asked it.
    """

    base: str
    fingerprint: str
    policy: str = ""
    tenant: str = ""
    digest: str = ""
    rank: int = 0
    targets: tuple[str, ...] = ()
    not_by: str = ""

    @property
    def adapter(self) -> str:
        """What an engine calls the revision."""
        return adapter_name(self.tenant, self.digest)
