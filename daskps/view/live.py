"""A run as others on the same Dask cluster can see it: every batch becomes an event of the scheduler.

In: figures. Out: events under the topic `TOPIC`; the dashboard's pages and the Prometheus metrics read them there.
"""

from __future__ import annotations

from distributed import Client

from daskps.config import Job
from daskps.view.figures import BatchFigures

TOPIC = "daskps"


class Live:
    """Tells the scheduler of `client`."""

    def __init__(self, client: Client, job: Job) -> None:
        self._client, self._job = client, job
        client.log_event(TOPIC, {"event": "start", "job": job.name, "out": job.out})

    def show(self, figures: BatchFigures) -> None:
        """A batch has finished."""
        self._client.log_event(TOPIC, {"event": "batch", "job": self._job.name, **figures.plain()})

    def end(self, ending: str) -> None:
        """The run is over."""
        self._client.log_event(TOPIC, {"event": "end", "job": self._job.name, "ending": ending})
