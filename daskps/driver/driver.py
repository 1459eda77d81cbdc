"""The driver of a run: it plans batches, keeps a bounded number of them in flight as tasks, and publishes snapshots.

Input: a `ClusterBackend`, a job, a callback for progress. Output: a trained model in its directory, and an `Outcome`.
Only ids of batches and small counts pass through the driver; rows, keys and examples stay in the nodes. The same code
runs in the client for `train`, as a Dask task for `submit`, and in the simulator of the tests. It always starts from
the last snapshot, so it can be run again wherever it died.

Every stage of every batch is one task per node, pinned to its worker and to the stage's executor. A stage waits for the
stage before it (same batch) and for itself (previous batch), so each kind of stage processes the batches in order. All
of these dependencies but one are edges of Dask's graph: a train waits for its load inside the node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from daskps.build import judge_bad_examples
from daskps.config import Job, differences
from daskps.driver.sizing import Sizer, SnapshotPace
from daskps.driver.tasks import RETRYABLE, ClusterBackend, Task, Tasks, claim_workers
from daskps.errors import BackendError, CapacityError, DataError, LockedError
from daskps.node.begin import IncarnationStart, model_path
from daskps.node.memory import steps_that_fit
from daskps.node.node import NodeInfo, Publication
from daskps.node.stages import Request
from daskps.reports import (
    BatchReport,
    Progress,
    Summary,
    Validation,
    best_of,
    kept_validations,
    record_of,
    validation_line,
)
from daskps.storage.record import encode, read_record
from daskps.types import BatchId, Stage


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of `train`."""

    directory: str
    snapshot: str | None
    progress: Progress
    report: str | None = None  # path of the HTML report
    trace: str | None = None  # path of the trace; a folder, if its files could not be merged here
    run: str = ""
    summary: Summary = field(default_factory=Summary)  # of the run's record

    def batches(self) -> Iterator[dict[str, Any]]:
        """Yield the record's line of every batch of this run, in order, read from the directory (`read_record`)."""
        if self.summary.batches:
            yield from read_record(self.directory, "batch", run=self.run)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last pass; each example was predicted before the step that trained on it."""
        return self.progress.metrics


SEND_SECONDS = 1.0  # lines of the record are sent to node 0 after this time,
SEND_LINES = 32  # or when this many are unsent; a line has 3 kB with 8 nodes
MAX_UNSENT_LINES = 128  # with more unsent lines, wait for the task that is writing


class Recording:
    """Buffer of the record's lines of one incarnation that node 0 has not written yet."""

    def __init__(self, tasks: Tasks, incarnation: int) -> None:
        self._tasks, self._incarnation = tasks, incarnation
        self._lines: list[str] = []
        self._last_batch = -1
        self._task: Task | None = None
        self._sent = tasks.cluster.time()

    async def add(self, line: dict[str, Any]) -> None:
        """Add a line, and send all lines to node 0 if it is time to. Raise the error of an earlier write, if any."""
        self._lines.append(encode(line))
        if line["kind"] == "batch":
            self._last_batch = line["batch"]
        if self._task is not None and (self._task.done() or len(self._lines) >= MAX_UNSENT_LINES):
            await self._wait()
        due = self._tasks.cluster.time() - self._sent >= SEND_SECONDS
        if self._task is None and (due or len(self._lines) >= SEND_LINES):
            self._task = self._tasks.start(0, Request.RECORD, self._incarnation, *self._take())
            self._tasks.cluster.watch(self._task)

    async def rest(self) -> tuple[list[str], int]:
        """Wait until all sent lines are written; return the unsent ones, and the last batch of all lines."""
        await self._wait()
        return self._take()

    async def _wait(self) -> None:
        """Wait for the task that writes lines, if there is one."""
        if self._task is not None:
            await self._tasks.results([self._task])
            self._task = None

    def _take(self) -> tuple[list[str], int]:
        """Remove and return the unsent lines, with the last batch of all lines."""
        lines, self._lines, self._sent = self._lines, [], self._tasks.cluster.time()
        return lines, self._last_batch


logger = logging.getLogger("daskps.driver")

