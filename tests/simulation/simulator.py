"""A whole cluster in one thread: nodes, driver, network and disk, with a seed for everything that may go wrong.

The real code runs: the driver (`daskps.driver.driver`, with what it uses), what a worker does when a driver comes,
`daskps.wire` (commit, owner, requester, exchange) and `daskps.mem`. Simulated are time, the network (messages
delayed and reordered, processes lost), the disk (unsynced writes lost), row stores, Dask, and the stages' work:
training is an integer function. Everything is compared with plain dictionaries, at every pull, at every opening of a
snapshot, and at the end. Readers hold snapshots meanwhile, locks outlive dead processes, and drivers meet directories
and partitions that are not the model's. `python -m tests.simulation.simulator FIRST COUNT` runs schedules from
the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from daskps.config import Job, make_job
from daskps.driver.driver import Outcome, drive
from daskps.errors import (
    ConfigError,
    CorruptionError,
    DaskpsError,
    LockedError,
    PeerError,
    StaleError,
    StoreError,
    TrainingError,
)
from daskps.reports import Progress
from daskps.storage.model_directory import ModelDirectory, Snapshot
from daskps.storage.partition import Placement
from daskps.types import Field, RowLayout
from daskps.wire.message import Message
from tests.simulation import reference
from tests.simulation.disk import CrashError, SimulatedDisk
from tests.simulation.process import Process
from tests.simulation.reference import Data, Model, ReplicaMerger, Row, States
from tests.simulation.schedule import Schedule
from tests.simulation.simloop import SimLoop, sleep
from tests.simulation.simulated_cluster import SimCluster
from tests.simulation.simulated_directory import Entries, SimLog, pack, unpack
from tests.simulation.simulated_reader import SimReader
from tests.simulation.simulated_store import RealRowFolders, Rows, SimulatedRowFolders
from tests.simulation.simulated_worker import SimWorker


class World:
    """Everything there is."""

    def __init__(self, seed: int, trace: Callable[..., None], folder: Path | None) -> None:
        self.trace = trace
        self.rng = rng = random.Random(seed)
        self.wait_seconds = 300.0
        self.schedule = Schedule.of(rng, random.Random(seed + 2))
        self.data = Data.make(
            *(rng, self.schedule.tables), steps=rng.randint(3, 8), step_examples=rng.randint(1, 6), universe=12
        )
        tables, every = self.schedule.tables, self.schedule.sync_every
        self.apart = ReplicaMerger(self.data, tables, every) if every > 1 else None
        self.together = States.of(self.data, tables) if every == 1 else None
        value = Field("value", 1, "uint32" if self.apart is None else "float32")
        self.layout = RowLayout((value, Field("count", 1, "uint32", "max")))
        self.placement = Placement(self.schedule.partitions, self.schedule.partition_by)  # type: ignore[arg-type]
        self.root = "model" if folder is None else f"{folder}/model"
        self.disk: Any = SimulatedDisk(random.Random(seed + 1)) if folder is None else None
        self.row_folders: Any = SimulatedRowFolders(self.layout) if folder is None else RealRowFolders(self.layout)
        self.entries: Entries = {}
        self.aside = random.Random(seed + 3)  # for readers and misfits: the run itself is the same without them
        self.by_name: dict[str, SimWorker] = {}
        self.processes: list[Process] = []
        self.tokens = self.tasks = 0
        self.running: set[asyncio.Task[Any]] = set()  # what the scheduler is at
        # What happened, for statistics.
        self.stale = self.deferred = self.forwarded = self.in_place = self.most_nodes = self.restarts = 0
        self.evaluated = self.stopped = self.merges = self.by_time = self.ended_with_best = self.ended_early = 0
        self.misplaced = False  # a partition of another model or time is in the place of one
        self.reads = self.gone = self.refused = self.outlived = 0
        self.not_opened: list[tuple[str, str, int, Exception]] = []  # worker, run, incarnation, error
        self.last_snapshot: dict[str, tuple[float, float]] = {}  # of each run: its log entry's time, how long it took
        self.least = -1  # the newest snapshot whose publishing was told to anybody, as a position
        self.events: list[str] = []
        self.failure: BaseException | None = None
        self.over = False

    # ------------------------------------------------------------------- services

    def delay(self) -> float:
        """Mostly short, sometimes long enough to be overtaken by everything."""
        return self.rng.expovariate(1 / self.schedule.mean_delay) * (20 if self.rng.random() < 0.05 else 1)

    def carry(self, sender: SimWorker, receiver: SimWorker, message: Message) -> None:
        def arrive() -> None:
            if receiver.alive:
                receiver.deliver(sender, message)

        if sender.alive:
            delay, loop = self.delay(), asyncio.get_running_loop()
            self.trace(loop.time(), sender.name, receiver.name, message.kind, message.batch, message.step, delay)
            loop.call_later(delay, arrive)

    def directory(self, process: Process) -> ModelDirectory:
        def new_id() -> str:
            self.tokens += 1
            return f"{self.tokens:06d}"

        files = process.files(self.root)
        log = SimLog(files, self.entries)
        return ModelDirectory(self.root, files, lambda: 0.0, new_id, log, pack=pack, unpack=unpack)

    def release(self, process: Process) -> None:
        self.row_folders.release(process)

    def outlive(self, process: Process) -> None:
        """A process was killed: its locks go, at once or when the file server notices."""
        self.later(self.schedule.lock_seconds if self.simulated else 0.0, self.release, process)

    @property
    def simulated(self) -> bool:
        """The disk is a simulated one."""
        return isinstance(self.disk, SimulatedDisk)

    def power_cut(self) -> None:
        if self.simulated:  # a real disk keeps its power
            self.disk.power_cut()

    def later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        asyncio.get_running_loop().call_later(seconds, call, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something that no process can end."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failure = self.failure or task.exception()

    def listed(self) -> list[SimWorker]:
        """Workers that the scheduler knows of; a dead one is known for a while."""
        now = asyncio.get_running_loop().time()
        return [worker for worker in self.by_name.values() if worker.alive or now < (worker.gone_at or 0)]

    def living(self) -> list[SimWorker]:
        return [worker for worker in self.by_name.values() if worker.alive]

    def start_workers(self, count: int) -> None:
        """New workers for those that are lost, as nannies would."""
        while len(self.living()) < count:
            self.tokens += 1
            worker = SimWorker(self, f"worker-{self.rng.randrange(1000):03d}-{self.tokens}")
            self.by_name = dict(sorted([*self.by_name.items(), (worker.name, worker)]))

    def nannies(self, begun: bool = True) -> None:
        """From time to time, for as long as time goes on."""
        if begun:
            self.start_workers(self.wanted_nodes)
        self.later(5 * self.delay(), self.nannies)

    def initial(self, table: int, keys: np.ndarray, out: np.ndarray) -> None:
        for place, key in enumerate(keys.tolist()):
            out.view(np.uint32)[place] = reference.initial(self.data.seed, table, key, self.apart is not None)

    # --------------------------------------------------------------------- checks

    def model_after(self, incarnation: int, batch: int, step: int) -> Model:
        """The dictionaries after a batch of an incarnation, which has trained all steps before `step`."""
        if self.together is not None:
            return self.together.rows[step], (self.together.dense[step], 0)
        assert self.apart is not None
        return self.apart.after[incarnation, batch]

    def dense_of(self, arrays: Mapping[str, np.ndarray] | None) -> Row:
        """The dense word and its count, of a snapshot or at the beginning."""
        if arrays is None:
            return (1, 0) if self.apart is None else (reference.as_float(1), 0)
        word, count = (*arrays["dense"].tolist(), 0)[:2]
        return word, count

    def check_rows(self, model: Model, table: int, keys: np.ndarray, rows: np.ndarray, where: str) -> None:
        """Rows must be as the dictionaries have them."""
        known, seed, apart = model[0][table], self.data.seed, self.apart is not None
        for key, row in zip(keys.tolist(), rows.view(np.uint32).tolist(), strict=True):
            expected = known.get(key) or reference.initial(seed, table, key, apart)
            assert tuple(row) == expected, f"{where}: table {table} key {key} is {row}, must be {expected}"

    def published(self, snapshot: str) -> None:
        process = Process(self, "observer")
        found = self.directory(process).snapshot(snapshot)
        assert found is not None
        self.least = max(self.least, found.draft.position)

    def check_whole(self, position: int) -> None:
        """A snapshot is not inside a batch that was cut."""
        data, passes = self.data, self.schedule.passes
        step, rows = -(-position // data.step_examples), data.steps * data.step_examples // passes
        begun = max(-(-done * rows // data.step_examples) for done in range(passes + 1) if done * rows <= position)
        assert (step - begun) % self.schedule.batch_steps == 0 or position == data.steps * data.step_examples

    def check_pace(self, job: Job, run: str, first_push: float, took: float) -> None:
        """Snapshots by time come as far apart as they must; a run that began again counts from its beginning."""
        now = asyncio.get_running_loop().time()
        if run in self.last_snapshot and not job.train.snapshot_every_batches:
            entry, before = self.last_snapshot[run]
            due = entry + max(60 * job.train.snapshot_every_minutes, 19 * before)
            assert first_push >= due, f"a snapshot began at {first_push}, due at {due}"
            self.by_time += 1
        self.last_snapshot[run] = now, took

    def check_snapshot(self, snapshot: Snapshot | None) -> None:
        """What an incarnation starts from must be the newest that anybody was told of, and whole."""
        position = -1 if snapshot is None else snapshot.draft.position
        assert position >= self.least, f"snapshot at {self.least} was published, but {position} is opened"
        self.least = position

    def loss_after(self, step: int) -> float:
        """Of the validation data: any number that the state alone decides, now and then the same."""
        return float(reference.mixed(self.data.seed, step) % 10)

    def check_best(self, progress: Progress, position: int) -> None:
        """With early stopping, the model is that of the first best validation; the run stopped where it had to."""
        losses = [one.metrics["log_loss"] for one in progress.validations]
        assert losses == [self.loss_after(-(-one.position // self.data.step_examples)) for one in progress.validations]
        first = losses.index(min(losses))
        assert position == progress.validations[first].position
        if progress.stopped_early:
            assert len(losses) - 1 - first == self.schedule.patience

    def check_kept(self, directory: ModelDirectory, count: int, best: str | None) -> None:
        """What is kept beside the newest snapshots is the best one, the last one, or read by somebody."""
        if self.simulated:
            state = directory.state()
            counted = [name for name in state.live if name not in (best, state.last)]
            for name in counted[: max(0, len(counted) - count)]:
                assert directory.files.seize(f"snapshots/{name}/manifest.json") is None, f"nobody reads {name}"

    def check_read(self, process: Process, found: Snapshot, tables: Sequence[Rows]) -> None:
        """A published snapshot, as a reader has it, is the model after its batch."""
        step = -(-found.draft.position // self.data.step_examples)
        model = self.model_after(found.epoch, found.draft.batch, step)
        assert self.dense_of(self.directory(process).load(found)) == model[1]
        for table, (read, expected) in enumerate(zip(tables, model[0], strict=True)):
            rows, keys = read(), np.array([*expected], np.uint64)
            bits = np.array([np.frombuffer(rows[key], np.float32) for key in expected], np.float32).reshape(-1, 2)
            self.check_rows(model, table, keys, bits, f"snapshot {found.id} for {process.name}")

    def tables_of(self, process: Process, found: Snapshot) -> list[Rows]:
        """The rows of each table of a snapshot, for a process that only reads."""
        paths = [f"{self.root}/tables/{table}" for table in range(self.schedule.tables)]
        return [self.row_folders.reader(process, path, self.placement, found) for path in paths]

    def check_end(self, snapshot: str | None, progress: Progress) -> None:
        """The model on disk, read as a stranger would: nothing left over, and whole after a power cut."""
        stranger = Process(self, "stranger")
        if not any(event.startswith("zombie") for event in self.events):
            self.check_tidy(self.directory(stranger), stranger)
        self.power_cut()
        directory = self.directory(stranger)
        found = directory.snapshot()
        assert found is not None
        assert found.id == snapshot
        if self.schedule.patience and self.schedule.validation_rows:
            self.check_best(progress, found.draft.position)
        else:
            assert found.draft.position == self.data.steps * self.data.step_examples
        self.check_read(stranger, found, self.tables_of(stranger, found))

    def check_tidy(self, directory: ModelDirectory, process: Process) -> None:
        """Partitions have what the log says and nothing else, and so has the folder of snapshots."""
        live = set(directory.state().live)
        assert set(directory.files.list_folder("snapshots")) == live
        for table in range(self.schedule.tables):
            for found in self.row_folders.snapshots(process, f"{self.root}/tables/{table}", self.placement):
                assert found == (set(), live)

    # -------------------------------------------------------------------- the run

    async def main(self) -> None:
        """Drivers, one after the other, until the model is trained; faults in between."""
        self.wanted_nodes = 1
        asyncio.get_running_loop().call_soon(self.nannies, False)
        for number in range(self.schedule.readers):
            SimReader(self, f"reader-{number}", locks=self.aside.random() < 0.6).start()
        try:
            await self.train()
        finally:
            for process in self.processes:
                process.kill()
            for task in self.running:
                task.cancel()

    async def train(self) -> None:
        faults = self.schedule.faults
        for attempt in range(40):
            if attempt == self.schedule.misfit_at:
                await self.meet_misfit()
            driver = Process(self, f"driver-{attempt}")
            task = driver.spawn(self.drive(driver))
            if faults > 0:
                faults -= 1
                self.plan_fault(driver)
            outcome: Outcome | None = None
            with contextlib.suppress(PeerError, LockedError, StaleError, CrashError, asyncio.CancelledError, TakenOver):
                outcome = await task
            if outcome is not None and (
                outcome.progress.stopped_early or outcome.progress.position == self.data.steps * self.data.step_examples
            ):
                self.ended_early += outcome.progress.stopped_early
                self.over = True
                await sleep(60 + 100 * self.schedule.mean_delay)  # until slow nodes have closed, too
                await self.meet_misfit()
                self.check_end(outcome.snapshot, outcome.progress)
                return
            self.stopped += outcome is not None
            driver.kill()
            await sleep(self.delay())
        raise AssertionError("no driver came to an end")

    async def drive(self, driver: Process, restarts: int = 3) -> Outcome:
        """What `daskps.train` does, on the workers that are there: now and then another number of them."""
        self.wanted_nodes = self.rng.randint(1, 5)
        self.start_workers(self.wanted_nodes)
        self.most_nodes = max(self.most_nodes, self.wanted_nodes)
        stop_at = self.rng.randrange(1, 12) if self.rng.random() < 0.2 else 1_000_000
        batches, begun = 0, asyncio.get_running_loop().time()

        def count(progress: Progress) -> None:
            nonlocal batches
            batches += 1

        try:
            outcome = await drive(
                SimCluster(self, driver),
                self.job(restarts),
                driver.name,
                on_progress=count,
                should_stop=lambda: batches >= stop_at,
            )
        except TrainingError as error:
            if "was taken over" in str(error):
                raise TakenOver from None
            raise
        except LockedError:
            waited = asyncio.get_running_loop().time() - begun
            assert waited >= self.wait_seconds or batches >= stop_at, f"gave a lock up after {waited} s"
            self.outlived += 1
            raise
        self.restarts += outcome.progress.restarts
        return outcome

    async def meet_misfit(self) -> None:
        """A driver finds what is not the model's: it ends with words, once, and all of it stays as it was."""
        kind, driver = self.schedule.misfit, Process(self, "driver-misfit")
        if self.refused:
            return
        if kind == "directory" and self.simulated:
            await self.meet_directory(driver)
        elif kind in ("model", "time"):
            await self.meet_partition(driver, kind)

    async def meet_directory(self, driver: Process) -> None:
        """One of the workers has a directory of its own: a copy in which another run has begun the same incarnation."""
        disk = self.disk.copy()
        worker = SimWorker(self, "worker-own", disk)
        if self.directory(worker).state().last is None:
            for part in range(self.placement.partitions):
                disk.write(f"{self.root}/tables/0/{part}/000001-00000003.confirmed", b"another\n{}")
        self.directory(worker).begin_incarnation("another")
        before = disk.contents(self.root)
        job = self.job(3, nodes=max(2, self.wanted_nodes))
        for other in self.living()[job.cluster.nodes - 1 :]:
            other.kill()
        self.start_workers(job.cluster.nodes - 1)
        self.by_name[worker.name] = worker  # the last by name, so node 0 is another one
        await self.refuse(driver, job, ConfigError)
        assert disk.contents(self.root) == before, "a directory of another run was changed"
        assert all(isinstance(error, ConfigError) for name, *_, error in self.not_opened if name == worker.name)
        worker.kill()

    async def meet_partition(self, driver: Process, kind: str) -> None:
        """A partition was restored from a copy of another model, or of another time."""
        for process in self.living():
            process.kill()
        snapshot = self.directory(driver).resume_point()
        if snapshot is None and (kind == "time" or not self.simulated):
            return
        table, part = self.aside.randrange(self.schedule.tables), self.aside.randrange(self.placement.partitions)
        path, name = f"{self.root}/tables/{table}", None if snapshot is None else snapshot.id
        await sleep(0.0 if self.simulated else 1.0)  # until real stores are closed
        restore, self.misplaced = self.row_folders.misplace(driver, path, part, name, kind), True
        job = self.job(3)
        self.start_workers(job.cluster.nodes)
        await self.refuse(driver, job, StoreError if snapshot is None else CorruptionError)
        for process in self.living():
            process.kill()
        restore()
        self.misplaced = False

    async def refuse(self, driver: Process, job: Job, kind: type[DaskpsError]) -> None:
        """A run that must end with an error of that kind, at the first attempt that nothing else ended."""
        cluster = SimCluster(self, driver)
        task = driver.spawn(drive(cluster, job, driver.name, on_progress=lambda _: None, should_stop=lambda: False))
        may_be_lost = PeerError, LockedError, StaleError
        with contextlib.suppress(kind, *may_be_lost):
            outcome = await task
            raise AssertionError(f"went on to {outcome.snapshot} with what is not the model's")
        mine = [(incarnation, error) for _, run, incarnation, error in self.not_opened if run == driver.name]
        lost = {incarnation for incarnation, error in mine if isinstance(error, may_be_lost)}
        refused = [incarnation for incarnation, error in mine if isinstance(error, kind) and incarnation not in lost]
        assert len(refused) <= 1, f"tried again: {mine}"
        self.refused += len(refused)
        driver.kill()

    def processes_of(self, kind: type[Process]) -> list[Process]:
        return [process for process in self.processes if process.alive and isinstance(process, kind)]

    def job(self, restarts: int, nodes: int | None = None) -> Job:
        schedule, data = self.schedule, self.data
        return make_job(
            {
                "out": self.root,
                "data": {"format": "synthetic", "validation_rows": schedule.validation_rows},
                "train": {
                    "minibatch_examples": data.step_examples,
                    "batch_examples": data.step_examples * schedule.batch_steps,
                    "epochs": schedule.passes,
                    "depth": schedule.depth,
                    "snapshot_every_batches": 0 if schedule.snapshot_delays else schedule.snapshot_every,
                    "snapshot_every_minutes": schedule.snapshot_delays * schedule.mean_delay / 60,
                    "sync_every": schedule.sync_every,
                    "keep_snapshots": self.rng.randint(1, 2),
                    "validate_every_batches": schedule.validate_every,
                    "early_stopping_patience": schedule.patience * schedule.validation_rows,
                },
                "cluster": {
                    "nodes": nodes or self.wanted_nodes,
                    "partitions": schedule.partitions,
                    "wait_seconds": self.wait_seconds,
                    "restarts": restarts,
                },
            }
        )

    def plan_fault(self, driver: Process) -> None:
        """Choose what goes wrong, and when."""
        when = self.rng.random() * 60 * self.schedule.mean_delay
        kind = self.rng.choice(["worker", "worker disk", "driver", "power", "zombie"])
        self.events.append(f"{kind} at {when:.2f}")
        changes = int(self.rng.random() ** 2 * 120)

        def strike() -> None:
            if self.over:
                return
            if kind in ("worker", "worker disk") and self.living():
                victim = self.rng.choice(self.living())
                victim.kill() if kind == "worker" else setattr(victim, "dies_after", changes)
            elif kind == "driver":
                driver.kill()
            elif kind == "power":
                for process in (*self.living(), *self.processes_of(SimReader), driver):
                    process.kill()
                self.power_cut()
            elif kind == "zombie":  # a second driver takes over while the first one lives
                other = Process(self, f"usurper-{len(self.processes)}")
                self.ignore(other.spawn(self.drive(other, restarts=0)))

        self.later(when, strike)

    def watch(self, task: asyncio.Task[Any]) -> None:
        """What a reader raises counts."""

        def look(done: asyncio.Task[Any]) -> None:
            if not done.cancelled() and done.exception() is not None:
                self.failure = self.failure or done.exception()

        task.add_done_callback(look)

    def ignore(self, task: asyncio.Task[Any]) -> None:
        """A usurper may fail like any driver; only wrong results count."""

        def look(done: asyncio.Task[Any]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None and not isinstance(error, CrashError | DaskpsError | TakenOver):
                self.failure = error

        task.add_done_callback(look)


class TakenOver(Exception):  # noqa: N818
    """A driver found that another run has the model now."""


def run(seed: int, trace: Callable[..., None] = lambda *event: None, folder: Path | None = None) -> World:
    """One schedule; raises if anything is not as it must be. `trace` is told of every message.

    With `folder` the disk tier and the disk are the real ones; power is then never cut.
    """
    world, loop = World(seed, trace, folder), SimLoop()
    try:
        loop.run(world.main())
    except BaseException as error:
        error.add_note(f"seed {seed}: {world.schedule}, {world.events}")
        raise
    if world.failure is not None:
        world.failure.add_note(f"seed {seed}: {world.schedule}, {world.events}")
        raise world.failure
    return world


if __name__ == "__main__":
    logging.getLogger("daskps").setLevel(logging.ERROR)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    failed = []
    for number in range(first, first + count):
        try:
            run(number)
        except Exception:
            traceback.print_exc()
            failed.append(number)
    print(f"{count} schedules from seed {first} on, not as the dictionaries say: {failed or 'none'}")
