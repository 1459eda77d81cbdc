"""Charts as inline SVG, so that a report is one small file without a library: lines, stacked areas, a timeline.

In: numbers. Out: SVG text. Colours are CSS variables of the page; each chart carries its data for the page's pointer
script (report.js).
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daskps.view.words import short

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 30
MOST_POINTS = 400  # of a line; more cannot be seen and only make the file larger


@dataclass(frozen=True, slots=True)
class Line:
    """One line: a name, a CSS colour, and its points."""

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False  # separate points, joined by a thin line


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of a timeline's row."""

    row: str
    color: str
    start: float
    stop: float
    title: str
    faint: bool = False


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    span = max(high - low, 1e-12)
    raw = span / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(count: int) -> list[int]:
    """Which of `count` points to draw: the first, the last, and evenly many between."""
    if count <= MOST_POINTS:
        return list(range(count))
    return sorted({round(index * (count - 1) / (MOST_POINTS - 1)) for index in range(MOST_POINTS)})


class _Frame:
    """The axes: where a value is on the picture."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x0, self.x1 = x[0], x[1] if x[1] > x[0] else x[0] + 1
        self.y0, self.y1 = y[0], y[1] if y[1] > y[0] else y[0] + 1

    def px(self, x: float) -> float:
        return LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        return HEIGHT - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in zip(xs, ys, strict=True))

    def axes(self, x_label: str, y_format: Callable[[float], str]) -> str:
        parts = []
        words: dict[str, float] = {}
        for value in ticks(self.y0, self.y1, 5):
            words.setdefault(y_format(value), value)  # fractions of a byte are all the same
        for text, value in words.items():
            at = self.py(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text x="{LEFT - 7}" y="{at + 3.5:.1f}" text-anchor="end">{text}</text>')
        for value in ticks(self.x0, self.x1, 6):
            at = self.px(value)
            parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{short(value)}</text>')
        base = HEIGHT - BOTTOM
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        label = html.escape(x_label)
        parts.append(f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{label}</text>')
        return "".join(parts)


def _bounds(values: list[float], low: float | None, high: float | None) -> tuple[float, float]:
    least, most = min(values, default=0.0), max(values, default=1.0)
    room = (most - least) * 0.06 or abs(most) * 0.06 or 1.0
    return (least - room if low is None else low), (most + room if high is None else high)


def _svg(frame: _Frame, body: str, lines: Sequence[Line], kind: str) -> str:
    data = {
        "frame": [frame.x0, frame.x1, LEFT, WIDTH - RIGHT],
        "lines": [
            {
                "name": line.name,
                "color": line.color,
                "x": [_rounded(line.x[index]) for index in thin(len(line.x))],
                "y": [_rounded(line.y[index]) for index in thin(len(line.y))],
            }
            for line in lines
        ],
        "kind": kind,
    }
    text = html.escape(json.dumps(data, separators=(",", ":")), quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-chart="{text}">{body}</svg>'


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value)


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_format: Callable[[float], str] = short,
    low: float | None = None,
    high: float | None = None,
    kind: str = "number",
) -> str:
    """Lines over one x axis. `kind` tells the page how to write values: number, percent, bytes or seconds."""
    lines = [line for line in lines if len(line.x)]
    xs = [x for line in lines for x in (line.x[0], line.x[-1])]
    frame = _Frame((min(xs, default=0.0), max(xs, default=1.0)), _bounds([y for n in lines for y in n.y], low, high))
    parts = [frame.axes(x_label, y_format)]
    for line in lines:
        shown = thin(len(line.x))
        points = frame.points([line.x[i] for i in shown], [line.y[i] for i in shown])
        width = 1.2 if line.dots else 1.8
        parts.append(f'<polyline points="{points}" fill="none" stroke="{line.color}" stroke-width="{width}"/>')
        if line.dots or len(shown) == 1:
            parts += [
                f'<circle cx="{frame.px(line.x[i]):.1f}" cy="{frame.py(line.y[i]):.1f}" r="3.2" fill="{line.color}"/>'
                for i in shown
            ]
    return _svg(frame, "".join(parts), lines, kind)


def stacked_chart(lines: Sequence[Line], *, x_label: str, y_format: Callable[[float], str], kind: str) -> str:
    """Shares that add up to 1, one above the other; all lines have the same x."""
    xs = list(lines[0].x)
    frame = _Frame((xs[0], xs[-1]) if xs else (0.0, 1.0), (0.0, 1.0))
    shown = thin(len(xs))
    below = [0.0] * len(shown)
    parts = []
    for line in lines:
        above = [base + line.y[i] for base, i in zip(below, shown, strict=True)]
        at = [xs[i] for i in shown]
        outline = frame.points(at, above) + " " + frame.points(at[::-1], below[::-1])
        parts.append(f'<polygon points="{outline}" fill="{line.color}" fill-opacity="0.82"/>')
        below = above
    return _svg(frame, "".join(parts) + frame.axes(x_label, y_format), lines, kind)


def timeline(rows: Sequence[str], bars: Sequence[Bar], *, start: float, stop: float) -> str:
    """One row of bars each, over seconds since `start`."""
    width, row_height, left = 1160, 26, 92
    height = len(rows) * row_height + 30
    scale = (width - left - RIGHT) / max(stop - start, 1e-9)
    place = {row: number for number, row in enumerate(rows)}
    parts = []
    for row, number in place.items():
        middle = number * row_height + row_height / 2
        parts.append(f'<text x="{left - 10}" y="{middle + 4:.1f}" text-anchor="end">{html.escape(row)}</text>')
        line_y = (number + 1) * row_height
        parts.append(f'<line class="grid" x1="{left}" x2="{width - RIGHT}" y1="{line_y}" y2="{line_y}"/>')
    for value in ticks(0, stop - start, 8):
        at = left + value * scale
        parts.append(f'<text x="{at:.1f}" y="{height - 10}" text-anchor="middle">{value:g} s</text>')
    for bar in bars:
        x, wide = left + (bar.start - start) * scale, max((bar.stop - bar.start) * scale, 0.8)
        y = place[bar.row] * row_height + 4
        shade = ' fill-opacity="0.28"' if bar.faint else ""
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{row_height - 8}" rx="2" fill="{bar.color}"{shade}>'
            f"<title>{html.escape(bar.title)}</title></rect>"
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img" class="timeline">{"".join(parts)}</svg>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names with their colours."""
    items = "".join(f'<span><i style="background:{color}"></i>{html.escape(name)}</span>' for name, color in entries)
    return f'<div class="legend">{items}</div>'
