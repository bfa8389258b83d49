"""What a benchmark writes: read back, one sample name a line, and samples of which fewer are kept."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.report import percentile, spread, write_report

ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PART = st.dictionaries(st.text(), ANY, max_size=3)


@settings(deadline=None)
@given(PART, PART, PART)
def test_a_report_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, object], samples: dict[str, object],
    summary: dict[str, object],
) -> None:  # fmt: skip
    file = tmp_path_factory.getbasetemp() / "report.json"
    write_report(file, environment, samples, summary)
    assert msgspec.json.decode(file.read_bytes()) == {
        "environment": environment,
        "samples": samples,
        "summary": summary,
    }


def test_a_line_holds_all_samples_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "report.json"
    write_report(file, {"cores": 2}, {"total_s": [0.1] * 5000, "faults": {"host": 1}}, {"p95_s": 0.1})
    lines = file.read_text().splitlines()
    assert len(lines) == 12
    assert '  "faults": {"host":1}' in lines


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.integers(2, 120))
def test_fewer_samples_keep_the_extremes_and_invent_nothing(samples: list[float], most: int) -> None:
    kept = spread(samples, most)
    assert len(kept) == min(most, len(samples))
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (min(samples), max(samples))
    assert not set(kept) - set(samples)


def test_fewer_samples_have_the_percentiles_of_all() -> None:
    samples = [float(place) for place in range(100_000)]
    for share in (0.05, 0.5, 0.95):
        assert percentile(spread(samples), share) == pytest.approx(percentile(samples, share), abs=300)
    with pytest.raises(ValueError, match="most"):
        spread(samples, 1)
