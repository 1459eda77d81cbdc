"""The report after a run: one self-contained HTML file in the model directory.

In: a `Record`. Out: HTML text with settings, curves, a timeline of the stages, hit rates, disk and compaction, final
metrics. Curves are thinned, so the size of the file does not grow with the run; the figures of every batch are in the
model's `record/`.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from daskps.nn.architecture import network_title
from daskps.reports import Thinned
from daskps.storage.output import atomic_output
from daskps.types import Stage
from daskps.view.figures import BatchFigures, Record, hit_rates
from daskps.view.settings import settings_text
from daskps.view.words import duration, metrics_name, percent, short, size

# Size and margins of a chart, in SVG units.
WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 30
MOST_POINTS = 400  # points per line; more cannot be seen and would only make the file larger


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: a name, a CSS colour, and its points."""

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False  # draw each point, joined by a thin line


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar in a row of the timeline."""

    row: str  # name of the row
    color: str
    start: float  # seconds
    stop: float  # seconds
    title: str  # tooltip
    faint: bool = False  # drawn lighter: waiting


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return about `wanted` round numbers between `low` and `high`, for an axis."""
    span = max(high - low, 1e-12)
    raw = span / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(count: int) -> list[int]:
    """Return the indices of the points to draw: all, or MOST_POINTS evenly spread ones with the first and the last."""
    if count <= MOST_POINTS:
        return list(range(count))
    return sorted({round(index * (count - 1) / (MOST_POINTS - 1)) for index in range(MOST_POINTS)})


class _Frame:
    """The axes of a chart: converts values to coordinates."""

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
            words.setdefault(y_format(value), value)  # one tick per text: fractions of a byte have the same text
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
    """Return an SVG chart of lines over one x axis.

    `kind` tells the page's script how to format values: number, percent, bytes or seconds.
    """
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
    """Return an SVG chart of shares that add up to 1, stacked; all lines must have the same x values."""
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
    """Return an SVG timeline: one line of bars per row name, over seconds since `start`."""
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
    """Return the HTML of a legend; entries are (name, colour)."""
    items = "".join(f'<span><i style="background:{color}"></i>{html.escape(name)}</span>' for name, color in entries)
    return f'<div class="legend">{items}</div>'


MOST_VALIDATIONS = 200  # lines of the table of validations
MOST_BARS = 4_000  # bars of the timeline; with many nodes it shows fewer batches
NAMES = {"hbm": "HBM", "memory": "memory", "disk": "SSD", "new": "new"}


def write_report(record: Record, directory: str | os.PathLike[str]) -> str:
    """Write the report of a run under `directory`/reports and return its path."""
    name = datetime.fromtimestamp(record.started, UTC).strftime("%Y%m%d-%H%M%S")
    path = Path(directory) / "reports" / f"{name}-{record.run or 'run'}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_output(path) as unfinished:
        unfinished.write_text(render(record), encoding="utf-8")
    return os.fspath(path)


def render(record: Record) -> str:
    """Return the report as HTML."""
    here = files("daskps.view")
    warnings = [f'<p class="warning"><b>Warning:</b> {html.escape(words)}</p>' for words in record.warnings]
    body = [_header(record), *warnings, _tiles(record)]
    if record.summary.batches:
        body += [_curves(record), _timeline(record), _tiers(record)]
    if record.validations:
        body.append(_validations(record))
    body.append(_settings(record))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(record.settings['name'])} · daskps</title>"
        f"<style>{here.joinpath('report.css').read_text('utf-8')}</style></head><body><main>"
        + "\n".join(body)
        + f"<footer>daskps {html.escape(record.version)} · run {html.escape(record.run)} · the figures of every batch "
        "are in the model directory, below record/, as JSON lines.</footer></main>"
        f"<script>{here.joinpath('report.js').read_text('utf-8')}</script></body></html>\n"
    )


# -- the top ---------------------------------------------------------------------------------------------------------


def _header(record: Record) -> str:
    settings = record.settings
    started = datetime.fromtimestamp(record.started, UTC).strftime("%Y-%m-%d %H:%M UTC")
    kind = "finished" if record.ending == "finished" else "other"
    network = network_title(settings["model"], "·")
    cluster = settings["cluster"]
    nodes = f"{cluster['nodes']} node{'s' if cluster['nodes'] > 1 else ''} with {cluster['devices']} device"
    nodes += "s each" if cluster["devices"] > 1 else ""
    data = settings["data"]["format"]
    words = f"{network} on {data} data · {nodes} · started {started} · took {duration(record.seconds)}"
    return (
        f'<header><div><h1>{html.escape(settings["name"])}</h1><p class="quiet">{html.escape(words)}</p></div>'
        f'<span class="badge {kind}">{html.escape(record.ending)}</span></header>'
    )


