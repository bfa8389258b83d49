"""Finding policies by the beginning of their names, their labels and their base, through the indexes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from .records import PolicyRecord
from .snapshot import Snapshot

# records read for one page: of several conditions only the first is an index, the others are looked up
_MOST_LOOKED_AT = 10_000


class Found(msgspec.Struct, frozen=True):
    """A page of policies in the order of their names. ``after``: where to go on, empty at the end.

    A page may be short, even empty, and yet not the last: there is a bound to what is looked at for one.
    """

    policies: list[PolicyRecord]
    after: str


def search(view: Snapshot, *, prefix: str, labels: Mapping[str, str], base: str, after: str, limit: int) -> Found:
    """At most ``limit`` policies with all of ``labels``, and over ``base`` unless that is empty, after ``after``."""
    policies: list[PolicyRecord] = []
    last = ""
    for looked_at, record in enumerate(_candidates(view, prefix, labels, base, after)):
        if len(policies) == limit or looked_at == _MOST_LOOKED_AT:
            return Found(policies, last)
        last = record.policy
        if base in ("", record.base) and labels.items() <= record.labels.items():
            policies.append(record)
    return Found(policies, "")


def _candidates(
    view: Snapshot, prefix: str, labels: Mapping[str, str], base: str, after: str
) -> Iterator[PolicyRecord]:
    if labels:
        key, value = next(iter(labels.items()))
        names = view.names_labelled(key, value, prefix=prefix, after=after)
    elif base:
        names = view.names_over(base, prefix=prefix, after=after)
    else:
        yield from view.all_policies(prefix=prefix, after=after)
        return
    yield from (record for name in names if (record := view.policy(name)) is not None)
