"""Train a job: on the cluster that needs no set-up, or on any Dask client.

In: a `Job` (or its settings). Out: an `Outcome`; the model is in the job's directory.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Client

from daskps.config import Job, make_job
from daskps.flow.driver import drive
from daskps.flow.embedded import client_for
from daskps.flow.progress import Outcome, Progress
from daskps.flow.workers import Workers, run_blocking


def _nothing(progress: Progress) -> None:
    """Tell nobody."""


def train(
    job: Job | Mapping[str, Any],
    *,
    client: Client | str | None = None,
    on_progress: Callable[[Progress], None] = _nothing,
    should_stop: Callable[[], bool] = lambda: False,
    frame: Any = None,
    worker_seconds: float = 0.0,
) -> Outcome:
    """Train `job` to its end, from its last snapshot if its directory has one.

    `client` is a Dask client or a scheduler's address; without one, an in-process cluster of `cluster.nodes` nodes is
    made and closed again. `on_progress` is called after every batch; when `should_stop` says so, the run ends at a
    batch boundary with a snapshot. When a worker is lost, the run goes back to its last snapshot by itself, at most
    `cluster.restarts` times. `frame` is the Dask DataFrame of a job whose data format is frame.
    `worker_seconds` is how long to wait for enough workers at the start.
    """
    job = job if isinstance(job, Job) else make_job(dict(job))
    with client_for(job.cluster.nodes, client) as connected:
        return run_blocking(
            drive(
                Workers(connected, job.cluster.wait_seconds),
                job,
                uuid.uuid4().hex[:12],
                on_progress=on_progress,
                should_stop=should_stop,
                frame=frame,
                seconds=worker_seconds,
            )
        )
