"""Train a job: on the cluster that needs no set-up, or on any Dask client.

In: a `Job` (or its settings). Out: an `Outcome`; the model is in the job's directory.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Client

from daskps.cluster.plugin import NannyMemoryPlugin, NodePlugin
from daskps.config import Job, make_job
from daskps.errors import BackendError
from daskps.flow.driver import Driver
from daskps.flow.embedded import client_for
from daskps.flow.progress import Outcome, Progress
from daskps.flow.tasks import LOST, present

logger = logging.getLogger("daskps.flow")

PAUSE_SECONDS = 1.0  # before going back to the last snapshot, doubled each time: a lost worker may still be listed


def _nothing(progress: Progress) -> None:
    """Tell nobody."""


def train(
    job: Job | Mapping[str, Any],
    *,
    client: Client | str | None = None,
    on_progress: Callable[[Progress], None] = _nothing,
    should_stop: Callable[[], bool] = lambda: False,
    frame: Any = None,
) -> Outcome:
    """Train `job` to its end, from its last snapshot if its directory has one.

    `client` is a Dask client or a scheduler's address; without one, an in-process cluster of `cluster.nodes` nodes is
    made and closed again. `on_progress` is called after every batch; when `should_stop` says so, the run ends at a
    batch boundary with a snapshot. When a worker is lost, the run goes back to its last snapshot by itself, at most
    `cluster.restarts` times. `frame` is the Dask DataFrame of a job whose data format is frame.
    """
    job = job if isinstance(job, Job) else make_job(dict(job))
    with client_for(job.cluster.nodes, client) as connected:
        connected.register_plugin(NodePlugin())
        connected.register_plugin(NannyMemoryPlugin())
        run, driver = uuid.uuid4().hex[:12], None
        while True:
            workers = wait_for_workers(connected, job.cluster.nodes, job.cluster.wait_seconds if driver else 0)
            driver = Driver(
                connected,
                workers,
                job,
                run,
                on_progress=on_progress,
                should_stop=should_stop,
                frame=frame,
                before=driver,
            )
            try:
                return driver.run()
            except LOST as error:
                if driver.progress.restarts == job.cluster.restarts or not driver.epoch:
                    raise
                driver.progress.restarts += 1
                logger.warning("%s; going back to snapshot %s", error, driver.progress.snapshot)
                time.sleep(PAUSE_SECONDS * 2 ** (driver.progress.restarts - 1))


def wait_for_workers(client: Client, nodes: int, seconds: float) -> list[str]:
    """Workers for so many nodes, when they are there; by rank."""
    until = time.monotonic() + seconds
    while len(workers := present(client)) < nodes:
        if time.monotonic() >= until:
            raise BackendError(f"the job wants {nodes} nodes, the cluster has {len(workers)} workers")
        time.sleep(0.1)
    return workers[:nodes]
