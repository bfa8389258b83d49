"""The cache benchmark: traces are the same for a seed, replays count bytes, and the default passes its bar."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest import cache
from loadtest.cache import default_policy, summarise
from loadtest.cache.recorded import Listener
from loadtest.cache.replay import Replayed, replay
from loadtest.cache.traces import UNIT_BYTES, Trace, traces
from sidecar.policies import PolicyName, make_policy


def trace(keys: list[int], *, room: int) -> Trace:
    """Of keys of one unit each, over an arena with room for ``room`` of them."""
    sizes = np.full(max(keys) + 1, UNIT_BYTES, np.int64)
    # each takes its header and whole pages besides
    return Trace("made", np.array(keys, np.int64), sizes, room * (UNIT_BYTES + 4096))


def test_replay_counts_what_had_to_be_brought() -> None:
    assert replay(trace([0, 1, 0, 1], room=2), PolicyName.LRU).byte_miss_ratio == 0.5
    assert replay(trace([0, 1, 2, 0, 1, 2], room=2), PolicyName.LRU).byte_miss_ratio == 1.0
    assert replay(trace([0, 1, 2, 0, 1, 2], room=3), PolicyName.LRU).miss_ratio == 0.5


@pytest.mark.parametrize("policy", PolicyName)
def test_large_ones_count_for_their_bytes(policy: PolicyName) -> None:
    sizes = np.array([UNIT_BYTES, 4 * UNIT_BYTES], np.int64)
    found = replay(Trace("made", np.array([0, 1, 0, 0], np.int64), sizes, 8 * UNIT_BYTES), policy)
    assert (found.byte_miss_ratio, found.miss_ratio) == (5 / 7, 0.5)


def test_traces_are_the_same_for_a_seed_and_others_for_another() -> None:
    first, again, other = (list(traces(seed, length=400)) for seed in (1, 1, 2))
    assert len({one.name for one in first}) == len(first) >= 40
    for one, same, another in zip(first, again, other, strict=True):
        assert np.array_equal(one.keys, same.keys)
        assert np.array_equal(one.sizes, same.sizes)
        assert not np.array_equal(one.keys, another.keys)
        assert len(one.keys) == 400
        assert one.keys.min() >= 0
        assert one.keys.max() < len(one.sizes)
        assert one.capacity >= one.sizes.max()


def test_listener_hears_hits_and_what_was_brought_and_changes_nothing() -> None:
    listener, alone = Listener(make_policy(PolicyName.LRU, 100)), make_policy(PolicyName.LRU, 100)
    for policy in (listener, alone):
        policy.added("a", 40, 1.0)
        policy.added("b", 60, 1.0)
        policy.touched("a")
        policy.touched("nobody")
        policy.evicted("b")
        policy.touched("b")
    assert list(listener.victims(lambda key: True)) == list(alone.victims(lambda key: True)) == ["a"]
    heard = listener.trace("heard", 100)
    assert (heard.keys.tolist(), heard.sizes.tolist()) == ([0, 1, 0], [40, 60])


def test_summary_is_the_default_against_lru() -> None:
    chosen = default_policy()
    ratios = (0.5, 0.9, 1.01, 0.7)
    replays = {
        str(number): dict.fromkeys(PolicyName, Replayed(0.5, 0.5, 1.0)) | {chosen: Replayed(0.5 * ratio, 0.5, 1.0)}
        for number, ratio in enumerate(ratios)
    }
    found = summarise(replays)
    assert (found["traces"], found["better_than_lru"], found["worst_over_lru"]) == (4, 0.75, 1.01)
    assert (found["sieve_better_than_lru"], found["sieve_worst_over_lru"]) == (0.0, 1.0)


def test_whole_run_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [one for one in traces(1, length=2000) if one.name.startswith(("Zipf 1.2, one", "asked once, one"))]
    monkeypatch.setattr(cache, "traces", lambda seed, length: few)
    monkeypatch.setattr(cache, "recorded", lambda seed, asks: [])
    summary = cache.run(tmp_path / "cache.json", small=False, seed=1, plot=tmp_path / "cache.svg")
    report = msgspec.json.decode((tmp_path / "cache.json").read_bytes())
    assert report["summary"] == summary
    assert summary["traces"] == len(few) == 4
    assert summary["better_than_lru"] == 1.0
    assert summary["worst_over_lru"] < 1.0
    assert report["samples"].keys() == {one.name for one in few}
    assert (tmp_path / "cache.svg").stat().st_size > 5_000
