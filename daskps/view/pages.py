"""The live pages in Dask's own dashboard: /daskps with all plots, and /individual-daskps-... with one each.

In: a `Collector`, on the scheduler. Out: Bokeh documents that are drawn again twice a second.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bokeh.layouts import column, gridplot
from bokeh.models import ColumnDataSource, Div, Legend, LegendItem, NumeralTickFormatter
from bokeh.plotting import figure
from distributed import Scheduler
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from tornado.ioloop import IOLoop

from daskps.view.figures import STAGES
from daskps.view.words import duration, percent, size

if TYPE_CHECKING:
    from daskps.view.collector import Collector

INTERVAL_MILLISECONDS = 500
# The colours of the report (report.css).
COLORS = {
    "read": "#56b4e9",
    "dedup": "#12a37a",
    "pull": "#e69f00",
    "load": "#cc79a7",
    "train": "#0f6cbd",
    "push": "#d55e00",
    "hbm": "#7b5bd6",
    "memory": "#0f8f8c",
    "disk": "#e69f00",
    "new": "#8a94a3",
    "auc": "#0f6cbd",
    "rate": "#0f6cbd",
}
NAMES = {"hbm": "HBM", "disk": "SSD", "rate": "examples/s", "auc": "progressive"}


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot: a title, its lines, how numbers are written, and where a line's value is in a batch's event."""

    title: str
    lines: tuple[str, ...]
    format: str
    value: Callable[[dict[str, Any], dict[str, int], str], float]  # event, tasks under way, line
    from_zero: bool = True


PLOTS = {
    "rate": Plot("Examples per second", ("rate",), "0.[0]a", lambda batch, _, line: batch["examples_per_second"]),
    "auc": Plot("AUC", ("auc",), "0.000", lambda batch, _, line: batch["metrics"].get("auc", 0.5), from_zero=False),
    "hits": Plot("Hit rates", ("hbm", "memory", "disk", "new"), "0%", lambda batch, _, line: batch["rates"][line]),
    "bytes": Plot(
        "Bytes in each tier",
        ("hbm", "memory", "disk"),
        "0.[0] b",
        lambda batch, _, line: batch["levels"].get(f"{line}_bytes", 0),
    ),
    "stages": Plot(
        "Seconds of each stage, a batch", STAGES, "0.[00]", lambda batch, _, line: batch["stage_seconds"].get(line, 0.0)
    ),
    "queues": Plot("Batches at or before each stage", STAGES, "0.[0]", lambda batch, tasks, line: tasks[line]),
}


class RunPage:
    """The plots of one document."""

    def __init__(self, collector: Collector, names: Sequence[str]) -> None:
        self._collector, self._names = collector, names
        lines = {f"{name} {line}" for name in names for line in PLOTS[name].lines}
        self._source = ColumnDataSource({column: [] for column in ["batch", *sorted(lines)]})
        self._words = Div(text="", sizing_mode="stretch_width")
        alone = len(names) == 1
        figures = [self._figure(name, alone) for name in names]
        grid = figures[0] if alone else gridplot(figures, ncols=2, sizing_mode="stretch_width", toolbar_location=None)
        self.root = grid if alone else column(self._words, grid, sizing_mode="stretch_width")

    def _figure(self, name: str, alone: bool) -> Any:
        plot = PLOTS[name]
        made = figure(
            title=plot.title,
            height=300 if alone else 250,
            sizing_mode="stretch_both" if alone else "stretch_width",
            tools="",
            x_axis_label="batch",
            name=f"daskps-{name}",
        )
        items = []
        for line in plot.lines:
            drawn = made.line("batch", f"{name} {line}", source=self._source, color=COLORS[line], line_width=2)
            items.append(LegendItem(label=NAMES.get(line, line), renderers=[drawn]))
        if len(items) > 1:
            look = {"padding": 0, "margin": 2, "border_line_alpha": 0, "background_fill_alpha": 0}
            made.add_layout(Legend(items=items, orientation="horizontal", location="top_left", **look), "above")
        made.yaxis.formatter = NumeralTickFormatter(format=plot.format)
        if plot.from_zero:
            made.y_range.start = 0
        return made

    def update(self) -> None:
        """Take over what was collected since."""
        collector = self._collector
        batches, depths = list(collector.batches), list(collector.depths)
        data: dict[str, list[float]] = {"batch": [batch["batch"] for batch in batches]}
        for name in self._names:
            plot = PLOTS[name]
            for line in plot.lines:
                pairs = zip(batches, depths, strict=True)
                data[f"{name} {line}"] = [plot.value(batch, tasks, line) for batch, tasks in pairs]
        self._source.data = data
        self._words.text = words(collector)


def words(collector: Collector) -> str:
    """The run in one line."""
    if not collector.batches:
        state = "no run yet" if not collector.job else f"{collector.job}: {collector.state}"
        return f"<h2>{html.escape(state)}</h2>"
    batch = collector.batches[-1]
    done = percent(batch["position"] / max(batch["stop_position"], 1))
    parts = [
        f"batch {batch['batch']}",
        f"{done} of {batch['stop_position']:,} rows",
        f"{batch['examples_per_second']:,.0f} examples/s",
        f"AUC {batch['metrics'].get('auc', float('nan')):.4f}",
        f"memory {size(batch['levels'].get('memory_bytes', 0))}",
        f"SSD {size(batch['levels'].get('disk_bytes', 0))}",
    ]
    if collector.state == "running":
        parts.append(f"{duration(batch['seconds_left'])} left")
    heading = html.escape(f"{collector.job}: {collector.state}")
    return f'<h2 style="margin:8px 0 0">{heading}</h2><p id="daskps-words">{" · ".join(parts)}</p>'


def _document(collector: Collector, names: Sequence[str], _: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    page = RunPage(collector, names)
    page.update()
    doc.title = "daskps"
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME
    add_periodic_callback(doc, page, INTERVAL_MILLISECONDS)


def add_pages(scheduler: Scheduler, collector: Collector) -> None:
    """Serve the pages from the scheduler's own web server, and name them in its navigation bar."""
    documents = {"/daskps": partial(_document, collector, tuple(PLOTS))}
    documents |= {f"/individual-daskps-{name}": partial(_document, collector, (name,)) for name in PLOTS}
    variables = template_variables(scheduler)
    if "daskps" not in variables["pages"]:
        variables["pages"].append("daskps")  # the list that all of Dask's own pages show
        variables["plots"] += [
            {"url": f"individual-daskps-{name}", "name": f"daskps: {plot.title}"} for name, plot in PLOTS.items()
        ]
    # Dask keeps the prefix of its pages only in the application that serves them.
    prefix = next((app.prefix for app in scheduler.http_application.applications if hasattr(app, "prefix")), "")
    application = BokehApplication(documents, scheduler, prefix=prefix, template_variables=variables)
    scheduler.http_application.add_application(application)
    application.initialize(IOLoop.current())
    application.start()
