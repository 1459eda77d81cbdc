"""Leave a job with a Dask cluster: the driver runs as a task there, and anybody finds it again by name.

In: a job, a client, a name. Out: a `Submission`, which tells how far the run is, stops it, and waits for its outcome.
The driver task belongs to nobody (fire and forget), so the client may go. Progress and the wish to stop are Dask
variables under the run's name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Client, Future, Variable, fire_and_forget, get_worker, secede

from daskps.cluster.plugin import NannyMemoryPlugin, NodePlugin
from daskps.config import Job, make_job
from daskps.errors import ArgumentError
from daskps.flow.progress import Progress
from daskps.run import train

LOOK_SECONDS = 0.5  # between two looks at whether somebody wants the run to stop
FIND_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Submission:
    """A run that was left with a cluster."""

    name: str
    client: Client

    @property
    def future(self) -> Future[Any]:
        """The driver's task; its result is a dictionary with the model's directory, snapshot, report and metrics."""
        driver: Future[Any] = _variable(self.name, "driver", self.client).get(timeout=FIND_SECONDS)
        return driver

    def status(self) -> dict[str, Any]:
        """State of the driver, and how far the run is."""
        progress = _variable(self.name, "progress", self.client).get(timeout=FIND_SECONDS)
        return {"name": self.name, "state": self.future.status, **progress}

    def stop(self) -> None:
        """Ask the run to end at a batch boundary, with a snapshot."""
        _variable(self.name, "stop", self.client).set(True)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end; what the run raised is raised here."""
        found: dict[str, Any] = self.future.result(timeout=timeout)
        return found


def submit(job: Job | Mapping[str, Any], client: Client, *, name: str | None = None) -> Submission:
    """Start `job` on the cluster of `client` and return at once; the run goes on when the client closes.

    The driver takes up the last snapshot like any run, so Dask may run it again where its worker was lost.

    >>> submission = submit(demo_job, client, name="tonight")
    >>> sorted(find("tonight", client).result())
    ['directory', 'metrics', 'position', 'report', 'snapshot', 'validation']
    """
    job = job if isinstance(job, Job) else make_job(dict(job))
    name = name or job.name
    known = _names(client)
    if name in known and find(name, client).future.status == "pending":
        raise ArgumentError(f"a run named {name!r} is under way on this cluster; choose another name, or stop it")
    client.register_plugin(NodePlugin())
    client.register_plugin(NannyMemoryPlugin())
    _variable(name, "stop", client).set(False)
    _variable(name, "begun", client).set(False)
    _variable(name, "outcome", client).set(None)
    _variable(name, "progress", client).set({"position": 0, "stop_position": 0, "batch": -1, "metrics": {}})
    # Dask runs it again when its worker is lost. What the run itself raises is final: another attempt would only take
    # the workers, or the model, away from whoever has them now.
    key = ("daskps-driver", name, time.time_ns())
    future = client.submit(_drive, job.model_dump(mode="json"), name, key=key, retries=0)
    _variable(name, "driver", client).set(future)
    fire_and_forget(future)
    return Submission(name, client)


def find(name: str, client: Client) -> Submission:
    """The run that was submitted under `name`."""
    if name not in _names(client):
        known = ", ".join(_names(client)) or "none"
        raise ArgumentError(f"no run named {name!r} was submitted to this cluster; there are: {known}")
    return Submission(name, client)


def _names(client: Client) -> list[str]:
    """Of all runs that were submitted."""
    listed = client.run_on_scheduler(_variables)
    return sorted(name.removeprefix("daskps/").removesuffix("/driver") for name in listed)


def _variables(dask_scheduler: Any) -> list[str]:
    names = dask_scheduler.extensions["variables"].variables
    return [name for name in names if name.startswith("daskps/") and name.endswith("/driver")]


def _variable(name: str, kind: str, client: Client) -> Variable:
    return Variable(f"daskps/{name}/{kind}", client=client)


def _drive(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The driver's task."""
    worker = get_worker()
    secede()  # it waits for the stages' tasks, so it must not take one of the worker's threads
    # A client of its own, which ends with the run: the worker's would go on asking for a scheduler that is gone.
    with Client(worker.scheduler.address, security=worker.security, set_as_default=False) as client:
        return _drive_with(client, settings, name)


def _drive_with(client: Client, settings: dict[str, Any], name: str) -> dict[str, Any]:
    stop, shown = _variable(name, "stop", client), _variable(name, "progress", client)
    told, begun = _variable(name, "outcome", client), _variable(name, "begun", client)
    looked = [time.monotonic(), False]
    if found := told.get(timeout=FIND_SECONDS):  # Dask has lost the worker that kept the result of a run that is over
        return dict(found)
    job = make_job(settings)
    # Run again, it has lost a worker, its own, which may have been one of just enough.
    seconds = job.cluster.wait_seconds if begun.get(timeout=FIND_SECONDS) else 0.0
    begun.set(True)

    def should_stop() -> bool:
        if time.monotonic() - looked[0] > LOOK_SECONDS:
            with contextlib.suppress(TimeoutError):  # a scheduler may be slow
                looked[1] = stop.get(timeout=FIND_SECONDS)
            looked[0] = time.monotonic()
        return bool(looked[1])

    def tell(progress: Progress) -> None:
        shown.set(
            {
                "position": progress.position,
                "stop_position": progress.stop_position,
                "batch": progress.batch,
                "metrics": progress.metrics,
                "examples_per_second": progress.examples_per_second,
                "snapshot": progress.snapshot,
            }
        )

    outcome = train(job, client=client, on_progress=tell, should_stop=should_stop, worker_seconds=seconds)
    validations = outcome.progress.validations
    result = {
        "directory": outcome.directory,
        "snapshot": outcome.snapshot,
        "report": outcome.report,
        "position": outcome.progress.position,
        "metrics": outcome.metrics,
        "validation": validations[-1].metrics if validations else None,
    }
    told.set(result)
    return result
