"""Finding policies by the beginning of their names, their labels and their base, through the indexes; and keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from .records import KeyRecord, PolicyRecord
from .snapshot import Snapshot

# records read for one page: of several conditions only the first is an index, the others are looked up
_MOST_LOOKED_AT = 10_000


class Found(msgspec.Struct, frozen=True):
    """A page of policies in the order of their names. ``after``: where to go on, empty at the end.

    A page may be short, even empty, and yet not the last: there is a bound to what is looked at for one.
    """

    policies: list[PolicyRecord]
    after: str


class FoundKeys(msgspec.Struct, frozen=True):
    """A page of keys in the order of their ids, like ``Found``."""

    keys: list[KeyRecord]
    after: str


def search(
    view: Snapshot, *, prefix: str, labels: Mapping[str, str], base: str, live: bool, after: str, limit: int
) -> Found:
    """At most ``limit`` policies with all of ``labels``, and over ``base`` unless that is empty, after ``after``.

    Where only what is ``live`` is wanted, retired ones are left out.
    """
    policies: list[PolicyRecord] = []
    last = ""
    for looked_at, record in enumerate(_candidates(view, prefix, labels, base, after)):
        if len(policies) == limit or looked_at == _MOST_LOOKED_AT:
            return Found(policies, last)
        last = record.policy
        if base in ("", record.base) and labels.items() <= record.labels.items() and not (live and record.retired):
            policies.append(record)
    return Found(policies, "")


def search_keys(view: Snapshot, *, tenant: str, after: str, limit: int) -> FoundKeys:
    """At most ``limit`` keys, of ``tenant`` unless that is empty, after the id ``after``."""
    keys: list[KeyRecord] = []
    last = ""
    for looked_at, record in enumerate(view.keys(after=after)):
        if len(keys) == limit or looked_at == _MOST_LOOKED_AT:
            return FoundKeys(keys, last)
        last = record.key_id
        if tenant in ("", record.tenant):
            keys.append(record)
    return FoundKeys(keys, "")


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
