"""The report after a run: one HTML file that needs nothing else, written into the model directory.

In: a `Record`. Out: HTML text with settings, curves, a timeline of the stages, hit rates, disk and compaction, final
metrics; the record itself is inside as JSON (``<script id="record">``).
"""

from __future__ import annotations

import html
import json
import math
import os
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from daskps.view.chart import Bar, Line, legend, line_chart, stacked_chart, timeline
from daskps.view.figures import STAGES, BatchFigures, hit_rates
from daskps.view.record import Record
from daskps.view.settings import settings_text
from daskps.view.words import duration, percent, plain, short, size

TIMELINE_BATCHES = 40  # more bars than these cannot be told apart
NAMES = {"hbm": "HBM", "memory": "memory", "disk": "SSD", "new": "new"}


def write_report(record: Record, directory: str | os.PathLike[str]) -> str:
    """Write the report of a run under `directory`/reports and return its path."""
    name = datetime.fromtimestamp(record.started, UTC).strftime("%Y%m%d-%H%M%S")
    path = Path(directory) / "reports" / f"{name}-{record.run or 'run'}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(record), encoding="utf-8")
    return os.fspath(path)


def render(record: Record) -> str:
    """The report as HTML."""
    here = files("daskps.view")
    body = [_header(record), _tiles(record)]
    if record.batches:
        body += [_curves(record), _timeline(record), _tiers(record)]
    if record.validations:
        body.append(_validations(record))
    body.append(_settings(record))
    embedded = json.dumps(plain(record.plain()), separators=(",", ":"), default=str).replace("</", "<\\/")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(record.settings['name'])} · daskps</title>"
        f"<style>{here.joinpath('report.css').read_text('utf-8')}</style></head><body><main>"
        + "\n".join(body)
        + f"<footer>daskps {html.escape(record.version)} · run {html.escape(record.run)} · the figures of every batch "
        'are in this file as JSON, in the element with id "record".</footer></main>'
        f'<script type="application/json" id="record">{embedded}</script>'
        f"<script>{here.joinpath('report.js').read_text('utf-8')}</script></body></html>\n"
    )


# -- the top ---------------------------------------------------------------------------------------------------------


def _header(record: Record) -> str:
    settings = record.settings
    started = datetime.fromtimestamp(record.started, UTC).strftime("%Y-%m-%d %H:%M UTC")
    kind = "finished" if record.ending == "finished" else "other"
    network = settings["model"]["kind"]
    if network in {"dnn", "deepfm"}:
        network += " " + "·".join(map(str, settings["model"]["hidden"]))
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
    if record.metrics:
        auc, loss = record.metrics.get("auc", float("nan")), record.metrics.get("log_loss", float("nan"))
        tiles.append(_tile(f"{auc:.4f}", "progressive AUC", f"log loss {loss:.4f}"))
    took_up = f"from row {record.first_position:,}" if record.first_position else f"{len(record.batches)} batches"
    tiles.append(_tile(short(record.examples), "examples trained", took_up))
    tiles.append(
        _tile(short(record.examples_per_second), "examples/s", f"{duration(record.training_seconds)} of training")
    )
    if record.batches:
        rates = hit_rates(record.counts)
        tiles.append(
            _tile(
                percent(rates["memory"]),
                "memory hit rate",
                f"SSD {percent(rates['disk'])}, new {percent(rates['new'])}",
            )
        )
        levels = record.batches[-1].levels
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
        _auc(record, rows),
        _rate(batches, rows),
        _hits(batches, numbers),
        _stage_seconds(batches, numbers),
        _bytes(batches, numbers),
        _disk(batches, numbers),
    ]
    return f'<h2>Curves</h2><div class="cards">{"".join(cards)}</div>'


