"""Public functions `train`, `submit` and `find`: a run with its log, live pages and report.

Input: a `Job` (or its settings), optionally a Dask client. Output: an `Outcome`; model and report are in the job's
directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import nan
from typing import Any

from distributed import Client, Future, Variable, fire_and_forget, get_worker, secede

from daskps.build import synthetic
from daskps.config import Job, make_job
from daskps.device.device import chosen_backend
from daskps.device.pool import ComputePool
from daskps.driver.dask import WORKER_SECONDS, DaskBackend, client_for, event_loop, run_job, variable_names
from daskps.driver.driver import Outcome
from daskps.errors import ArgumentError, BackendError
from daskps.node.memory import check_memory
from daskps.reports import Progress
from daskps.trace import merge
from daskps.version import __version__
from daskps.view.dask import Live, collect_on
from daskps.view.figures import Record, figures_of
from daskps.view.log import log_batch, log_event
from daskps.view.report import write_report


class Watch:
    """Callback that computes figures from progress, once, for the log and the live pages. It stores none of them."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._last = (-1, 0)  # incarnation and batch that were shown last
        self._validated = -1  # the batch whose validation was shown last
        self._snapshot: str | None = None

    def __call__(self, progress: Progress) -> None:
        """Show what is new since the last call: a batch, validations, a snapshot."""
        if progress.history:
            self._live.show_history(figures_of(line) for line in progress.history)
            progress.history = ()
        if progress.reports:
            token = progress.reports[-1].token
            if (token.incarnation, token.batch) != self._last:
                figures = figures_of(progress.line, seconds_left=progress.seconds_left, snapshot=progress.snapshot)
                self._last = (token.incarnation, token.batch)
                log_batch(figures)
                self._live.show(figures)
        for validation in progress.validations:
            if validation.batch <= self._validated:
                continue
            self._validated = validation.batch
            values = {"batch": validation.batch, "position": validation.position, "metrics": validation.metrics}
            shown = {"AUC": validation.metrics.get("auc", nan), "log loss": validation.metrics.get("log_loss", nan)}
            words = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
            log_event("validation", f"validation after batch {validation.batch}: {words}", **values)
        if progress.snapshot != self._snapshot:
            self._snapshot = progress.snapshot
            log_event(
                "snapshot", f"snapshot {progress.snapshot}", snapshot=progress.snapshot, position=progress.position
            )


def train(
    job: Job | Mapping[str, Any],
    *,
    client: Client | str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    report: bool = True,
    dashboard_address: str | None = None,
    frame: Any = None,
    worker_seconds: float = WORKER_SECONDS,
    accept_changed_data: bool = False,
    resume: bool = True,
    trace: str | os.PathLike[str] | None = None,
) -> Outcome:
    """Train `job` to its end, from its last snapshot if its directory has one.

    Parameters
    ----------
    job
        A `Job`, or its settings.
    client
        A Dask client or a scheduler's address. Without one, a cluster of `cluster.nodes` nodes is created on this
        machine and closed afterwards.
    on_progress
        Called after every batch.
    should_stop
        When it returns True, the run ends at a batch boundary with a snapshot.
    report
        Write an HTML report into the model directory, unless nothing was left to train.
    dashboard_address
        Address for the dashboard of the created cluster; without it there is no dashboard.
    frame
        The Dask DataFrame of a job whose data format is frame.
    worker_seconds
        How long to wait at the start for enough workers that no other run has. A worker belongs to a run as long as the
        run's driver lives.
    accept_changed_data
        A resumed run is an error if the data before its position has changed, or how it is read (`data.label`,
        `data.weight`, `data.bad_lines`, `data.format`, contents of files). With True it goes on, and the model records
        the change.
    resume
        With False, it is an error if the job's directory has a model already, and the model is not changed.
    trace
        Write a trace of what each thread of each node does to this file, for ui.perfetto.dev or chrome://tracing.

    Examples
    --------
    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> outcome = train(
    ...     {
    ...         "out": directory,
    ...         "data": {"format": "synthetic", "synthetic": {"examples": 4096, "slots": 4, "keys_per_slot": 1000}},
    ...         "train": {"minibatch_examples": 512},
    ...         "budget": {"memory_bytes": "8MB"},
    ...     }
    ... )
    >>> outcome.progress.position, outcome.snapshot, "auc" in outcome.metrics
    (4096, '000001-00000007', True)
    """
    job = job if isinstance(job, Job) else make_job(dict(job))
    if client is not None:
        job = job.with_whole_paths()
    else:
        check_memory(job, on_cpu=chosen_backend(job.cluster.backend) == "cpu", nodes_here=job.cluster.nodes)
    with client_for(job.cluster.nodes, client, dashboard_address) as connected:
        collect_on(connected)
        live = Live(connected, job)
        watch, record = Watch(live), Record(job.model_dump(mode="json"), __version__)

        def tell(progress: Progress) -> None:
            watch(progress)
            if on_progress is not None:
                on_progress(progress)

        log_event("start", f"training {job.name} into {job.out}", job=job.name, out=job.out)
        traces = "" if trace is None else f"{job.out}/traces/{uuid.uuid4().hex[:12]}"
        traced: str | None = None
        if trace is not None:
            open(trace, "a").close()  # raise now, not after the run, if it cannot be written
        try:
            outcome = run_job(
                job,
                client=connected,
                on_progress=tell,
                should_stop=should_stop,
                frame=frame,
                worker_seconds=worker_seconds,
                accept_changed_data=accept_changed_data,
                resume=resume,
                trace=traces,
            )
        except BaseException as error:
            live.end(f"failed: {type(error).__name__}")
            raise
        finally:
            if trace is not None and os.path.isdir(traces):
                traced = _merge_traces(traces, os.fspath(trace))
        record.ending = _ending(outcome.progress)
        live.end(record.ending)
    if trace is not None and traced is None:
        traced = traces
        words = f"the nodes' traces are in {traces}, which is not visible here: merge them there (daskps.trace.merge)"
        log_event("trace", words, trace=traces)
    record.ended = time.time()
    record.run, record.snapshot, record.summary = outcome.run, outcome.snapshot, outcome.summary
    record.validations = [asdict(validation) for validation in outcome.progress.validations]
    record.warnings = outcome.progress.warnings
    record.best = _best(job) if record.validations else {}
    path = write_report(record, outcome.directory) if report and record.summary.batches else None
    for reason, (count, place) in outcome.progress.bad_rows.items():
        log_event(
            "bad_rows", f"{count:,} rows skipped: {reason}, as in {place}", reason=reason, rows=count, place=place
        )
    log_event("end", f"{record.ending}: {job.out}, snapshot {outcome.snapshot}", ending=record.ending, report=path)
    return replace(outcome, report=path, trace=traced)