# Pause before going back to the last snapshot, doubled each time up to the second value: Dask may still list a lost
# worker.
PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
# After this many batches the pipeline runs empty once. Each task depends on the task of the same stage and the previous
# batch, so Dask keeps all of them until then: 44 KB per node and batch.
LINKED_BATCHES = 128


async def drive(
    cluster: ClusterBackend,
    job: Job,
    run: str,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    frame: Any = None,
    accept_changed_data: bool = False,
    resume: bool = True,
    trace: str = "",
    seconds: float = 0.0,  # to wait for workers
) -> Outcome:
    """Train `job` to its end; when a node is lost, go back to the last snapshot.

    This happens at most `cluster.restarts` times without a new snapshot. A lock can outlive the machine that held it,
    until the file system notices. So the driver waits for a lock, up to `cluster.wait_seconds`, and this does not count
    as a restart.
    """
    progress, incarnation = Progress(0, 0, -1), 0
    lost: BaseException | None = None
    failures = Failures(job.cluster.restarts, job.cluster.wait_seconds)
    while True:
        driver = None
        try:
            workers = await claim_workers(cluster, job.cluster.nodes, run, model_path(job), seconds, should_stop)
            cluster.prepare(run, workers)
            tasks = Tasks(cluster, workers, run, job.cluster.wait_seconds)
            driver = Driver(tasks, job, progress, incarnation, on_progress, should_stop, frame)
            driver.accept_changed_data, driver.resume, driver.trace = accept_changed_data, resume, trace
            return await driver.run()
        except BackendError as error:
            if lost is None:
                raise
            raise type(lost)(f"{lost}; {error}") from None
        except RETRYABLE as error:
            locked = isinstance(error, LockedError)
            pause = failures.pause_seconds(locked, progress.snapshot, cluster.time())
            if pause is None or (locked and should_stop()):
                raise
            waiting = f"waiting up to {job.cluster.wait_seconds:g} s for the lock, then " if locked else ""
            logger.warning("%s; %sgoing back to snapshot %s", error, waiting, progress.snapshot)
            lost = error
        progress.restarts += not locked
        incarnation, seconds = driver.incarnation if driver is not None else incarnation, job.cluster.wait_seconds
        await cluster.sleep(pause)


class Failures:
    """Failures of a run since its last new snapshot; decides if it tries again, and after which pause."""

    def __init__(self, restarts: int, wait_seconds: float) -> None:
        self._restarts, self._wait_seconds = restarts, wait_seconds
        self._snapshot: str | None = None
        self._lost = self._tries = 0
        self._locked_at: float | None = None  # start of the current series of tries that all met a lock

    def pause_seconds(self, locked: bool, snapshot: str | None, now: float) -> float | None:
        """Count a failure of a run whose last snapshot is `snapshot`; return the pause, or None to end the run."""
        if snapshot != self._snapshot:
            self._snapshot, self._lost, self._tries, self._locked_at = snapshot, 0, 0, None
        pause = min(PAUSE_SECONDS * 2 ** min(self._tries, 10), MAX_PAUSE_SECONDS)
        self._tries += 1
        if not locked:
            self._locked_at = None
            self._lost += 1
            return pause if self._lost <= self._restarts else None
        self._locked_at = now if self._locked_at is None else self._locked_at
        left = self._locked_at + self._wait_seconds - now
        return min(pause, left) if left > 0 else None


@dataclass(slots=True)
class _PendingBatch:
    """Batch in flight, with the tasks that the driver waits for."""

    token: BatchId
    futures: list[Task]
    shares: int = 1  # input-memory shares that it uses; known when it has its number
    answers: list[Any] = field(default_factory=list)

    @property
    def numbered(self) -> bool:
        """True if the batch has its number: it will not be split any more, and its rows are being pulled."""
        return self.token.batch >= 0


