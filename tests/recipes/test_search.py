"""A search trains many at once, drops the worse half of them, and finds one that beats the median."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

pytest.importorskip("tinker")

from recipes.config import Search, Sft
from recipes.search import Found, Halving, best_half, middle
from wire.outcomes import InvalidRequest

from .fake_service import TEXT, Crash, Service
from .items import Silent, config, items, write

RATES = (1e-5, 0.03, 1e-4, 3e-5)


def search_of(folder: Path, metric: str = "loss") -> Search:
    test = write(folder / "test.jsonl", items(300, 20))
    return Search(sft=config(Sft, folder), space={"learning_rate": RATES}, rounds=(2, 4, 12), metric=metric, test=test)


async def run(search: Search, service: Service) -> Found:
    return await Halving(search, service, TEXT, lambda _: Silent()).run()


async def test_the_winner_beats_the_median_candidate_on_items_that_nobody_chose_by(tmp_path: Path) -> None:
    service = Service()
    found = await run(search_of(tmp_path), service)
    assert [len(scores) for scores in found.rounds] == [4, 2, 1]
    assert (found.winner, found.median) == ("taught-1", "taught-3")
    assert found.winner_figures["loss"] < found.median_figures["loss"]
    # 4 to 2, 2 more to 4, one to 12, and the median candidate to as many
    assert service.steps == 8 + 4 + 8 + 10
    assert sorted(service.begun) == [f"taught-{place}" for place in range(4)]
    assert len(service.published) == 1


async def test_a_search_that_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    expected = await run(search_of(tmp_path / "whole"), Service())
    service = Service(crash_at=10)
    with pytest.raises(Crash):
        await run(search_of(tmp_path), service)
    service.crash_at = None
    assert await run(search_of(tmp_path), service) == expected
    assert len(service.begun) == 4


async def test_a_metric_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="'charm' is not among loss, accuracy"):
        await run(search_of(tmp_path, metric="charm"), Service())


@hypothesis_given(st.lists(st.floats(-1, 1), min_size=1, max_size=9))
def test_the_better_half_is_no_worse_than_the_rest(scores: list[float]) -> None:
    named = {str(place): score for place, score in enumerate(scores)}
    kept = best_half(named)
    rest = [score for name, score in named.items() if name not in kept]
    assert len(kept) == max(1, len(scores) // 2)
    assert min(named[name] for name in kept) >= max(rest, default=-1.0)
    assert sorted(scores)[(len(scores) - 1) // 2] == named[middle(named)]
