"""The driver of a run: plans batches, keeps a bounded number of them in flight as Dask tasks, publishes snapshots.

In: a Dask client, workers, a job, and whom to tell of progress. Out: a trained model in its directory, an `Outcome`.
Only names of work and small counts pass through here; rows, keys and examples stay in the nodes. One piece of code runs
in the client for `train` and as a Dask task for `submit`; it always takes up the last snapshot, so it may be run again
wherever it died.

Every stage of every batch is one task per node, pinned to its worker and to the stage's executor. A stage waits for the
stage before it (same batch) and for itself (batch before), so each kind of stage goes through the batches in order.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import Client

from daskps.config import Job
from daskps.errors import DataError
from daskps.flow.begin import Begun
from daskps.flow.fitting import fitting_steps
from daskps.flow.open_node import Opened
from daskps.flow.progress import BatchReport, Outcome, Progress, Validation
from daskps.flow.sizing import Sizer
from daskps.flow.stages import run_control, run_stage
from daskps.flow.tasks import Task, Tasks, present
from daskps.types import Token


@dataclass(slots=True)
class _Flight:
    """A batch in flight, and the tasks that the driver waits for."""

    token: Token
    futures: list[Task]
    answers: list[Any] = field(default_factory=list)

    @property
    def numbered(self) -> bool:
        """Its place in the order of batches is fixed, so its rows are on their way."""
        return self.token.batch >= 0


class Driver:
    """One epoch of a run, on workers that are there. Made anew after a loss."""

    def __init__(
        self,
        client: Client,
        workers: list[str],
        job: Job,
        run: str,
        *,
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
        frame: Any = None,
        before: Driver | None = None,
    ) -> None:
        self._tasks = Tasks(client, workers, run)
        self._workers = workers
        self._job = job
        self._run = run
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._frame = frame
        self.epoch: int = before.epoch if before else 0  # 0 until one has begun
        self.progress: Progress = before.progress if before else Progress(0, 0, -1)
        self._again = before is not None
        self._done: queue.Queue[Task] = queue.Queue()
        self._last: dict[tuple[str, int], Task] = {}  # of each stage and node: keeps the order within a stage
        self._pushes: list[list[Task]] = []  # of the last batches: a pull needs the buffers of an earlier one
        self._flights: dict[int, _Flight] = {}  # by first step
        self._watched: dict[Any, int] = {}  # future key -> first step

    def run(self) -> Outcome:
        """Train from the last snapshot to the end of the data, or until asked to stop; leave a snapshot behind."""
        try:
            opened = self._open()
            while self._step < self._stop_step and not self._should_stop():
                self._segment()
                self._validate()
                if self._patience_lost():
                    self.progress.stopped_early = True
                    break
            self._snapshot_at_rest()
        finally:
            self._flights.clear()
            self._last.clear()  # what has not begun is forgotten by Dask
            self._pushes.clear()
            self._tasks.on_present(self._workers, run_control, "close", self._run, self.epoch)
        return Outcome(opened.directory, self.progress.snapshot, self.progress)

    def _open(self) -> Opened:
        """Open the model on all nodes: nobody has it open, one begins an epoch, all open it, all join."""
        path = os.fspath(self._job.out).rstrip("/")
        others = [worker for worker in present(self._tasks.client) if worker not in self._workers]
        self._tasks.on_present(others, run_control, "release", self._run, self.epoch, path, False, self._again)
        self._control("release", path, True, self._again)
        begun: Begun = self._control("begin", self._job, self._run, self.epoch, ranks=[0])[0]
        self.epoch = begun.epoch
        ranks = range(len(self._workers))
        places = [(rank, len(ranks), self._job, begun, self._frame) for rank in ranks]
        answers: list[Opened] = self._tasks.results(
            [self._task("control", rank, run_control, "open", self._run, self.epoch, *places[rank]) for rank in ranks]
        )
        if len({answer.rows for answer in answers}) > 1:
            found = {rank: answer.rows for rank, answer in enumerate(answers)}
            raise DataError(f"nodes see different data, rows by node: {found}; all need the same files")
        self._control("join", [answer.address for answer in answers])
        opened = replace(answers[0], row_capacity=min(answer.row_capacity for answer in answers))
        self._opened = opened
        self._sizer = Sizer(self._job, opened)
        self._step, self._batch = self._step_at(opened.position), opened.batch
        self._stop_step = opened.steps.count(opened.rows)
        self.progress.go_back(opened.position, opened.rows, opened.batch, opened.snapshot, opened.metrics)
        return opened

    # -- batches ---------------------------------------------------------------------------------------------------

    def _segment(self) -> None:
        """Run batches until the end of a pass, the next validation, or the wish to stop; then nothing is in flight."""
        stop_step = self._pass_end(self._step)
        units = self._job.train.validate_every_batches or self._stop_step
        while True:
            while len(self._flights) < self._job.train.depth and self._step < stop_step and units:
                if self._should_stop():
                    units = 0
                    break
                stop = min(self._step + self._sizer.steps(), stop_step)
                self._start(Token(self._run, self._opened.epoch, -1, self._step, stop), read=True)
                self._step, units = stop, units - 1
            if not self._flights:
                return
            self._take(self._tasks.next(self._done))

    def _take(self, future: Task) -> None:
        """A watched task has ended: when it was the batch's last, go on with the batch."""
        flight = self._flights[self._watched.pop(future.key)]
        waited_for = [task for other in self._flights.values() for task in other.futures]
        flight.answers.append(self._tasks.result(future, waited_for))  # raises what the stage raised
        if len(flight.answers) == len(self._workers) and flight.numbered:
            self._finish(flight)
        # Batches get their numbers in the order of their steps, so a cut batch holds up those after it.
        while self._flights:
            unnumbered = [flight for _, flight in sorted(self._flights.items()) if not flight.numbered]
            if not unnumbered or len(unnumbered[0].answers) < len(self._workers):
                return
            self._number(unnumbered[0])

    def _start(self, token: Token, *, read: bool) -> None:
        before = self._stage("read", token) if read else []
        self._watch(token, self._stage("dedup", token, before))

    def _number(self, flight: _Flight) -> None:
        """All nodes know the batch's distinct keys: cut it where the tightest node must, or send for its rows."""
        token = flight.token
        fitting = fitting_steps(token.stop_step - token.first_step, flight.answers)
        if fitting < token.stop_step - token.first_step:
            del self._flights[token.first_step]
            for first in range(token.first_step, token.stop_step, fitting):
                self._start(
                    replace(token, first_step=first, stop_step=min(first + fitting, token.stop_step)), read=False
                )
            self._sizer.cut(fitting)
            return
        self._batch += 1
        every = self._job.train.snapshot_every_batches
        snapshot = self._name(self._batch) if every and (self._batch + 1) % every == 0 else ""
        token = replace(token, batch=self._batch, snapshot=snapshot)
        depth = self._job.train.depth
        earlier = self._pushes[-depth] if len(self._pushes) >= depth else []
        futures = earlier
        for stage in ("pull", "load", "train", "push"):
            futures = self._stage(stage, token, futures)
        self._pushes = [*self._pushes[-depth:], futures]
        self._watch(token, futures)

    def _finish(self, flight: _Flight) -> None:
        """All nodes have pushed the batch."""
        reports: list[BatchReport] = sorted(flight.answers, key=lambda report: report.rank)
        token = flight.token
        del self._flights[token.first_step]
        if token.snapshot:
            self._publish(token.snapshot, token.batch, token.stop_step, [report.receipts for report in reports])
        self._sizer.learn(reports)
        self.progress.finish(token, reports, self._position(token.stop_step))
        self._on_progress(self.progress)

    # -- steps and positions ---------------------------------------------------------------------------------------

    def _position(self, step: int) -> int:
        return self._opened.steps.rows(step, self._opened.rows)[0]

    def _step_at(self, position: int) -> int:
        step, rest = divmod(position, self._job.train.minibatch_examples)
        if rest and position < self._opened.rows:
            raise DataError(f"row {position}, where the snapshot ends, is not the start of a step")
        return step + bool(rest)

    def _pass_end(self, step: int) -> int:
        """The first step that starts in the next pass over the data."""
        rows = self._opened.rows // self._job.train.epochs
        passes = self._position(step) // rows + 1
        return min(self._opened.steps.count(passes * rows), self._stop_step)

    # -- at rest: nothing in flight ----------------------------------------------------------------------------------

    def _validate(self) -> None:
        if not self._opened.validation_rows:
            return
        answers = self._control("evaluate", self._batch)
        self.progress.validations.append(Validation(self._batch, self.progress.position, answers[0]))
        self._on_progress(self.progress)

    def _patience_lost(self) -> bool:
        patience = self._job.train.early_stopping_patience
        losses = [validation.metrics["log_loss"] for validation in self.progress.validations]
        return bool(patience) and len(losses) > patience and min(losses[:-patience]) <= min(losses[-patience:])

    def _snapshot_at_rest(self) -> None:
        name = self._name(self._batch)
        if self.progress.snapshot == name or self._batch == self._opened.batch:
            return  # nothing was trained since the last one
        receipts = self._control("prepare", name, self._batch)
        self._publish(name, self._batch, self._step, receipts)
        self._on_progress(self.progress)

    def _publish(self, name: str, batch: int, stop_step: int, receipts: list[dict[str, Any]]) -> None:
        """Every node has prepared: one log entry makes it the last snapshot, then the nodes confirm."""
        merged = {partition: receipt for part in receipts for partition, receipt in part.items()}
        position = self._position(stop_step)
        live = self._control("publish", name, batch, position, merged, ranks=[0])[0]
        self._control("confirm", live)
        self.progress.snapshot = name

    def _name(self, batch: int) -> str:
        return f"{self._opened.epoch:06d}-{batch:08d}"

    # -- Dask ------------------------------------------------------------------------------------------------------

    def _task(self, executor: str, rank: int, call: Callable[..., Any], *values: Any) -> Task:
        return self._tasks.submit(executor, self._workers[rank], call, *values)

    def _control(self, verb: str, *values: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """Have every node (or `ranks`) do one thing outside the stages, and wait for the answers."""
        ranks = range(len(self._workers)) if ranks is None else ranks
        return self._tasks.results(
            [self._task("control", rank, run_control, verb, self._run, self.epoch, *values) for rank in ranks]
        )

    def _stage(self, stage: str, token: Token, before: list[Task] | None = None) -> list[Task]:
        """The tasks of one stage, one per node: each after `before` and after the stage's batch before."""
        futures = []
        for rank in range(len(self._workers)):
            after = [before[rank]] if before else []
            if (stage, rank) in self._last:
                after.append(self._last[stage, rank])
            self._last[stage, rank] = future = self._task(stage, rank, run_stage, stage, token, *after)
            futures.append(future)
        return futures

    def _watch(self, token: Token, futures: list[Task]) -> None:
        self._flights[token.first_step] = _Flight(token, futures)
        for future in futures:
            self._watched[future.key] = token.first_step
            future.add_done_callback(self._done.put)
