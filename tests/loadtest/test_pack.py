"""The packing benchmark measures the published case, and says what it measured."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest import pack

NAMES = {
    "tensors_in", "tensors_out", "bytes_in", "bytes_out", "pack_s", "pack_over_read", "map_views_ms",
    "map_views_known_ms", "stock_read_ms", "round_trip_equal",
}  # fmt: skip


def test_the_published_case(tmp_path: Path) -> None:
    summary = pack.run(tmp_path / "pack.json", small=True, seed=1, plot=tmp_path / "pack.png")
    report = msgspec.json.decode((tmp_path / "pack.json").read_bytes())
    assert report["summary"] == summary
    assert summary.keys() == NAMES
    assert (summary["tensors_in"], summary["tensors_out"]) == (37_248, 672)
    assert (round(summary["bytes_in"] / 1e6, 2), round(summary["bytes_out"] / 1e6, 1)) == (110.75, 105.5)
    assert summary["round_trip_equal"] is True
    # looser than the figures to be had on a quiet machine
    assert summary["pack_s"] * 1e3 < summary["stock_read_ms"]
    assert summary["map_views_ms"] * 20 < summary["stock_read_ms"]
    assert report["environment"]["seed"] == 1
    assert (tmp_path / "pack.png").stat().st_size > 5_000
