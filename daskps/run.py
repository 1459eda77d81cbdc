"""Train a job and be seen doing it: the log, the live pages and the report around the dataflow.

In: a `Job` (or its settings), optionally a Dask client. Out: an `Outcome`; model and report are in the job's directory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import nan
from typing import Any

from distributed import Client

from daskps.backend.device import chosen_backend
from daskps.backend.pool import ComputePool
from daskps.config import Job, make_job
from daskps.flow.embedded import client_for
from daskps.flow.inputs import synthetic
from daskps.flow.progress import Outcome, Progress
from daskps.flow.room import check_memory
from daskps.flow.train import train as train_flow
from daskps.version import __version__
from daskps.view.collector import collect_on
from daskps.view.figures import BatchFigures, batch_figures
from daskps.view.live import Live
from daskps.view.log import log_batch, log_event
from daskps.view.record import Record
from daskps.view.report import write_report

RATE_BATCHES = 4  # rates are means over so many: batches end unevenly


class Watch:
    """Turns progress into figures, once, and hands them on to everybody who shows them."""

    def __init__(self, job: Job, on_figures: Callable[[BatchFigures], None]) -> None:
        self.record = Record(job.model_dump(mode="json"), __version__)
        self._on_figures = on_figures
        self._last = (-1, 0)  # epoch and batch that were shown
        self._recent: deque[tuple[float, int]] = deque(maxlen=RATE_BATCHES)  # end and examples of each
        self._snapshot: str | None = None

    def __call__(self, progress: Progress) -> None:
        """Something has happened: a batch, a validation or a snapshot."""
        record = self.record
        if progress.reports:
            token = progress.reports[-1].token
            if (token.epoch, token.batch) != self._last:
                if not record.batches:
                    self._recent.append((min(stage.started for stage in progress.reports[0].stages), 0))
                    record.run, record.first_position = token.run, progress.position - progress.examples
                figures = batch_figures(progress, tuple(self._recent))
                self._last = (token.epoch, token.batch)
                self._recent.append((figures.ended, figures.examples))
                record.batches.append(figures)
                log_batch(figures)
                self._on_figures(figures)
        for validation in progress.validations[len(record.validations) :]:
            values = {"batch": validation.batch, "position": validation.position, "metrics": validation.metrics}
            record.validations.append(values)
            shown = {"AUC": validation.metrics.get("auc", nan), "log loss": validation.metrics.get("log_loss", nan)}
            words = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
            log_event("validation", f"validation after batch {validation.batch}: {words}", **values)
        if progress.snapshot != self._snapshot:
            self._snapshot = record.snapshot = progress.snapshot
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
    worker_seconds: float = 0.0,
) -> Outcome:
    """Train `job` to its end, from its last snapshot if its directory has one.

    `client` is a Dask client or a scheduler's address; without one, a cluster of `cluster.nodes` nodes is made on this
    machine and closed again, with a dashboard if `dashboard_address` names one. `on_progress` is called after every
    batch; when `should_stop` says so, the run ends at a batch boundary with a snapshot. A report in HTML is written
    into the model directory unless `report` is false or nothing was left to train. `frame` is the Dask
    DataFrame of a job whose format is frame. `worker_seconds` is how long to wait for enough workers at the start.

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
    if client is None:
        check_memory(job, on_cpu=chosen_backend(job.cluster.backend) == "cpu", nodes_here=job.cluster.nodes)
    with client_for(job.cluster.nodes, client, dashboard_address) as connected:
        collect_on(connected)
        live = Live(connected, job)
        watch = Watch(job, live.show)

        def tell(progress: Progress) -> None:
            watch(progress)
            if on_progress is not None:
                on_progress(progress)

        log_event("start", f"training {job.name} into {job.out}", job=job.name, out=job.out)
        try:
            outcome = train_flow(
                job,
                client=connected,
                on_progress=tell,
                should_stop=should_stop,
                frame=frame,
                worker_seconds=worker_seconds,
            )
        except BaseException as error:
            live.end(f"failed: {type(error).__name__}")
            raise
        record = watch.record
        record.ending = _ending(outcome.progress)
        live.end(record.ending)
    record.ended = time.time()
    record.best = _best(job) if record.validations else {}
    path = write_report(record, outcome.directory) if report and record.batches else None
    for reason, (count, place) in outcome.progress.bad_rows.items():
        log_event(
            "bad_rows", f"{count:,} rows skipped: {reason}, as in {place}", reason=reason, rows=count, place=place
        )
    log_event("end", f"{record.ending}: {job.out}, snapshot {outcome.snapshot}", ending=record.ending, report=path)
    return replace(outcome, report=path)


def _ending(progress: Progress) -> str:
    if progress.stopped_early:
        return "stopped early"
    return "finished" if progress.position >= progress.stop_position else "stopped"


def _best(job: Job) -> dict[str, float]:
    """AUC and log loss of the true probabilities on the validation rows, where the data was generated from them."""
    data = job.data
    if data.synthetic is None:
        return {}
    with ComputePool(job.cluster.cores or 1) as pool:
        best = synthetic(job).best(data.synthetic.examples, data.synthetic.examples + data.validation_rows, pool)
    return {"auc": best.auc, "log_loss": best.log_loss}
