"""A self-contained HTML page of a result: a table of figures, and charts as inline SVG. Nothing is fetched for it."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34
# colours that people who see few can tell apart (Okabe and Ito), then greys for many lines
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MANY = "#7f8c99"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:42rem;padding:0 1rem;color:#1c2733}"
    "h1{font-size:1.5rem}h2{font-size:1.05rem;margin:1.6rem 0 .3rem}svg{width:100%;height:auto}"
    "table{border-collapse:collapse}td{padding:.15rem 1.2rem .15rem 0;border-bottom:1px solid #dfe5ea}"
    "td+td{text-align:right;font-variant-numeric:tabular-nums}pre{white-space:pre-wrap;font-size:12px;color:#55626e}"
    "@media(prefers-color-scheme:dark){body{background:#12181e;color:#dfe5ea}td{border-color:#33404b}"
    "svg text{fill:#b8c4ce}pre{color:#9aa7b3}}"
)


class Line(msgspec.Struct, frozen=True):
    """One line of a chart; ``xs`` and ``ys`` are of one length."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]

    @classmethod
    def distribution(cls, name: str, values: Sequence[float], points: int = 200) -> Line:
        """The share of ``values`` at or below each: their cumulative distribution."""
        ordered = sorted(value for value in values if math.isfinite(value))
        places = sorted({round(place * (len(ordered) - 1) / points) for place in range(points + 1)}) if ordered else []
        return cls(name, [ordered[place] for place in places], [(place + 1) / len(ordered) for place in places])


class Chart(msgspec.Struct, frozen=True):
    """Lines over a common x axis."""

    title: str
    y: str
    x: str
    lines: Sequence[Line]

    def svg(self) -> str:
        """The chart as an SVG element."""
        points = [(x, y) for line in self.lines for x, y in zip(line.xs, line.ys, strict=True)]
        right = _nice(max((x for x, _ in points), default=1.0))
        top = _nice(max((y for _, y in points), default=1.0))
        parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(self.title)}">']
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            y, x = _down(share), _across(share)
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#8894a0" stroke-opacity=".25"/>')
            parts.append(_text(_LEFT - 6, y + 4, _figure(share * top), "end"))
            parts.append(_text(x, _HEIGHT - _BOTTOM + 16, _figure(share * right), "middle"))
        parts.append(_text((_WIDTH + _LEFT) / 2, _HEIGHT - 4, self.x, "middle"))
        parts.append(_text(_LEFT, _TOP - 2, self.y, "start"))
        many = len(self.lines) > len(_COLOURS)
        for place, line in enumerate(self.lines):
            colour = _MANY if many else _COLOURS[place]
            path = " ".join(
                f"{_across(x / right):.1f},{_down(y / top):.1f}" for x, y in zip(line.xs, line.ys, strict=True)
            )
            opacity = ".45" if many else "1"
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" '
                f'stroke-opacity="{opacity}"><title>{html.escape(line.name)}</title></polyline>'
            )
            if not many and len(self.lines) > 1:
                y = _TOP + 14 + 16 * place
                parts.append(f'<path d="M{_WIDTH - 210} {y - 4}h18" stroke="{colour}" stroke-width="3"/>')
                parts.append(_text(_WIDTH - 186, y, line.name, "start"))
        return "".join(parts) + "</svg>"


def write_page(
    file: Path, title: str, summary: Mapping[str, object], charts: Sequence[Chart], stand_in: Mapping[str, object]
) -> None:
    """Write one HTML file with everything in it. What is a model is said on it, with its constants."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>" for name, value in summary.items()
    )
    drawn = "".join(f"<h2>{html.escape(chart.title)}</h2>{chart.svg()}" for chart in charts)
    told = html.escape(msgspec.json.format(msgspec.json.encode(stand_in), indent=1).decode())
    models = f"<h2>What is a model here, and its constants</h2><pre>{told}</pre>" if stand_in else ""
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{html.escape(title)}</h1><table>{rows}</table>{drawn}"
        f"{models}</html>\n"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page)


def _across(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _down(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="{anchor}" fill="#55626e">{html.escape(text)}</text>'
    )


def _nice(largest: float) -> float:
    """The end of an axis: 1, 2, 2.5 or 5 times a power of ten, at or above ``largest``."""
    if largest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= largest * (1 - 1e-9))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