class Driver:
    """Driver of one incarnation of a run, on claimed workers. After a loss a new one is created."""

    def __init__(
        self,
        tasks: Tasks,
        job: Job,
        progress: Progress,
        incarnation: int,
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
        frame: Any = None,
    ) -> None:
        self._tasks = tasks
        self._workers = tasks.workers
        self._job = job
        self._run = tasks.run
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._frame = frame
        self.accept_changed_data, self.resume = False, True
        self.trace = ""  # folder for the traces of the nodes; empty: no trace
        self.incarnation = incarnation  # the run's previous one until `_open`, then its own; 0: none has begun yet
        self.progress = progress
        self._batch = progress.batch  # the last batch that has a number
        self._last: dict[tuple[Stage, int], Task] = {}  # last task by (stage, rank): keeps the order within a stage
        self._flights: dict[int, _PendingBatch] = {}  # by first step
        # Batches to start next: the pieces of a split batch and the batches after it. True: still to be read.
        self._pieces: list[tuple[BatchId, bool]] = []
        self._waits = False  # a batch waits for input memory
        self._warned = False  # the warning that the memory will not last was logged
        self._linked = 0  # batches started since the pipeline was last empty
        self._best_snapshot: str | None = None  # snapshot of the best validation so far, if best ones are kept
        self._watched: dict[Any, tuple[int, Task]] = {}  # by key: first step of its batch, and the task

    async def run(self) -> Outcome:
        """Train from the last snapshot to the end of the data, or until asked to stop; leave a snapshot behind."""
        try:
            info = await self._open()
            if self._validation_is_due():  # the last run ended between the snapshot and its validation
                await self._validate()
            while self._step < self._stop_step and not self._should_stop():
                if self._patience_lost():
                    break
                if await self._run_until_validation():
                    await self._validate()
            await self._snapshot_at_rest()
            self.progress.stopped_early = self._step < self._stop_step and self._patience_lost()
            if self.progress.stopped_early or self._step == self._stop_step:
                await self._end_with_best()
            summary = await self._end_record()
        except CapacityError as error:
            raise CapacityError(f"{error}; {self._what_is_kept()}") from error
        finally:
            self._flights.clear()
            self._last.clear()  # Dask then forgets tasks that have not started
            self._watched.clear()
            await self._tasks.run_best_effort(self._workers, Request.CLOSE, self.incarnation)
        return Outcome(info.directory, self.progress.snapshot, self.progress, run=self._run, summary=summary)

    def _patience_lost(self) -> bool:
        """Return True if early stopping should end the run."""
        train = self._job.train
        return self.progress.patience_lost(train.early_stopping_patience, train.best_metric)

    async def _open(self) -> NodeInfo:
        """Open the model on all nodes.

        Node 0 begins an incarnation, all workers close older ones, all nodes open the model, all nodes connect.
        """
        path = model_path(self._job)
        begun = replace(await self._begin(), accept_changed_data=self.accept_changed_data, trace=self.trace)
        self.incarnation = begun.incarnation
        self._take_settings(begun.job or self._job)
        if begun.snapshot is not None and (idle := self._job.idle_devices()):
            logger.warning("%s; but the block of a model that is there is part of its result, and stays", idle)
        taken = {*self._workers, *self._tasks.cluster.held(self._run)}
        others = [worker for worker in self._tasks.able() if worker not in taken]
        await self._tasks.run_best_effort(others, Request.RELEASE, self.incarnation, path, False)
        await self._ask(Request.RELEASE, path, True)
        shared, here = (len(self._workers), self._job, begun, self._frame), self._tasks.nodes_by_machine()
        opening = [
            self._tasks.start(rank, Request.OPEN, self.incarnation, rank, *shared, nodes)
            for rank, nodes in enumerate(here)
        ]
        answers: list[NodeInfo] = await self._tasks.results(opening)
        if len({answer.rows for answer in answers}) > 1:
            found = {rank: answer.rows for rank, answer in enumerate(answers)}
            raise DataError(f"nodes see different data, rows by node: {found}; all need the same files")
        await self._ask(Request.JOIN, [answer.address for answer in answers])
        info = replace(answers[0], read_steps=min(answer.read_steps for answer in answers))
        self._info = info
        self._sizer = Sizer(self._job, info)
        self._recording = Recording(self._tasks, self.incarnation)
        self._step, self._batch = info.steps.step_at(info.position, info.rows), info.batch
        self._stop_step = info.steps.count(info.rows)
        self._pace = SnapshotPace(self._job.train, self._tasks.cluster.time())
        self.progress.go_back(info.position, info.rows, info.batch, info.snapshot, info.metrics, info.validations)
        self.progress.history = info.history
        best = self._best()
        self._best_snapshot = info.snapshot if best is not None and best.batch == info.batch else info.best
        return info

    def _take_settings(self, job: Job) -> None:
        """Use the model's settings where the job named none, and log those that differ from the defaults."""
        if taken := differences(self._job, job):
            logger.info("settings taken from the model: %s", ", ".join(f"{name} = {v!r}" for name, v in taken.items()))
        self._job = job

    async def _begin(self) -> IncarnationStart:
        """Begin the next incarnation. It ends the one before, so it must not begin while another run writes.

        A lock held by a node without a driver does not count: that node is closed after the incarnation has begun.
        """
        try:
            return (await self._ask(Request.BEGIN, self._job, False, self.resume, ranks=[0]))[0]  # type: ignore[no-any-return]
        except LockedError:
            holding, held = await self._tasks.holding(model_path(self._job)), self._tasks.cluster.held(self._run)
            here = [worker for worker, same in holding.items() if same]
            if not here or any(worker in held for worker in here):
                raise
        return (await self._ask(Request.BEGIN, self._job, True, self.resume, ranks=[0]))[0]  # type: ignore[no-any-return]

    # -- batches ---------------------------------------------------------------------------------------------------

    async def _run_until_validation(self) -> bool:
        """Run batches until the next validation is due; return False if the run was asked to stop before.

        The end of a pass is a validation, too. When this returns, nothing is in flight.
        """
        stop_step = self._pass_end(self._step)
        units, stopped = self._units(), False
        while True:
            self._forget_tasks()
            while (self._pieces or (self._step < stop_step and units)) and self._may_start_batch():
                if self._pieces:
                    self._start(*self._next_piece())
                    continue
                if self._should_stop():
                    units, stopped = 0, True
                    break
                stop = min(self._batch_end(), stop_step)
                self._pieces = [(BatchId(self._run, self._info.incarnation, -1, self._step, stop), True)]
                self._step, units = stop, units - 1
            if not self._flights:
                return not stopped
            self._tasks.waiting_for = self._oldest()
            await self._take(await self._tasks.first(task for _, task in self._watched.values()))

    def _forget_tasks(self) -> None:
        """Let Dask forget all tasks, if all have ended: with a task it keeps everything that the task depends on."""
        if not self._flights and all(unread for _, unread in self._pieces):  # else a task of a split batch may run
            self._last.clear()
            self._linked = 0

    def _next_piece(self) -> tuple[BatchId, bool]:
        """Return the batch to start next; one that is still to be read gets at most `most_steps` steps."""
        token, unread = self._pieces.pop(0)
        if unread and token.stop_step - token.first_step > self._sizer.most_steps:
            piece = pieces(token, self._sizer.most_steps)[0]
            self._pieces.insert(0, (replace(token, first_step=piece.stop_step), True))  # more steps may fit later
            token = piece
        return token, unread

    def _may_start_batch(self) -> bool:
        """Return True if another batch may be read: fewer than `depth` in flight, using fewer than `depth` shares.

        A batch with unusually large examples uses several shares of the input memory; then others wait for its push.
        After LINKED_BATCHES batches the pipeline must run empty, so that Dask can forget their tasks.
        """
        if len(self._flights) >= self._job.train.depth or (self._flights and self._linked >= LINKED_BATCHES):
            return False
        there = not self._flights or sum(flight.shares for flight in self._flights.values()) < self._job.train.depth
        if not there and not self._waits:
            self.progress.counts["read_waits"] = self.progress.counts.get("read_waits", 0) + 1
        self._waits = not there
        return there

    def _oldest(self) -> str:
        """Return stage and batch of the oldest batch in flight, as text for errors."""
        flight = self._flights[min(self._flights)]
        if flight.numbered:
            return f"stage pull to push, batch {flight.token.batch}"
        return f"stage read to dedup, batch {self._batch + 1}"

    async def _take(self, future: Task) -> None:
        """Process a watched task that has ended: if it was the last one of its batch, go on with the batch."""
        flight = self._flights[self._watched.pop(future.key)[0]]
        waited_for = [task for other in self._flights.values() for task in other.futures]
        flight.answers.append(await self._tasks.result(future, waited_for))  # raises what the stage raised
        if len(flight.answers) == len(self._workers) and flight.numbered:
            await self._finish(flight)
        # Batches are numbered in the order of their steps, so a split batch delays those after it.
        while self._flights:
            unnumbered = [flight for _, flight in sorted(self._flights.items()) if not flight.numbered]
            if not unnumbered or len(unnumbered[0].answers) < len(self._workers):
                return
            self._number(unnumbered[0])

    def _start(self, token: BatchId, read: bool) -> None:
        """Start a batch: read its examples, unless an earlier read has them, and dedup its keys."""
        self._linked += 1
        before = self._stage(Stage.READ, token) if read else []
        self._watch(token, self._stage(Stage.DEDUP, token, before))

    def _number(self, flight: _PendingBatch) -> None:
        """Number a batch whose distinct keys all nodes know, and start its other stages.

        If it does not fit the tightest node, split it instead.
        """
        token = flight.token
        shares = max(fit.shares for fit in flight.answers)
        fitting = steps_that_fit(token.stop_step - token.first_step, flight.answers)
        if fitting < token.stop_step - token.first_step:
            self._cut_into(fitting)
            return
        self._batch += 1
        snapshot = ""
        if self._pace.is_due(self._batch, self._tasks.cluster.time()) and self._ends_batch(token.stop_step):
            snapshot = self._name(self._batch)
            self._pace.begin()
        token = replace(token, batch=self._batch, snapshot=snapshot)
        # A pull reuses the buffers of the push `depth` batches before. That push has ended, because no batch is started
        # while `depth` are in flight. As an edge of Dask's graph it would make a cycle of task groups, which Dask's
        # pages cannot draw.
        self._stage(Stage.LOAD, token, self._stage(Stage.PULL, token))
        # No edge from load to train: the train waits in the node. Dask's Groups page (2026.8) has groups in descending
        # order of names, and answers with HTTP 500 if a group comes before one that it depends on. The names of the
        # other stages are in the right order.
        trained = self._stage(Stage.TRAIN, token)
        self._watch(token, self._stage(Stage.PUSH, token, trained), shares)

    def _cut_into(self, steps: int) -> None:
        """Split the first unnumbered batch, which does not fit, into pieces of at most `steps` steps.

        All unnumbered batches after it are split as well, and all are dedup'ed again: their capacity reports assumed at
        most `depth` batches before them, and every batch before them makes the disk index larger. Where nodes merge at
        the end of a batch, the batches after it are not split: how many there are depends on timing, which must not
        change the result.
        """
        waiting = [flight.token for _, flight in sorted(self._flights.items()) if not flight.numbered]
        for one in waiting:
            del self._flights[one.first_step]
        self._watched = {key: entry for key, entry in self._watched.items() if entry[0] in self._flights}
        behind = [piece for one in waiting[1:] for piece in pieces(one, steps)]
        if self._job.merges_batches:
            behind = waiting[1:]
        again = [*pieces(waiting[0], steps), *behind]
        self._pieces = [*((piece, False) for piece in again), *self._pieces]
        self._sizer.cut(steps)

    async def _finish(self, flight: _PendingBatch) -> None:
        """Finish a batch that all nodes have pushed: progress, record, snapshot, size of the next batches."""
        reports: list[BatchReport] = sorted(flight.answers, key=lambda report: report.rank)
        token = flight.token
        del self._flights[token.first_step]
        self.progress.finish(token, reports, self._position(token.stop_step))
        self._warn(reports)
        await self._recording.add(self.progress.line)
        if token.snapshot:
            digests = [report.digests for report in reports]
            # A push ends when its node's partitions have prepared. Clocks of machines differ, so only durations count.
            flushed = max(stage.seconds for report in reports for stage in report.stages if stage.stage == Stage.PUSH)
            begun = self._tasks.cluster.time() - max(0.0, flushed)
            await self._publish(token.snapshot, token.batch, token.stop_step, digests, begun)
        self._sizer.learn(reports)
        read = sum(report.rows_read for report in reports)
        judge_bad_examples(self._job, self._info.rows // self._job.train.epochs, read, self.progress.bad_rows)
        self._on_progress(self.progress)

    # -- boundaries of batches and validations -----------------------------------------------------------------------

    def _into_pass(self, step: int | None = None) -> int:
        """Return the steps of this pass over the data that come before `step` (default: the next step)."""
        step = self._step if step is None else step
        passed = self._position(step) // (self._info.rows // self._job.train.epochs)
        return step - self._info.steps.count(passed * (self._info.rows // self._job.train.epochs))

    def _ends_batch(self, step: int) -> bool:
        """Return True if a snapshot may be taken before `step`.

        Where nodes merge at the end of a batch, the split of a batch is part of the result, and a run resumed in the
        middle of a batch would split the rest of it differently. So it must be the end of a whole batch of the job.
        """
        return not self._job.merges_batches or self._into_pass(step) % self._sizer.steps() == 0

    def _batch_end(self) -> int:
        """Return the end step of a batch that begins now.

        If `train.batch_examples` is set, batches end at multiples of it, wherever the run was resumed.
        """
        steps = self._sizer.steps()
        return self._step + steps - (self._into_pass() % steps if self._job.train.batch_examples is not None else 0)

    def _units(self) -> int:
        """Return the number of batches until the next validation.

        If `train.batch_examples` is set, validations come at the same places in a resumed run.
        """
        every = self._job.train.validate_every_batches
        if not every:
            return self._stop_step
        done = self._into_pass() // self._sizer.steps() if self._job.train.batch_examples is not None else 0
        return every - done % every

    def _validation_is_due(self) -> bool:
        """Return True if the run begins where a validation is due and the snapshot does not have it."""
        every, sized = self._job.train.validate_every_batches, self._job.train.batch_examples is not None
        if self._step == 0 or any(one.batch == self._batch for one in self.progress.validations):
            return False
        at_pass_end = self._into_pass() == 0 or self._step == self._stop_step
        return at_pass_end or (sized and every > 0 and self._into_pass() % (every * self._sizer.steps()) == 0)

    # -- steps and positions ---------------------------------------------------------------------------------------

    def _position(self, step: int) -> int:
        """Return the global number of the first example of `step`."""
        return self._info.steps.examples(step, self._info.rows)[0]

    def _pass_end(self, step: int) -> int:
        """Return the first step that starts in the next pass over the data."""
        rows = self._info.rows // self._job.train.epochs
        passes = self._position(step) // rows + 1
        return min(self._info.steps.count(passes * rows), self._stop_step)

    # -- at rest: nothing in flight ----------------------------------------------------------------------------------

    async def _validate(self) -> None:
        """Evaluate the validation data, if there is any; keep a snapshot if it is the best so far."""
        if not self._info.validation_rows:
            return
        answers = await self._ask(Request.EVALUATE, self._batch)
        self.progress.validations.append(found := Validation(self._batch, self.progress.position, answers[0]))
        await self._recording.add(validation_line(found, self._run, self.incarnation))
        patience = self._job.train.early_stopping_patience
        self.progress.validations = kept_validations(self.progress.validations, patience)
        self._on_progress(self.progress)
        if self._best() is found:
            there = self._info.snapshot if self._batch == self._info.batch else None
            self._best_snapshot = there or self._name(self._batch)
            await self._snapshot_at_rest()

    def _best(self) -> Validation | None:
        """Return the best validation so far; None without early stopping, as then the last model counts."""
        train = self._job.train
        return best_of(self.progress.validations, train.best_metric) if train.early_stopping_patience else None

    async def _end_with_best(self) -> None:
        """End the run with its best snapshot as the last one, by one log entry. The newest snapshot is kept too."""
        best, name = self._best(), self._best_snapshot
        if best is None:
            return
        if name is None or batch_of(name) != best.batch:
            logger.warning(
                "the best model was that after batch %d, which was not kept: early stopping, or another best_metric, "
                "was set later; the model left is the last one",
                best.batch,
            )
        elif (await self._ask(Request.END_WITH, name, ranks=[0]))[0] == name:
            self.progress.snapshot, self.progress.best = name, best
            self._on_progress(self.progress)

    async def _snapshot_at_rest(self) -> None:
        """Make a snapshot while nothing is in flight, unless nothing was trained since the last one."""
        name = self._name(self._batch)
        if self.progress.snapshot == name or self._batch == self._info.batch:
            return
        begun = self._tasks.cluster.time()
        digests = await self._ask(Request.PREPARE, name, self._batch)
        await self._publish(name, self._batch, self._step, digests, begun)
        self._on_progress(self.progress)

    async def _publish(
        self, name: str, batch: int, stop_step: int, digests: list[dict[str, Any]], begun: float
    ) -> None:
        """Publish a snapshot that every node has prepared: one log entry commits it, then all nodes confirm it.

        `begun` is the time when the first node began to prepare, by the driver's clock.
        """
        merged: dict[str, Any] = {}
        for part in digests:
            for table, found in part.items():
                merged.setdefault(table, {}).update(found)
        progress = record_of(self.progress.validations, self._best_snapshot)
        rest = await self._recording.rest()  # the record up to a snapshot is durable with it
        snapshot = Publication(name, batch, self._position(stop_step), merged, progress, *rest)
        live = (await self._ask(Request.PUBLISH, snapshot, ranks=[0]))[0]
        now = self._tasks.cluster.time()
        self._pace.publish(now, now - begun)
        await self._ask(Request.CONFIRM, live)
        self.progress.snapshot = name

    def _warn(self, reports: list[BatchReport]) -> None:
        """Warn if the memory will not last to the end of the data.

        The warning is logged once; `progress.warnings` has it as long as the forecast says so.
        """
        forecasts = [report.forecast for report in reports if report.forecast is not None]
        if not forecasts:
            self.progress.warnings.clear()
            return
        first = min(forecasts, key=lambda one: one.position)
        self.progress.warnings = [first.words(self._job.budget.memory_bytes, self._info.rows)]
        if not self._warned:
            self._warned = True
            logger.warning("%s", self.progress.warnings[0])

    def _what_is_kept(self) -> str:
        """Return advice on how to go on after an error that other settings can fix."""
        if self.progress.snapshot is not None:
            return f"then go on with --resume: snapshot {self.progress.snapshot} holds all that was trained before it"
        return "then begin again: there is no snapshot yet"

    async def _end_record(self) -> Summary:
        """Make node 0 write the rest of the record; return the totals of the whole run."""
        rest = await self._recording.rest()
        if not self.progress.line:  # nothing was trained
            return Summary()
        await self._ask(Request.RECORD, *rest, ranks=[0])
        return (await self._ask(Request.SUMMARY, ranks=[0]))[0]  # type: ignore[no-any-return]

    def _name(self, batch: int) -> str:
        """Return the id of the snapshot after `batch`."""
        return f"{self._info.incarnation:06d}-{batch:08d}"

    # -- tasks ---------------------------------------------------------------------------------------------------------

    async def _ask(self, request: Request, *values: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """Send a request to every node (or `ranks`) and return the answers by rank."""
        ranks = range(len(self._workers)) if ranks is None else ranks
        self._tasks.waiting_for = f"stage {request}, after batch {self._batch}"
        return await self._tasks.results(
            [self._tasks.start(rank, request, self.incarnation, *values) for rank in ranks]
        )

    def _stage(self, stage: Stage, token: BatchId, before: list[Task] | None = None) -> list[Task]:
        """Start the tasks of one stage, one per node: each after `before` and after the stage's previous batch."""
        futures = []
        for rank in range(len(self._workers)):
            after = [before[rank]] if before else []
            if (stage, rank) in self._last:
                after.append(self._last[stage, rank])
            self._last[stage, rank] = future = self._tasks.start(rank, stage, token, *after)
            futures.append(future)
        return futures

    def _watch(self, token: BatchId, futures: list[Task], shares: int = 1) -> None:
        """Register a batch in flight with the tasks that the driver waits for next."""
        self._flights[token.first_step] = _PendingBatch(token, futures, shares)
        for future in futures:
            self._watched[future.key] = (token.first_step, future)
            self._tasks.cluster.watch(future)


def batch_of(snapshot: str) -> int:
    """Return the last batch that a snapshot holds, from its id."""
    return int(snapshot.rpartition("-")[2])


def pieces(token: BatchId, steps: int) -> list[BatchId]:
    """Split a token into pieces of at most `steps` steps and nearly equal size.

    After a small batch, which trains fast, the next one would not be ready in time.
    """
    first, count = token.first_step, token.stop_step - token.first_step
    parts = -(-count // steps)
    cuts = [first + count * part // parts for part in range(parts + 1)]
    return [replace(token, first_step=start, stop_step=stop) for start, stop in pairwise(cuts)]
