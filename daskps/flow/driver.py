"""The driver of a run: plans batches, keeps a bounded number of them in flight as tasks, publishes snapshots.

In: a cluster, a job, and whom to tell of progress. Out: a trained model in its directory, an `Outcome`.
Only names of work and small counts pass through here; rows, keys and examples stay in the nodes. One piece of code runs
in the client for `train`, as a Dask task for `submit`, and in the simulator of the tests; it always takes up the last
snapshot, so it may be run again wherever it died.

Every stage of every batch is one task per node, pinned to its worker and to the stage's executor. A stage waits for the
stage before it (same batch) and for itself (batch before), so each kind of stage goes through the batches in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from daskps.config import Job
from daskps.errors import BackendError, DataError, LockedError
from daskps.flow.begin import Begun, model_path
from daskps.flow.fitting import fitting_steps
from daskps.flow.inputs import judge_bad_rows
from daskps.flow.opened import Opened
from daskps.flow.progress import BatchReport, Outcome, Progress, Validation, record_of
from daskps.flow.sizing import Sizer
from daskps.flow.tasks import LOST, Cluster, Task, Tasks, choose_workers, wait_for_workers
from daskps.types import Token

logger = logging.getLogger("daskps.flow")

PAUSE_SECONDS = 1.0  # before going back to the last snapshot, doubled each time: a lost worker may still be listed


async def drive(
    cluster: Cluster,
    job: Job,
    run: str,
    *,
    on_progress: Callable[[Progress], None],
    should_stop: Callable[[], bool],
    frame: Any = None,
    seconds: float = 0.0,  # to wait for workers
) -> Outcome:
    """Train `job` to its end, going back to its last snapshot when a node is lost, at most `cluster.restarts` times."""
    progress, epoch = Progress(0, 0, -1), 0
    lost: BaseException | None = None
    while True:
        driver = None
        try:
            workers = await wait_for_workers(cluster, job.cluster.nodes, seconds)
            cluster.prepare()
            workers = await choose_workers(cluster, workers, job.cluster.nodes, run, model_path(job))
            tasks = Tasks(cluster, workers, run, job.cluster.wait_seconds)
            driver = Driver(tasks, job, progress, epoch, on_progress, should_stop, frame, again=lost is not None)
            return await driver.run()
        except BackendError as error:
            if lost is None:
                raise
            raise type(lost)(f"{lost}; {error}") from None
        except LOST as error:
            if progress.restarts == job.cluster.restarts:
                raise
            logger.warning("%s; going back to snapshot %s", error, progress.snapshot)
            lost = error
        progress.restarts += 1
        epoch, seconds = driver.epoch if driver is not None else epoch, job.cluster.wait_seconds
        await cluster.sleep(PAUSE_SECONDS * 2 ** (progress.restarts - 1))


@dataclass(slots=True)
class _Flight:
    """A batch in flight, and the tasks that the driver waits for."""

    token: Token
    futures: list[Task]
    shares: int = 1  # of the memory for batches in flight; known when it has its number
    answers: list[Any] = field(default_factory=list)

    @property
    def numbered(self) -> bool:
        """Its place in the order of batches is fixed, so its rows are on their way."""
        return self.token.batch >= 0


class Driver:
    """One epoch of a run, on workers that are there. Made anew after a loss."""

    def __init__(
        self,
        tasks: Tasks,
        job: Job,
        progress: Progress,
        epoch: int,
        on_progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
        frame: Any = None,
        *,
        again: bool = False,
    ) -> None:
        self._tasks = tasks
        self._workers = tasks.workers
        self._job = job
        self._run = tasks.run
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._frame = frame
        self.epoch = epoch  # that the run had before, then its own; 0 until one has begun
        self.progress = progress
        self._again = again  # the run has lost a node
        self._batch = progress.batch  # the last one that has a number
        self._last: dict[tuple[str, int], Task] = {}  # of each stage and node: keeps the order within a stage
        self._pushes: list[list[Task]] = []  # of the last batches: a pull needs the buffers of an earlier one
        self._flights: dict[int, _Flight] = {}  # by first step
        # To begin with next: what a batch was cut into, and what came after it; and whether that is still to be read.
        self._pieces: list[tuple[Token, bool]] = []
        self._waits = False  # a batch, for memory
        self._watched: dict[Any, tuple[int, Task]] = {}  # by key: first step of its batch, and the task

    async def run(self) -> Outcome:
        """Train from the last snapshot to the end of the data, or until asked to stop; leave a snapshot behind."""
        try:
            opened = await self._open()
            if self._validation_is_due():  # the snapshot was published just before it
                await self._validate()
            while self._step < self._stop_step and not self._should_stop():
                if self.progress.patience_lost(self._job.train.early_stopping_patience):
                    self.progress.stopped_early = True
                    break
                if await self._segment():
                    await self._validate()
            await self._snapshot_at_rest()
        finally:
            self._flights.clear()
            self._last.clear()  # what has not begun is forgotten by Dask
            self._pushes.clear()
            self._watched.clear()
            await self._tasks.try_on(self._workers, "close", self.epoch)
        return Outcome(opened.directory, self.progress.snapshot, self.progress)

    async def _open(self) -> Opened:
        """Open the model on all nodes: one begins an epoch, nobody keeps an older one, all open it, all join."""
        path, begun = model_path(self._job), await self._begin()
        self.epoch = begun.epoch
        others = [worker for worker in self._tasks.cluster.present() if worker not in self._workers]
        await self._tasks.try_on(others, "release", self.epoch, path, False, self._again)
        await self._control("release", path, True, self._again)
        shared, here = (len(self._workers), self._job, begun, self._frame), self._tasks.nodes_by_machine()
        opening = [self._tasks.start(rank, "open", self.epoch, rank, *shared, nodes) for rank, nodes in enumerate(here)]
        answers: list[Opened] = await self._tasks.results(opening)
        if len({answer.rows for answer in answers}) > 1:
            found = {rank: answer.rows for rank, answer in enumerate(answers)}
            raise DataError(f"nodes see different data, rows by node: {found}; all need the same files")
        await self._control("join", [answer.address for answer in answers])
        opened = replace(answers[0], read_steps=min(answer.read_steps for answer in answers))
        self._opened = opened
        self._sizer = Sizer(self._job, opened)
        self._step, self._batch = opened.steps.step_at(opened.position, opened.rows), opened.batch
        self._stop_step = opened.steps.count(opened.rows)
        self.progress.go_back(
            opened.position, opened.rows, opened.batch, opened.snapshot, opened.metrics, opened.validations
        )
        return opened

    async def _begin(self) -> Begun:
        """The next epoch. It ends the one before, so none begins while others than workers here write to the model."""
        try:
            return (await self._control("begin", self._job, ranks=[0]))[0]  # type: ignore[no-any-return]
        except LockedError:
            if True not in (await self._tasks.holding(model_path(self._job))).values():
                raise
        return (await self._control("begin", self._job, True, ranks=[0]))[0]  # type: ignore[no-any-return]

    # -- batches ---------------------------------------------------------------------------------------------------

    async def _segment(self) -> bool:
        """Run batches until the next validation (the end of a pass is one), or the wish to stop, which makes it False.

        Then nothing is in flight.
        """
        stop_step = self._pass_end(self._step)
        units, stopped = self._units(), False
        while True:
            while (self._pieces or (self._step < stop_step and units)) and self._has_room():
                if self._pieces:
                    self._start(*self._next_piece())
                    continue
                if self._should_stop():
                    units, stopped = 0, True
                    break
                stop = min(self._batch_end(), stop_step)
                self._pieces = [(Token(self._run, self._opened.epoch, -1, self._step, stop), True)]
                self._step, units = stop, units - 1
            if not self._flights:
                return not stopped
            self._tasks.doing = self._oldest()
            await self._take(await self._tasks.first(task for _, task in self._watched.values()))

    def _next_piece(self) -> tuple[Token, bool]:
        """What to start next: of steps that are still to be read, no more than are known to fit by now."""
        token, unread = self._pieces.pop(0)
        if unread and token.stop_step - token.first_step > self._sizer.most_steps:
            piece = pieces(token, self._sizer.most_steps)[0]
            self._pieces.insert(0, (replace(token, first_step=piece.stop_step), True))  # more may fit by then
            token = piece
        return token, unread

    def _has_room(self) -> bool:
        """Whether one more batch may be read: fewer than `depth` are in flight, and they take no more memory than so
        many were meant to. A batch whose examples came out larger counts as several; then others wait for its push."""
        if len(self._flights) >= self._job.train.depth:
            return False
        there = not self._flights or sum(flight.shares for flight in self._flights.values()) < self._job.train.depth
        if not there and not self._waits:
            self.progress.counts["read_waits"] = self.progress.counts.get("read_waits", 0) + 1
        self._waits = not there
        return there

    def _oldest(self) -> str:
        """The batch that has been in flight for longest, for errors."""
        flight = self._flights[min(self._flights)]
        if flight.numbered:
            return f"stage pull to push, batch {flight.token.batch}"
        return f"stage read to dedup, batch {self._batch + 1}"

    async def _take(self, future: Task) -> None:
        """A watched task has ended: when it was the batch's last, go on with the batch."""
        flight = self._flights[self._watched.pop(future.key)[0]]
        waited_for = [task for other in self._flights.values() for task in other.futures]
        flight.answers.append(await self._tasks.result(future, waited_for))  # raises what the stage raised
        if len(flight.answers) == len(self._workers) and flight.numbered:
            await self._finish(flight)
        # Batches get their numbers in the order of their steps, so a cut batch holds up those after it.
        while self._flights:
            unnumbered = [flight for _, flight in sorted(self._flights.items()) if not flight.numbered]
            if not unnumbered or len(unnumbered[0].answers) < len(self._workers):
                return
            self._number(unnumbered[0])

    def _start(self, token: Token, read: bool) -> None:
        before = self._stage("read", token) if read else []
        self._watch(token, self._stage("dedup", token, before))

    def _number(self, flight: _Flight) -> None:
        """All nodes know the batch's distinct keys: cut it where the tightest node must, or send for its rows."""
        token = flight.token
        shares = max(fit.shares for fit in flight.answers)
        fitting = fitting_steps(token.stop_step - token.first_step, flight.answers)
        if fitting < token.stop_step - token.first_step:
            self._cut_into(fitting)
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
        self._watch(token, futures, shares)

    def _cut_into(self, steps: int) -> None:
        """Make batches of at most `steps` steps of the first one without a number, which does not fit.

        So are those behind it, and all are looked at again: what fits was said with at most `depth` batches ahead, and
        with every batch ahead the index of the disk tier takes memory. Where nodes merge at the end of a batch, none is
        cut for another's sake: how many are behind it is a matter of time, and must not change the result.
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

    async def _finish(self, flight: _Flight) -> None:
        """All nodes have pushed the batch."""
        reports: list[BatchReport] = sorted(flight.answers, key=lambda report: report.rank)
        token = flight.token
        del self._flights[token.first_step]
        if token.snapshot:
            await self._publish(token.snapshot, token.batch, token.stop_step, [report.receipts for report in reports])
        self._sizer.learn(reports)
        self.progress.finish(token, reports, self._position(token.stop_step))
        read = sum(report.rows_read for report in reports)
        judge_bad_rows(self._job, self._opened.rows // self._job.train.epochs, read, self.progress.bad_rows)
        self._on_progress(self.progress)

    # -- where batches and validations come ------------------------------------------------------------------------

    def _into_pass(self) -> int:
        """Steps of this pass over the data that are done."""
        passed = self._position(self._step) // (self._opened.rows // self._job.train.epochs)
        return self._step - self._opened.steps.count(passed * (self._opened.rows // self._job.train.epochs))

    def _batch_end(self) -> int:
        """Where a batch that begins now ends. If its size was set, all end at its multiples, however a run began."""
        steps = self._sizer.steps()
        return self._step + steps - (self._into_pass() % steps if self._job.train.batch_examples is not None else 0)

    def _units(self) -> int:
        """Batches until the next validation; the same ones for a run that was interrupted, if their size was set."""
        every = self._job.train.validate_every_batches
        if not every:
            return self._stop_step
        done = self._into_pass() // self._sizer.steps() if self._job.train.batch_examples is not None else 0
        return every - done % every

    def _validation_is_due(self) -> bool:
        """The run begins where one comes, and it was not kept."""
        every, sized = self._job.train.validate_every_batches, self._job.train.batch_examples is not None
        if self._step == 0 or any(one.batch == self._batch for one in self.progress.validations):
            return False
        at_pass_end = self._into_pass() == 0 or self._step == self._stop_step
        return at_pass_end or (sized and every > 0 and self._into_pass() % (every * self._sizer.steps()) == 0)

    # -- steps and positions ---------------------------------------------------------------------------------------

    def _position(self, step: int) -> int:
        return self._opened.steps.rows(step, self._opened.rows)[0]

    def _pass_end(self, step: int) -> int:
        """The first step that starts in the next pass over the data."""
        rows = self._opened.rows // self._job.train.epochs
        passes = self._position(step) // rows + 1
        return min(self._opened.steps.count(passes * rows), self._stop_step)

    # -- at rest: nothing in flight ----------------------------------------------------------------------------------

    async def _validate(self) -> None:
        if not self._opened.validation_rows:
            return
        answers = await self._control("evaluate", self._batch)
        self.progress.validations.append(Validation(self._batch, self.progress.position, answers[0]))
        self._on_progress(self.progress)

    async def _snapshot_at_rest(self) -> None:
        name = self._name(self._batch)
        if self.progress.snapshot == name or self._batch == self._opened.batch:
            return  # nothing was trained since the last one
        receipts = await self._control("prepare", name, self._batch)
        await self._publish(name, self._batch, self._step, receipts)
        self._on_progress(self.progress)

    async def _publish(self, name: str, batch: int, stop_step: int, receipts: list[dict[str, Any]]) -> None:
        """Every node has prepared: one log entry makes it the last snapshot, then the nodes confirm."""
        merged = {partition: receipt for part in receipts for partition, receipt in part.items()}
        position = self._position(stop_step)
        record = record_of(self.progress.validations)
        live = (await self._control("publish", name, batch, position, merged, record, ranks=[0]))[0]
        await self._control("confirm", live)
        self.progress.snapshot = name

    def _name(self, batch: int) -> str:
        return f"{self._opened.epoch:06d}-{batch:08d}"

    # -- tasks ---------------------------------------------------------------------------------------------------------

    async def _control(self, verb: str, *values: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """Have every node (or `ranks`) do one thing outside the stages, and wait for the answers."""
        ranks = range(len(self._workers)) if ranks is None else ranks
        self._tasks.doing = f"stage {verb}, after batch {self._batch}"
        return await self._tasks.results([self._tasks.start(rank, verb, self.epoch, *values) for rank in ranks])

    def _stage(self, stage: str, token: Token, before: list[Task] | None = None) -> list[Task]:
        """The tasks of one stage, one per node: each after `before` and after the stage's batch before."""
        futures = []
        for rank in range(len(self._workers)):
            after = [before[rank]] if before else []
            if (stage, rank) in self._last:
                after.append(self._last[stage, rank])
            self._last[stage, rank] = future = self._tasks.start(rank, stage, token, *after)
            futures.append(future)
        return futures

    def _watch(self, token: Token, futures: list[Task], shares: int = 1) -> None:
        self._flights[token.first_step] = _Flight(token, futures, shares)
        for future in futures:
            self._watched[future.key] = (token.first_step, future)
            self._tasks.cluster.watch(future)


def pieces(token: Token, steps: int) -> list[Token]:
    """The same steps, at most so many at a time and evenly: behind a small batch the next one is not ready in time."""
    first, count = token.first_step, token.stop_step - token.first_step
    parts = -(-count // steps)
    cuts = [first + count * part // parts for part in range(parts + 1)]
    return [replace(token, first_step=start, stop_step=stop) for start, stop in pairwise(cuts)]