def _merge_traces(folder: str, target: str) -> str:
    """Merge the nodes' traces into the file `target` and remove them; return its path."""
    spans = merge(folder, target)
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # another run may be writing its traces
        os.rmdir(os.path.dirname(folder))
    log_event("trace", f"trace with {spans:,} spans in {target}: open it in ui.perfetto.dev", trace=target)
    return target


def _ending(progress: Progress) -> str:
    if progress.stopped_early:
        return "stopped early"
    return "finished" if progress.position >= progress.stop_position else "stopped"


def _best(job: Job) -> dict[str, float]:
    """Return AUC and log loss of the true probabilities on the validation examples; empty unless data is synthetic."""
    data = job.data
    if data.synthetic is None:
        return {}
    with ComputePool(job.cluster.cores or 1) as pool:
        best = synthetic(job).best(data.synthetic.examples, data.synthetic.examples + data.validation_rows, pool)
    return {"auc": best.auc, "log_loss": best.log_loss}


LOOK_SECONDS = 0.5  # interval between checks of the stop request
FIND_SECONDS = 2.0  # timeout for reading a Dask variable


@dataclass(frozen=True, slots=True)
class Submission:
    """Handle of a run that was submitted to a cluster."""

    name: str
    client: Client

    @property
    def future(self) -> Future[Any]:
        """Dask future of the driver's task; `result` documents what it returns."""
        driver: Future[Any] = _variable(self.name, "driver", self.client).get(timeout=FIND_SECONDS)
        return driver

    def status(self) -> dict[str, Any]:
        """Return the run's name, its state and its progress.

        The state is ``waiting`` (for workers, or for its first batch), ``running``, ``stopped`` (by `stop`),
        ``finished`` or ``failed`` (`result` raises the error).
        """
        driver = self.future.status
        progress, outcome = (
            _variable(self.name, kind, self.client).get(timeout=FIND_SECONDS) for kind in ("progress", "outcome")
        )
        if driver == "pending":
            state = "waiting" if progress["batch"] < 0 else "running"
        elif driver == "finished":
            state = "stopped" if outcome["stopped"] else "finished"
        else:
            state = "failed"
        return {"name": self.name, "state": state, **progress}

    def stop(self) -> None:
        """Ask the run to end at a batch boundary, with a snapshot."""
        _variable(self.name, "stop", self.client).set(True)

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end of the run and return its result; raise the run's error if it failed.

        The result is a dictionary: the model's directory, snapshot and report; the example number at which the run
        ended (position); True if `stop` or early stopping ended it before its last example (stopped, stopped_early);
        its metrics and those of the last validation (metrics, validation); the path of its trace (trace), or None.
        """
        found: dict[str, Any] = self.future.result(timeout=timeout)
        return found


def submit(
    job: Job | Mapping[str, Any],
    client: Client,
    *,
    name: str | None = None,
    worker_seconds: float = WORKER_SECONDS,
    accept_changed_data: bool = False,
    trace: str | os.PathLike[str] | None = None,
) -> Submission:
    """Start `job` on the cluster of `client` and return at once; the run goes on when the client closes.

    The driver starts from the last snapshot like any run, so Dask can run it again if its worker is lost. It waits up
    to `worker_seconds` for enough workers that no other run has. If they do not come, the result is an error that says
    which runs have them. `trace` is a file that the driver writes the run's trace to; its worker must see the folder.

    >>> submission = submit(demo_job, client, name="tonight")
    >>> sorted(find("tonight", client).result())
    ['directory', 'metrics', 'position', 'report', 'snapshot', 'stopped', 'stopped_early', 'trace', 'validation']
    """
    job = (job if isinstance(job, Job) else make_job(dict(job))).with_whole_paths()
    name = name or job.name
    known = _names(client)
    if name in known and find(name, client).future.status == "pending":
        raise ArgumentError(f"a run named {name!r} is under way on this cluster; choose another name, or stop it")
    _variable(name, "stop", client).set(False)
    _variable(name, "begun", client).set(False)
    _variable(name, "outcome", client).set(None)
    _variable(name, "progress", client).set({"position": 0, "stop_position": 0, "batch": -1, "metrics": {}})
    # Dask runs the task again when its worker is lost. An error of the run itself is final (retries=0): another attempt
    # would take the workers, or the model, away from a run that has them by now.
    key = ("daskps-driver", name, f"{time.time_ns():x}")
    # Only settings that the job names: a resumed model supplies the others.
    settings = job.model_dump(mode="json", exclude_unset=True)
    how = (name, worker_seconds, accept_changed_data, None if trace is None else os.path.abspath(trace))
    future = client.submit(_drive, settings, *how, key=key, retries=0, **preferred_workers(client, job))
    _variable(name, "driver", client).set(future)
    fire_and_forget(future)
    return Submission(name, client)


def preferred_workers(client: Client, job: Job) -> dict[str, Any]:
    """Return the options of `Client.submit` that place the driver on workers with this version of daskps.

    The process of any other worker would end on this task, one worker after the other.
    """
    backend = DaskBackend(client, job.cluster.wait_seconds)
    present = backend.present()
    strangers = backend.strangers(present)
    if present and len(strangers) == len(present):
        named = ", ".join(f"{worker} ({why})" for worker, why in strangers.items())
        raise BackendError(f"no worker can run the driver: {named}; install this daskps on the workers")
    able = sorted(set(present) - set(strangers))
    return {"workers": able, "allow_other_workers": True} if able else {}


def find(name: str, client: Client) -> Submission:
    """Return the run that was submitted under `name`."""
    if name not in _names(client):
        known = ", ".join(_names(client)) or "none"
        raise ArgumentError(f"no run named {name!r} was submitted to this cluster; there are: {known}")
    return Submission(name, client)


def _names(client: Client) -> list[str]:
    """Return the names of all runs that were submitted."""
    drivers = [name for name in variable_names(client) if name.startswith("daskps/") and name.endswith("/driver")]
    return sorted(name.removeprefix("daskps/").removesuffix("/driver") for name in drivers)


def _variable(name: str, kind: str, client: Client) -> Variable:
    return Variable(f"daskps/{name}/{kind}", client=client)


def _drive(
    settings: dict[str, Any],
    name: str,
    worker_seconds: float,
    accept_changed_data: bool = False,
    trace: str | None = None,
) -> dict[str, Any]:
    """Run the driver as a Dask task."""
    worker = get_worker()
    secede()  # the driver waits for the stages' tasks, so it must not occupy one of the worker's threads
    # Use a client of its own, which ends with the run: the worker's client would keep reconnecting to a lost scheduler.
    address, security = worker.scheduler.address, worker.security
    with event_loop() as loop, Client(address, loop=loop, security=security, set_as_default=False) as client:
        return _drive_with(client, settings, name, worker_seconds, accept_changed_data, trace)


def _drive_with(
    client: Client,
    settings: dict[str, Any],
    name: str,
    worker_seconds: float,
    accept_changed_data: bool = False,
    trace: str | None = None,
) -> dict[str, Any]:
    """Run the driver with `client`: publish progress in Dask variables, obey `Submission.stop`, return the result."""
    stop, shown = _variable(name, "stop", client), _variable(name, "progress", client)
    told, begun = _variable(name, "outcome", client), _variable(name, "begun", client)
    looked = [time.monotonic(), False]
    if found := told.get(timeout=FIND_SECONDS):  # the run is over, but the worker with its result was lost
        return dict(found)
    job = make_job(settings)
    # If the task runs again, its own worker was lost, and too few may be left: wait longer for a new one.
    seconds = max(worker_seconds, job.cluster.wait_seconds) if begun.get(timeout=FIND_SECONDS) else worker_seconds
    begun.set(True)

    def should_stop() -> bool:
        if time.monotonic() - looked[0] > LOOK_SECONDS:
            with contextlib.suppress(TimeoutError):  # the scheduler may be slow
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

    outcome = train(
        job,
        client=client,
        on_progress=tell,
        should_stop=should_stop,
        worker_seconds=seconds,
        accept_changed_data=accept_changed_data,
        trace=trace,
    )
    progress = outcome.progress
    validations = progress.validations
    result = {
        "directory": outcome.directory,
        "snapshot": outcome.snapshot,
        "report": outcome.report,
        "trace": outcome.trace,
        "position": progress.position,
        "stopped": progress.position < progress.stop_position and not progress.stopped_early,
        "stopped_early": progress.stopped_early,
        "metrics": outcome.metrics,
        "validation": validations[-1].metrics if validations else None,
    }
    told.set(result)
    return result