def _tile(value: str, name: str, more: str = "") -> str:
    return f'<div class="tile"><span>{html.escape(name)}</span><b>{value}</b><small>{html.escape(more)}</small></div>'


def _tiles(record: Record) -> str:
    tiles = []
    if record.validations:
        last = record.validations[-1]["metrics"]
        best = f"best possible {record.best['auc']:.4f}" if record.best else f"log loss {last['log_loss']:.4f}"
        tiles.append(_tile(f"{last['auc']:.4f}", "validation AUC", best))
    summary = record.summary
    metrics = record.batches[-1].metrics if summary.batches else {}
    if metrics:
        auc, loss = metrics.get("auc", float("nan")), metrics.get("log_loss", float("nan"))
        tiles.append(_tile(f"{auc:.4f}", f"{metrics_name(metrics)} AUC", f"log loss {loss:.4f}"))
    took_up = f"from row {summary.first_position:,}" if summary.first_position else f"{summary.batches:,} batches"
    tiles.append(_tile(short(summary.examples), "examples trained", took_up))
    tiles.append(
        _tile(short(record.examples_per_second), "examples/s", f"{duration(record.training_seconds)} of training")
    )
    if summary.batches:
        rates = hit_rates(summary.counts)
        tiles.append(
            _tile(
                percent(rates["memory"]),
                "memory hit rate",
                f"SSD {percent(rates['disk'])}, new {percent(rates['new'])}",
            )
        )
        levels = summary.points.last["levels"]
        if "disk_bytes" in levels:
            tiles.append(_tile(size(levels["disk_bytes"]), "on SSD", f"{levels.get('disk_rows', 0):,.0f} rows"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


# -- curves ----------------------------------------------------------------------------------------------------------


def _card(title: str, words: str, *parts: str) -> str:
    return f'<div class="card"><h3>{html.escape(title)}</h3><p>{html.escape(words)}</p>{"".join(parts)}</div>'


def _chart_card(title: str, words: str, lines: list[Line], chart: str) -> str:
    entries = [(line.name, line.color) for line in lines if len(line.x)]
    return _card(title, words, legend(entries) if len(entries) > 1 else "", chart)


def _curves(record: Record) -> str:
    batches = record.batches
    rows = [figures.position for figures in batches]
    numbers = [figures.batch for figures in batches]
    cards = [
        _auc(record, batches),
        _rate(batches, rows),
        _hits(record, batches, numbers),
        _stage_seconds(batches, numbers),
        _bytes(batches, numbers),
        _disk(batches, numbers),
    ]
    return f'<h2>Curves</h2><div class="cards">{"".join(cards)}</div>'


def _auc(record: Record, batches: list[BatchFigures]) -> str:
    progressive = [(figures.position, figures.metrics.get("auc", 0.5)) for figures in batches]
    validation = [(one["position"], one["metrics"]["auc"]) for one in record.validations]
    lines = [
        Line(metrics_name(batches[-1].metrics), "var(--train)", *_where_known(progressive)),
        Line("validation", "var(--push)", *_where_known(validation), dots=True),
    ]
    if record.best:
        first = batches[0].position
        ends = [first, max(batches[-1].position, first + 1)]
        lines.append(Line("best possible", "var(--quiet)", ends, [record.best["auc"]] * 2))
    chart = line_chart(lines, x_label="examples", y_format=lambda value: f"{value:.3f}")
    words = "every step is predicted before it is trained on, from the start of its pass on; only the first pass is "
    return _chart_card("AUC", f"{words}progressive, of examples that were never learned from", lines, chart)


def _where_known(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return the x and y of the points whose y is not NaN; the AUC is NaN if all examples have the same label."""
    known = [(x, y) for x, y in points if not math.isnan(y)]
    return [x for x, _ in known], [y for _, y in known]


def _rate(batches: list[BatchFigures], rows: list[int]) -> str:
    lines = [Line("examples/s", "var(--train)", rows, [figures.examples_per_second for figures in batches])]
    chart = line_chart(lines, x_label="examples", low=0)
    return _chart_card("Examples per second", "mean over the last four batches", lines, chart)


def _hits(record: Record, batches: list[BatchFigures], numbers: list[int]) -> str:
    lines = [
        Line(NAMES[tier], f"var(--{tier})", numbers, [figures.rates[tier] for figures in batches])
        for tier in ("memory", "disk", "new")
    ]
    hbm = hit_rates(record.summary.counts)["hbm"]
    words = f"where a batch's rows came from; {percent(hbm)} of all occurrences found theirs on the devices already"
    chart = stacked_chart(lines, x_label="batch", y_format=percent, kind="percent")
    return _chart_card("Hit rates", words, lines, chart)


def _stage_seconds(batches: list[BatchFigures], numbers: list[int]) -> str:
    lines = [
        Line(stage, f"var(--{stage})", numbers, [figures.stage_seconds.get(stage, 0.0) for figures in batches])
        for stage in Stage
    ]
    chart = line_chart(lines, x_label="batch", y_format=lambda value: f"{value:g} s", low=0, kind="seconds")
    return _chart_card("Time of each stage", "work a batch, of the slowest node, without waiting", lines, chart)


def _bytes(batches: list[BatchFigures], numbers: list[int]) -> str:
    lines = [
        Line(NAMES[tier], f"var(--{tier})", numbers, [figures.levels.get(f"{tier}_bytes", 0.0) for figures in batches])
        for tier in ("hbm", "memory", "disk")
        if f"{tier}_bytes" in batches[-1].levels
    ]
    chart = line_chart(lines, x_label="batch", y_format=size, low=0, kind="bytes")
    return _chart_card("Bytes in each tier", "rows on devices, in memory and on disk after each batch", lines, chart)


def _disk(batches: list[BatchFigures], numbers: list[int]) -> str:
    lines = [
        Line("read for misses", "var(--pull)", numbers, [f.counts.get("bytes_read", 0.0) for f in batches]),
        Line("written back", "var(--push)", numbers, [f.counts.get("bytes_written", 0.0) for f in batches]),
    ]
    if "compacted_bytes" in batches[-1].counts:
        values = [figures.counts.get("compacted_bytes", 0.0) for figures in batches]
        lines.append(Line("moved by compaction", "var(--hbm)", numbers, values))
    chart = line_chart(lines, x_label="batch", y_format=size, low=0, kind="bytes")
    return _chart_card("Disk", "bytes a batch between memory and SSD", lines, chart)


# -- stages ----------------------------------------------------------------------------------------------------------


def _timeline(record: Record) -> str:
    count, shown = record.summary.batches, record.summary.timeline
    shown = shown[: max(1, MOST_BARS // max(len(line["stages"]) for line in shown))]
    spans = [
        (line["batch"], node, stage, line["started"] + begin, line["started"] + end, waited)
        for line in shown
        for node, stage, begin, end, waited in line["stages"]
    ]
    nodes = sorted({node for _, node, *_ in spans})
    rows = [_row(node, stage, len(nodes)) for node in nodes for stage in Stage]
    start, stop = min(span[3] for span in spans), max(span[4] for span in spans)
    bars = []
    for batch, node, stage, begin, end, waited in spans:
        title = f"{stage} of batch {batch}: {end - begin:.3f} s" + (f", {waited:.3f} s of it waiting" if waited else "")
        row, color = _row(node, stage, len(nodes)), f"var(--{stage})"
        # A stage first waits, then works, so the faint part comes first.
        if waited > 0.002:
            bars.append(Bar(row, color, begin, begin + waited, title, faint=True))
        bars.append(Bar(row, color, begin + waited, end, title))
    words = f"batches {shown[0]['batch']:,} to {shown[-1]['batch']:,}" + (
        f", of the {count:,} of this run" if len(shown) < count else ""
    )
    return (
        f'<h2>Stages</h2><div class="card"><h3>Timeline</h3><p>{html.escape(words)}; faint: waiting for rows of an '
        f'earlier batch. Point at a bar for its figures.</p><div class="scroll">'
        f"{timeline(rows, bars, start=start, stop=stop)}</div></div>{_stage_table(record)}"
    )


def _row(node: int, stage: str, nodes: int) -> str:
    return stage if nodes == 1 else f"{node} {stage}"


def _stage_table(record: Record) -> str:
    total, summary, lines = max(record.training_seconds, 1e-9), record.summary, []
    for stage in Stage:
        busy, waited = summary.stage_seconds.get(stage, 0.0), summary.waited_seconds.get(stage, 0.0)
        share = min(busy / total, 1.0)
        meter = f'<div class="meter"><i style="width:{100 * share:.1f}%;background:var(--{stage})"></i></div>'
        lines.append(
            f'<tr><td><i class="key" style="background:var(--{stage})"></i>{stage}</td><td class="n">{busy:.2f}</td>'
            f'<td class="n">{waited:.2f}</td><td class="n">{busy / summary.batches:.3f}</td>'
            f'<td class="n">{percent(share)}</td><td>{meter}</td></tr>'
        )
    head = (
        '<tr><th>stage</th><th class="n">working, s</th><th class="n">waiting, s</th><th class="n">s a batch</th>'
        '<th class="n">busy</th><th></th></tr>'
    )
    return f'<div class="card scroll" style="margin-top:14px"><table>{head}{"".join(lines)}</table></div>'


# -- tiers, validations, settings ------------------------------------------------------------------------------------


def _tiers(record: Record) -> str:
    summary, budget = record.summary, record.settings["budget"]
    counts, levels = summary.counts, summary.points.last["levels"]
    rates = hit_rates(counts)
    served = {
        "hbm": f"{percent(rates['hbm'])} of {counts.get('keys', 0):,.0f} occurrences",
        "memory": f"{percent(rates['memory'])} of {_pulled(counts):,.0f} rows pulled",
        "disk": f"{percent(rates['disk'])} of {_pulled(counts):,.0f} rows pulled",
    }
    peak = {tier: summary.most.get(f"{tier}_bytes", 0.0) for tier in served}
    lines = []
    for tier, words in served.items():
        allowed = budget[f"{tier}_bytes"]
        rows = levels.get(f"{tier}_rows")
        lines.append(
            f'<tr><td><i class="key" style="background:var(--{tier})"></i>{NAMES[tier]}</td><td>{words}</td>'
            f'<td class="n">{"" if rows is None else f"{rows:,.0f}"}</td><td class="n">{size(peak[tier])}</td>'
            f'<td class="n">{"the disk" if allowed is None else size(allowed)}</td></tr>'
        )
    head = (
        '<tr><th>tier</th><th>served</th><th class="n">rows at the end</th><th class="n">peak size of rows</th>'
        '<th class="n">budget</th></tr>'
    )
    return f'<h2>Tiers</h2><div class="card scroll"><table>{head}{"".join(lines)}</table></div>{_counters(record)}'


def _pulled(counts: dict[str, float]) -> float:
    return sum(counts.get(name, 0) for name in ("hits", "misses", "new_keys"))


def _counters(record: Record) -> str:
    counts, levels = record.summary.counts, record.summary.points.last["levels"]
    facts = [
        ("deferred rows (an earlier batch in flight still held them)", f"{counts.get('late', 0):,.0f}"),
        ("rows evicted from memory", f"{counts.get('evicted', 0):,.0f}"),
        ("of them written to disk", f"{counts.get('written_back', 0):,.0f}"),
        ("bytes read from disk for misses", size(counts.get("bytes_read", 0))),
        ("bytes written back to disk", size(counts.get("bytes_written", 0))),
        ("batches that waited because pinned rows filled the cache", f"{counts.get('waits', 0):,.0f}"),
    ]
    names = {
        "files": "segments",
        "disk_rows": "live rows on disk",
        "stale_rows": "stale rows on disk",
        "compactions": "segments compacted",
        "compacted_rows": "rows moved by compaction",
    }
    facts += [(words, f"{levels[name]:,.0f}") for name, words in names.items() if name in levels]
    lines = "".join(f'<tr><td>{html.escape(words)}</td><td class="n">{value}</td></tr>' for words, value in facts)
    return f'<div class="card scroll" style="margin-top:14px"><table>{lines}</table></div>'


def _validations(record: Record) -> str:
    names = list(record.validations[-1]["metrics"])
    shown: Thinned[dict[str, Any]] = Thinned(MOST_VALIDATIONS)
    for item in record.validations:
        shown.append(item)
    head = "".join(f'<th class="n">{html.escape(name.replace("_", " "))}</th>' for name in names)
    lines = "".join(
        f'<tr><td class="n">{item["batch"]:,}</td><td class="n">{item["position"]:,}</td>'
        + "".join(f'<td class="n">{item["metrics"][name]:,.5g}</td>' for name in names)
        + "</tr>"
        for item in shown
    )
    return (
        '<h2>Validation</h2><div class="card scroll"><table><tr><th class="n">batch</th><th class="n">rows trained</th>'
        f"{head}</tr>{lines}</table></div>"
    )


def _settings(record: Record) -> str:
    return f"<h2>Settings</h2><pre>{html.escape(settings_text(record.settings))}</pre>"
