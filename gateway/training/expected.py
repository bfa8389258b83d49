"""Which node is asked first for a policy that no node holds, as gateways decide it while all nodes are well."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from gateway.membership import read_nodes
from gateway.placement.rendezvous import Rendezvous
from wire.outcomes import InvalidRequest

_log = logging.getLogger(__name__)


class ExpectedNode:
    """Of the nodes called ``names``, and those that ``nodes_file`` lists when it is asked."""

    def __init__(self, names: Sequence[str], nodes_file: str) -> None:
        self._names = frozenset(names)
        self._file = Path(nodes_file) if nodes_file else None

    def __call__(self, policy: str) -> tuple[str, ...]:
        """Its name; nothing where there is no node. A wrong guess costs a copy that is fetched when it is asked for."""
        names = set(self._names)
        if self._file is not None and self._file.exists():
            try:
                names.update(node.name for node in read_nodes(self._file))
            except InvalidRequest as error:
                _log.debug("%s", error.message)
        return tuple(Rendezvous(names).order(policy, 1)) if names else ()
