from __future__ import annotations

import pytest

from backends.arena.cache import LruCache


def test_what_was_asked_for_longest_ago_goes_first() -> None:
    made: list[str] = []
    cache: LruCache[str, str] = LruCache(2)

    def get(key: str) -> str:
        return cache.get(key, lambda: made.append(key) or key.upper())

    assert [get(key) for key in "abacab"] == list("ABACAB")
    assert made == ["a", "b", "c", "b"]


def test_what_could_not_be_made_is_tried_again() -> None:
    cache: LruCache[str, int] = LruCache(2)

    def fail() -> int:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        cache.get("a", fail)
    assert cache.get("a", lambda: 1) == 1