def _auc(record: Record, rows: list[int]) -> str:
    progressive = [(figures.position, figures.metrics.get("auc", 0.5)) for figures in record.batches]
    validation = [(one["position"], one["metrics"]["auc"]) for one in record.validations]
    lines = [
        Line("progressive", "var(--train)", *_where_known(progressive)),
        Line("validation", "var(--push)", *_where_known(validation), dots=True),
    ]
    if record.best:
        ends = [rows[0], max(rows[-1], rows[0] + 1)]
        lines.append(Line("best possible", "var(--quiet)", ends, [record.best["auc"]] * 2))
    chart = line_chart(lines, x_label="rows of the data", y_format=lambda value: f"{value:.3f}")
    return _chart_card("AUC", "progressive: every step is predicted before it is trained on", lines, chart)


def _where_known(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """The points' x and y, without those that have no y: examples of one label only have no AUC."""
    known = [(x, y) for x, y in points if not math.isnan(y)]
    return [x for x, _ in known], [y for _, y in known]


def _rate(batches: list[BatchFigures], rows: list[int]) -> str:
    lines = [Line("examples/s", "var(--train)", rows, [figures.examples_per_second for figures in batches])]
    chart = line_chart(lines, x_label="rows of the data", low=0)
    return _chart_card("Examples per second", "mean over the last four batches", lines, chart)


def _hits(batches: list[BatchFigures], numbers: list[int]) -> str:
    lines = [
        Line(NAMES[tier], f"var(--{tier})", numbers, [figures.rates[tier] for figures in batches])
        for tier in ("memory", "disk", "new")
    ]
    hbm = hit_rates({name: sum(f.counts.get(name, 0) for f in batches) for name in ("keys", "distinct_keys")})["hbm"]
    words = f"where a batch's rows came from; {percent(hbm)} of all occurrences found theirs on the devices already"
    chart = stacked_chart(lines, x_label="batch", y_format=percent, kind="percent")
    return _chart_card("Hit rates", words, lines, chart)


def _stage_seconds(batches: list[BatchFigures], numbers: list[int]) -> str:
    lines = [
        Line(stage, f"var(--{stage})", numbers, [figures.stage_seconds.get(stage, 0.0) for figures in batches])
        for stage in STAGES
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
    count = len(record.batches)
    first = max(0, (count - TIMELINE_BATCHES) // 2)
    shown = record.batches[first : first + TIMELINE_BATCHES]
    spans = [(figures.batch, *span) for figures in shown for span in figures.stages]
    nodes = sorted({node for _, node, *_ in spans})
    rows = [_row(node, stage, len(nodes)) for node in nodes for stage in STAGES]
    start, stop = min(span[3] for span in spans), max(span[4] for span in spans)
    bars = []
    for batch, node, stage, begin, end, waited in spans:
        title = f"{stage} of batch {batch}: {end - begin:.3f} s" + (f", {waited:.3f} s of it waiting" if waited else "")
        row, color = _row(node, stage, len(nodes)), f"var(--{stage})"
        # Stages wait before they work, so the faint part comes first.
        if waited > 0.002:
            bars.append(Bar(row, color, begin, begin + waited, title, faint=True))
        bars.append(Bar(row, color, begin + waited, end, title))
    words = f"batches {shown[0].batch} to {shown[-1].batch}" + (
        f" of {count}, from the middle" if len(shown) < count else ""
    )
    return (
        f'<h2>Stages</h2><div class="card"><h3>Timeline</h3><p>{html.escape(words)}; faint: waiting for rows of an '
        f'earlier batch. Point at a bar for its figures.</p><div class="scroll">'
        f"{timeline(rows, bars, start=start, stop=stop)}</div></div>{_stage_table(record)}"
    )


def _row(node: int, stage: str, nodes: int) -> str:
    return stage if nodes == 1 else f"{node} {stage}"


def _stage_table(record: Record) -> str:
    total = max(record.training_seconds, 1e-9)
    lines = []
    for stage in STAGES:
        busy = sum(figures.stage_seconds.get(stage, 0.0) for figures in record.batches)
        waited = sum(figures.waited_seconds.get(stage, 0.0) for figures in record.batches)
        share = min(busy / total, 1.0)
        meter = f'<div class="meter"><i style="width:{100 * share:.1f}%;background:var(--{stage})"></i></div>'
        lines.append(
            f'<tr><td><i class="key" style="background:var(--{stage})"></i>{stage}</td><td class="n">{busy:.2f}</td>'
            f'<td class="n">{waited:.2f}</td><td class="n">{busy / len(record.batches):.3f}</td>'
            f'<td class="n">{percent(share)}</td><td>{meter}</td></tr>'
        )
    head = (
        '<tr><th>stage</th><th class="n">working, s</th><th class="n">waiting, s</th><th class="n">s a batch</th>'
        '<th class="n">busy</th><th></th></tr>'
    )
    return f'<div class="card scroll" style="margin-top:14px"><table>{head}{"".join(lines)}</table></div>'


# -- tiers, validations, settings ------------------------------------------------------------------------------------


def _tiers(record: Record) -> str:
    counts, levels, budget = record.counts, record.batches[-1].levels, record.settings["budget"]
    rates = hit_rates(counts)
    served = {
        "hbm": f"{percent(rates['hbm'])} of {counts.get('keys', 0):,.0f} occurrences",
        "memory": f"{percent(rates['memory'])} of {_pulled(counts):,.0f} rows pulled",
        "disk": f"{percent(rates['disk'])} of {_pulled(counts):,.0f} rows pulled",
    }
    peak = {tier: max(f.levels.get(f"{tier}_bytes", 0.0) for f in record.batches) for tier in served}
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
        '<tr><th>tier</th><th>served</th><th class="n">rows at the end</th><th class="n">most rows, bytes</th>'
        '<th class="n">budget</th></tr>'
    )
    return f'<h2>Tiers</h2><div class="card scroll"><table>{head}{"".join(lines)}</table></div>{_counters(record)}'


def _pulled(counts: dict[str, float]) -> float:
    return sum(counts.get(name, 0) for name in ("hits", "misses", "new_keys"))


def _counters(record: Record) -> str:
    counts, levels = record.counts, record.batches[-1].levels
    facts = [
        ("rows that were late (an earlier batch still had them)", f"{counts.get('late', 0):,.0f}"),
        ("rows moved from LRU to LFU", f"{counts.get('lru_victims', 0):,.0f}"),
        ("rows that left memory", f"{counts.get('lfu_victims', 0):,.0f}"),
        ("of them written to disk", f"{counts.get('written_back', 0):,.0f}"),
        ("bytes read from disk for misses", size(counts.get("bytes_read", 0))),
        ("bytes written back to disk", size(counts.get("bytes_written", 0))),
        ("batches that waited for room beside pinned rows", f"{counts.get('waits', 0):,.0f}"),
    ]
    names = {
        "files": "parameter files",
        "disk_rows": "live rows on disk",
        "stale_rows": "stale rows on disk",
        "compactions": "parameter files compacted",
        "compacted_rows": "rows moved by compaction",
    }
    facts += [(words, f"{levels[name]:,.0f}") for name, words in names.items() if name in levels]
    lines = "".join(f'<tr><td>{html.escape(words)}</td><td class="n">{value}</td></tr>' for words, value in facts)
    return f'<div class="card scroll" style="margin-top:14px"><table>{lines}</table></div>'


def _validations(record: Record) -> str:
    names = list(record.validations[-1]["metrics"])
    head = "".join(f'<th class="n">{html.escape(name.replace("_", " "))}</th>' for name in names)
    lines = "".join(
        f'<tr><td class="n">{item["batch"]:,}</td><td class="n">{item["position"]:,}</td>'
        + "".join(f'<td class="n">{item["metrics"][name]:,.5g}</td>' for name in names)
        + "</tr>"
        for item in record.validations
    )
    return (
        '<h2>Validation</h2><div class="card scroll"><table><tr><th class="n">batch</th><th class="n">rows trained</th>'
        f"{head}</tr>{lines}</table></div>"
    )


def _settings(record: Record) -> str:
    return f"<h2>Settings</h2><pre>{html.escape(settings_text(record.settings))}</pre>"
