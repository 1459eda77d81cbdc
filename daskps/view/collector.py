"""What the scheduler knows of a run: the events of its batches, and how many tasks of each stage are under way.

In: events under `TOPIC`, and Dask's own transitions of tasks. Out: a `Collector`, a scheduler plugin that the live
pages and the Prometheus metrics read. It registers both where their packages are installed.
"""

from __future__ import annotations

import importlib.util
from collections import deque
from typing import Any

from distributed import Client, Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from daskps.view.figures import STAGES
from daskps.view.live import TOPIC

NAME = "daskps-collector"
KEPT_BATCHES = 2000  # of the last run: what a browser can still draw
ACTIVE = frozenset({"waiting", "no-worker", "queued", "processing"})
STAGE_OF = {f"daskps-{stage}": stage for stage in STAGES}


class Collector(SchedulerPlugin):
    """One per scheduler. Registering it twice changes nothing."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.job = ""
        self.state = "no run yet"
        self.batches: deque[dict[str, Any]] = deque(maxlen=KEPT_BATCHES)
        self.depths: deque[dict[str, int]] = deque(maxlen=KEPT_BATCHES)  # tasks under way, when each batch ended
        self.tasks = dict.fromkeys(STAGES, 0)  # under way now: waiting or running
        self.totals: dict[str, float] = {}  # since the scheduler began: counters for Prometheus
        self._metrics: Any = None

    async def start(self, scheduler: Scheduler) -> None:
        """Add the pages and the metrics to the scheduler's own server."""
        if importlib.util.find_spec("bokeh") is not None and "dashboard" in scheduler.services:
            from daskps.view.pages import add_pages

            add_pages(scheduler, self)
        if importlib.util.find_spec("prometheus_client") is not None:
            from daskps.view.prometheus import RunMetrics

            self._metrics = RunMetrics(self)
            self._metrics.register()

    async def close(self) -> None:
        """The scheduler is closing."""
        if self._metrics is not None:
            self._metrics.unregister()

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """A task has changed its state."""
        stage = STAGE_OF.get(key[0]) if isinstance(key, tuple) else None
        if stage is not None:
            self.tasks[stage] += (finish in ACTIVE) - (start in ACTIVE)

    def log_event(self, topic: str, msg: Any) -> None:
        """A run has told something."""
        if topic != TOPIC:
            return
        self.job = msg["job"]
        if msg["event"] == "start":
            self.state = "running"
            self.batches.clear()
            self.depths.clear()
        elif msg["event"] == "end":
            self.state = msg["ending"]
        elif msg["event"] == "batch":
            self.batches.append(msg)
            self.depths.append(dict(self.tasks))
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


def collect_on(client: Client) -> None:
    """Have the scheduler of `client` collect, if it does not yet."""
    client.register_plugin(Collector())
