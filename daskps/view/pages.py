"""The plots of the live pages. `view.dask` serves them in Dask's own dashboard.

Input: a `Collector` on the scheduler. Output: `RunPage`, the content of a Bokeh document.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bokeh.layouts import column, gridplot
from bokeh.models import ColumnDataSource, Div, Legend, LegendItem, NumeralTickFormatter
from bokeh.plotting import figure

from daskps.types import Stage
from daskps.view.words import duration, percent, size

if TYPE_CHECKING:
    from daskps.view.dask import Collector

# The colours of stages, tiers and metrics, as in the report (report.css).
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
# Legend labels of lines that are not shown by their own name.
NAMES = {"hbm": "HBM", "disk": "SSD", "rate": "examples/s", "auc": "before training, per pass"}


@dataclass(frozen=True, slots=True)
class Plot:
    """Description of one plot."""

    title: str
    lines: tuple[str, ...]  # names of the lines
    format: str  # of numbers on the y axis, as Bokeh's NumeralTickFormatter takes it
    value: Callable[[dict[str, Any], str], float]  # value(event of a batch, name of a line)
    from_zero: bool = True  # the y axis begins at 0


STAGES = tuple(stage.value for stage in Stage)

PLOTS = {
    "rate": Plot("Examples per second", ("rate",), "0.[0]a", lambda batch, line: batch["examples_per_second"]),
    "auc": Plot("AUC", ("auc",), "0.000", lambda batch, line: batch["metrics"].get("auc", 0.5), from_zero=False),
    "hits": Plot("Hit rates", ("hbm", "memory", "disk", "new"), "0%", lambda batch, line: batch["rates"][line]),
    "bytes": Plot(
        "Bytes in each tier",
        ("hbm", "memory", "disk"),
        "0.[0] b",
        lambda batch, line: batch["levels"].get(f"{line}_bytes", 0),
    ),
    "stages": Plot(
        "Seconds of each stage, per batch", STAGES, "0.[00]", lambda batch, line: batch["stage_seconds"].get(line, 0.0)
    ),
    "queues": Plot("Batches at or before each stage", STAGES, "0.[0]", lambda batch, line: batch["tasks"][line]),
}


class RunPage:
    """The plots of one Bokeh document, with a line of text above them if there are several."""

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
        """Show the batches that the collector has now."""
        collector = self._collector
        batches = list(collector.batches)
        data: dict[str, list[float]] = {"batch": [batch["batch"] for batch in batches]}
        for name in self._names:
            plot = PLOTS[name]
            for line in plot.lines:
                data[f"{name} {line}"] = [plot.value(batch, line) for batch in batches]
        self._source.data = data
        self._words.text = words(collector)


def words(collector: Collector) -> str:
    """Return the state of the run as HTML: a heading and one line of figures."""
    if not collector.batches:
        state = "no run yet" if not collector.job else f"{collector.job}: {collector.state}"
        return f"<h2>{html.escape(state)}</h2>"
    batch = collector.batches.last
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
