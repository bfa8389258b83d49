"""Which revisions of each policy this node has had to do with, so that it knows whose newer ones concern it."""

from __future__ import annotations

from catalog.names import adapter_name

from .state import NodeState

_MAX_POLICIES = 1 << 14
_MAX_REVISIONS = 64


class KnownRevisions:
    """What was asked for here, or brought before it was."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        # adapters by policy with the digest of each, those first noted first
        self._known: dict[str, dict[str, str]] = {}

    def note(self, policy: str, tenant: str, digest: str) -> None:
        """``digest`` is the newest of ``policy`` that this node knows of."""
        revisions = self._known.setdefault(policy, {})
        if len(self._known) > _MAX_POLICIES:
            del self._known[next(iter(self._known))]
        adapter = adapter_name(tenant, digest)
        revisions.pop(adapter, None)
        revisions[adapter] = digest
        if len(revisions) > _MAX_REVISIONS:
            del revisions[next(iter(revisions))]

    def holds(self, policy: str) -> bool:
        """Whether the node has, or is getting, a revision of ``policy``."""
        return any(
            self._state.cache.get(digest) is not None or self._in_a_slot(adapter)
            for adapter, digest in reversed(self._known.get(policy, {}).items())
        )

    def serves(self, policy: str) -> bool:
        """Whether an engine has any revision of ``policy`` in a slot."""
        return any(self._in_a_slot(adapter) for adapter in self._known.get(policy, ()))

    def older(self, policy: str, adapter: str) -> frozenset[str]:
        """The adapters of ``policy`` that are known besides ``adapter``."""
        return frozenset(self._known.get(policy, ())) - {adapter}

    def _in_a_slot(self, adapter: str) -> bool:
        return any(adapter in engine.slots for engine in self._state.engines.values())
