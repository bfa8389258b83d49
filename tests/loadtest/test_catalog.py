from __future__ import annotations

from contextlib import closing
from pathlib import Path

import uvloop

from catalog.names import parse_reference
from catalog.replay import check_catalog
from catalog.view import CatalogView
from loadtest.catalog import QUANTILES, commits, imports, thinned
from loadtest.catalog.filled import BASE, facts, fill, policy_name


def test_long_lists_of_samples_keep_their_ends_and_their_middle() -> None:
    figures = [float(number) for number in range(100_000)]
    kept = thinned({"a": {"ms": figures[::-1]}, "few": [3, 1], "policies": 7})
    assert (kept["few"], kept["policies"]) == ([3, 1], 7)
    assert len(kept["a"]["ms"]) == QUANTILES
    assert (kept["a"]["ms"][0], kept["a"]["ms"][QUANTILES // 2], kept["a"]["ms"][-1]) == (0.0, 50_000.0, 99_999.0)


def test_rates_are_compared_within_a_round() -> None:
    rates: dict[str, list[float]] = {"alone": [10, 20, 30], "single": [10, 20, 30], "concurrent": [200, 440, 630]}
    slow: dict[str, list[float]] = {"slow_single": [1, 2, 4], "slow_concurrent": [30, 64, 100]}
    samples: dict[str, list[float]] = {f"{kind}_per_s": values for kind, values in (rates | slow).items()}
    samples |= {f"{kind}_ms": [float(ms) for ms in range(1, 101)] for kind in commits.KINDS} | {"fsync_ms": [0.6]}
    found = commits.summary(samples)
    assert (found["group_commit_over_single"], found["slow_group_commit_over_single"]) == (21, 30)
    assert (found["commit_p99_ms"], found["fsync_p50_ms"], found["single_commits_per_s"]) == (99, 0.6, 20)


def test_a_filled_catalog_is_one_that_its_journal_makes(tmp_path: Path) -> None:
    folder = fill(tmp_path / "filled", 2500, 3)
    with closing(CatalogView.open(folder)) as view:
        found = view.resolve(parse_reference(policy_name(2499)))
    assert (found.base, found.revision, found.digest) == (BASE, 3, facts(2499, 3).digest)
    assert check_catalog(folder).differences == ()


def test_an_import_is_measured_on_a_registrar(tmp_path: Path) -> None:
    measured = uvloop.run(imports.measure(tmp_path, 4500))
    assert (measured["policies"], len(measured["acknowledged_s"])) == (4500, 3)
    assert measured["acknowledged_s"][-1] <= measured["seconds"] * 1.01
    assert measured["file_bytes"] > 0
    assert check_catalog(tmp_path / "catalog").differences == ()
