"""Live figures of a run on the Dask scheduler, where every user of the cluster can see them.

Input: figures of batches, sent by the driver (`Live`). Output: Dask events with the topic `TOPIC`; a `Collector`, a
scheduler plugin that keeps them; pages in Dask's own dashboard: /daskps with all plots, and /individual-daskps-... with
one plot each. No other module of this folder imports Dask.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from distributed import Client, Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from daskps.config import Job
from daskps.errors import BackendError
from daskps.reports import POINTS, Thinned
from daskps.types import Stage
from daskps.view.figures import BatchFigures

TOPIC = "daskps"  # of Dask events


class Live:
    """Sender of a run's events to the scheduler of `client`."""

    def __init__(self, client: Client, job: Job) -> None:
        self._client, self._job = client, job
        client.log_event(TOPIC, {"event": "start", "job": job.name, "out": job.out})

    def show(self, figures: BatchFigures) -> None:
        """Send the figures of a finished batch."""
        self._client.log_event(TOPIC, {"event": "batch", "job": self._job.name, **figures.plain()})

    def show_history(self, figures: Iterable[BatchFigures]) -> None:
        """Send the batches before this incarnation, thinned. They replace all batches that were sent before."""
        batches = [{"event": "batch", "job": self._job.name, **one.plain()} for one in figures]
        self._client.log_event(TOPIC, {"event": "history", "job": self._job.name, "batches": batches})

    def end(self, ending: str) -> None:
        """Send that the run is over."""
        self._client.log_event(TOPIC, {"event": "end", "job": self._job.name, "ending": ending})


NAME = "daskps-collector"  # of the scheduler plugin
INTERVAL_MILLISECONDS = 500  # between updates of a page
ACTIVE = frozenset({"waiting", "no-worker", "queued", "processing"})  # Dask's states of a task that is not done
STAGE_OF = {f"daskps-{stage}": stage for stage in Stage}  # by the first part of a task's key


class Collector(SchedulerPlugin):
    """Scheduler plugin that keeps the figures of the last run. One per scheduler; registering it twice is harmless."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.job = ""
        self.state = "no run yet"
        # Events of batches, evenly spread over the whole last run. Each has the number of active tasks when it ended.
        self.batches: Thinned[dict[str, Any]] = Thinned(POINTS)
        self.tasks = dict.fromkeys(Stage, 0)  # tasks of each stage that wait or run now
        self.totals: dict[str, float] = {}  # counters for Prometheus, since the scheduler started
        self._metrics: Any = None

    async def start(self, scheduler: Scheduler) -> None:
        """Add the pages and the metrics to the scheduler's own web server, where Bokeh and prometheus_client exist."""
        if importlib.util.find_spec("bokeh") is not None and "dashboard" in scheduler.services:
            add_pages(scheduler, self)
        if importlib.util.find_spec("prometheus_client") is not None:
            from daskps.view.prometheus import RunMetrics

            self._metrics = RunMetrics(self)
            self._metrics.register()

    async def close(self) -> None:
        """Remove the metrics when the scheduler closes."""
        if self._metrics is not None:
            self._metrics.unregister()

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Update the number of active tasks when a task changes its state."""
        stage = STAGE_OF.get(key[0]) if isinstance(key, tuple) else None
        if stage is not None:
            self.tasks[stage] += (finish in ACTIVE) - (start in ACTIVE)

    def log_event(self, topic: str, msg: Any) -> None:
        """Keep an event that a run has sent."""
        if topic != TOPIC:
            return
        self.job = msg["job"]
        if msg["event"] == "start":
            self.state = "running"
            self.batches.clear()
        elif msg["event"] == "history":
            self.batches.clear()
            for batch in msg["batches"]:
                self.batches.append(batch | {"tasks": dict.fromkeys(Stage, 0)})
        elif msg["event"] == "end":
            self.state = msg["ending"]
        elif msg["event"] == "batch":
            self.batches.append(msg | {"tasks": dict(self.tasks)})
            self._count(msg)

    def _count(self, batch: dict[str, Any]) -> None:
        more = {
            "examples": batch["examples"],
            "batches": 1,
            "disk_read_bytes": batch["counts"].get("bytes_read", 0),
            "disk_written_bytes": batch["counts"].get("bytes_written", 0),
        }
        more |= {f"seconds {stage}": seconds for stage, seconds in batch["stage_seconds"].items()}
        more |= {f"waited {stage}": seconds for stage, seconds in batch["waited_seconds"].items()}
        for name, value in more.items():
            self.totals[name] = self.totals.get(name, 0) + value


def add_pages(scheduler: Scheduler, collector: Collector) -> None:
    """Serve the pages from the scheduler's own web server and add them to its navigation bar. This needs Bokeh."""
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables
    from tornado.ioloop import IOLoop

    from daskps.view.pages import PLOTS

    documents = {"/daskps": partial(_fill_document, collector, tuple(PLOTS))}
    documents |= {f"/individual-daskps-{name}": partial(_fill_document, collector, (name,)) for name in PLOTS}
    variables = template_variables(scheduler)
    if "daskps" not in variables["pages"]:
        variables["pages"].append("daskps")  # this list is shared by all of Dask's own pages
        variables["plots"] += [
            {"url": f"individual-daskps-{name}", "name": f"daskps: {plot.title}"} for name, plot in PLOTS.items()
        ]
    # Dask stores the URL prefix of its pages only in the application that serves them.
    prefix = next((app.prefix for app in scheduler.http_application.applications if hasattr(app, "prefix")), "")
    application = BokehApplication(documents, scheduler, prefix=prefix, template_variables=variables)
    scheduler.http_application.add_application(application)
    application.initialize(IOLoop.current())
    application.start()


def _fill_document(collector: Collector, plots: Sequence[str], _: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Put the plots into a new Bokeh document and update them from now on."""
    from distributed.dashboard.components import add_periodic_callback
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env

    from daskps.view.pages import RunPage

    page = RunPage(collector, plots)
    page.update()
    doc.title = "daskps"
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME
    add_periodic_callback(doc, page, INTERVAL_MILLISECONDS)


def collect_on(client: Client) -> None:
    """Register a `Collector` on the scheduler of `client`, if there is none yet."""
    try:
        client.register_plugin(Collector())
    except ImportError as error:
        raise BackendError(
            f"Dask's scheduler cannot import this daskps: {error!r}; install this version of it where it runs, too"
        ) from None
