from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from loadtest.page import Chart, Line, write_page


def test_a_page_holds_everything_and_fetches_nothing(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "page.html"
    charts = [
        Chart("Latency <of> all", "share", "seconds", [Line.distribution("a & b", [3.0, 1.0, 2.0])]),
        Chart("Nodes", "requests", "seconds", [Line(f"n{place}", [0.0, 1.0], [0.0, place]) for place in range(20)]),
        Chart("Nothing", "y", "x", [Line("empty", [], [])]),
    ]
    write_page(file, "A <title>", {"p95_s": 1.25}, charts, {"engine": "a model", "constants": {"step_s": 0.5}})
    page = file.read_text()
    assert "p95_s" in page
    assert "1.25" in page
    assert "step_s" in page
    assert "<title>A &lt;title&gt;</title>" in page
    assert not re.search(r"(src|href)\s*=|https?://|<script|@import|url\(", page)
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert [len(list(ElementTree.fromstring(drawing).iter("polyline"))) for drawing in drawings] == [1, 20, 1]


def test_a_distribution_rises_from_the_smallest_to_all() -> None:
    line = Line.distribution("", [float(value) for value in range(1000, 0, -1)], points=10)
    assert (line.xs[0], line.xs[-1], line.ys[-1]) == (1.0, 1000.0, 1.0)
    assert list(line.ys) == sorted(line.ys)
    assert len(line.xs) == 11


def test_lines_stay_within_the_frame() -> None:
    drawing = ElementTree.fromstring(Chart("t", "y", "x", [Line("l", [0.0, 7.3], [0.0, 1234.0])]).svg())
    width, height = (float(side) for side in drawing.attrib["viewBox"].split()[2:])
    (line,) = drawing.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    assert points[0][0] < points[1][0]
    assert points[0][1] > points[1][1]
