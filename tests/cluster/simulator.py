"""A whole cluster in one thread: nodes, driver, network and disk, with a seed for everything that may go wrong.

The real code runs: the driver (`daskps.flow.driver`, with what it uses), what a worker does when a driver comes,
`daskps.cluster` (commit, owner, requester, exchange) and `daskps.mem`. Simulated are time, the network (messages
delayed and reordered, processes lost), the disk (unsynced writes lost), row stores, Dask, and the stages' work:
training is an integer function. Everything is compared with plain dictionaries, at every pull, at every opening of a
snapshot, and at the end. `python -m tests.cluster.simulator FIRST COUNT` runs schedules from the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from daskps.cluster.commit import ModelDirectory, Snapshot
from daskps.cluster.files import LocalFiles
from daskps.cluster.message import Message
from daskps.config import Job, make_job
from daskps.errors import DaskpsError, LockedError, PeerError, StaleError, TrainingError
from daskps.flow.driver import drive
from daskps.flow.progress import Outcome, Progress
from daskps.ssd.placement import Placement
from daskps.types import Field, RowLayout
from tests.cluster import reference
from tests.cluster.disk import CrashError, SimulatedDisk
from tests.cluster.process import Process
from tests.cluster.reference import Apart, Data, Model, Row, States
from tests.cluster.schedule import Schedule
from tests.cluster.simloop import SimLoop, sleep
from tests.cluster.simulated_cluster import SimCluster
from tests.cluster.simulated_directory import Entries, SimLog, pack, unpack
from tests.cluster.simulated_store import RealShelf, SimulatedShelf
from tests.cluster.simulated_worker import SimWorker


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
        self.apart = Apart(self.data, tables, every) if every > 1 else None
        self.together = States.of(self.data, tables) if every == 1 else None
        value = Field("value", 1, "uint32" if self.apart is None else "float32")
        self.layout = RowLayout((value, Field("count", 1, "uint32")))
        self.placement = Placement(self.schedule.partitions, self.schedule.partition_by)  # type: ignore[arg-type]
        self.root = "model" if folder is None else f"{folder}/model"
        self.disk: Any = SimulatedDisk(random.Random(seed + 1)) if folder is None else LocalFiles()
        self.shelf: Any = SimulatedShelf(self.layout) if folder is None else RealShelf(self.layout)
        self.entries: Entries = {}
        self.by_name: dict[str, SimWorker] = {}
        self.processes: list[Process] = []
        self.tokens = self.tasks = 0
        self.running: set[asyncio.Task[Any]] = set()  # what the scheduler is at
        # What happened, for statistics.
        self.stale = self.late = self.copied = self.in_place = self.most_nodes = self.restarts = 0
        self.evaluated = self.stopped = self.merges = 0
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
        def token() -> str:
            self.tokens += 1
            return f"{self.tokens:06d}"

        files: Any = process.files
        log = SimLog(files, f"{self.root}/log", token, self.entries)
        return ModelDirectory(self.root, files, clock=lambda: 0.0, log=log, pack=pack, unpack=unpack)

    def release(self, process: Process) -> None:
        self.shelf.release(process)

    def power_cut(self) -> None:
        if isinstance(self.disk, SimulatedDisk):  # a real disk keeps its power
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

    def model_after(self, epoch: int, batch: int, step: int) -> Model:
        """The dictionaries after a batch of an epoch, which has trained all steps before `step`."""
        if self.together is not None:
            return self.together.rows[step], (self.together.dense[step], 0)
        assert self.apart is not None
        return self.apart.after[epoch, batch]

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

    def check_snapshot(self, snapshot: Snapshot | None) -> None:
        """What an epoch starts from must be the newest that anybody was told of, and whole."""
        position = -1 if snapshot is None else snapshot.draft.position
        assert position >= self.least, f"snapshot at {self.least} was published, but {position} is opened"
        self.least = position

    def check_end(self, snapshot: str | None) -> None:
        """The model on disk, read as a stranger would: nothing left over, and whole after a power cut."""
        stranger = Process(self, "stranger")
        if not any(event.startswith("zombie") for event in self.events):
            self.check_tidy(self.directory(stranger), stranger)
        self.power_cut()
        directory = self.directory(stranger)
        found = directory.snapshot()
        assert found is not None
        assert found.id == snapshot
        assert found.draft.position == self.data.steps * self.data.step_examples
        model = self.model_after(found.epoch, found.draft.batch, self.data.steps)
        assert self.dense_of(directory.load(found)) == model[1]
        live = directory.state().live
        for table, expected in enumerate(model[0]):
            rows = self.shelf.read(stranger, f"{self.root}/tables/{table}", self.placement, found.id, live)
            keys = np.array([*expected], np.uint64)
            bits = np.array([np.frombuffer(rows[key], np.float32) for key in expected], np.float32).reshape(-1, 2)
            self.check_rows(model, table, keys, bits, "the final model")

    def check_tidy(self, directory: ModelDirectory, process: Process) -> None:
        """Partitions have what the log says and nothing else, and so has the folder of snapshots."""
        live = set(directory.state().live)
        assert set(self.disk.list(f"{self.root}/snapshots")) == live
        for table in range(self.schedule.tables):
            for found in self.shelf.snapshots(process, f"{self.root}/tables/{table}", self.placement):
                assert found == (set(), live)

    # -------------------------------------------------------------------- the run

    async def main(self) -> None:
        """Drivers, one after the other, until the model is trained; faults in between."""
        self.wanted_nodes = 1
        asyncio.get_running_loop().call_soon(self.nannies, False)
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
            driver = Process(self, f"driver-{attempt}")
            task = driver.spawn(self.drive(driver))
            if faults > 0:
                faults -= 1
                self.plan_fault(driver)
            outcome: Outcome | None = None
            with contextlib.suppress(PeerError, LockedError, StaleError, CrashError, asyncio.CancelledError, TakenOver):
                outcome = await task
            if outcome is not None and outcome.progress.position == self.data.steps * self.data.step_examples:
                self.over = True
                await sleep(60 + 100 * self.schedule.mean_delay)  # until slow nodes have closed, too
                self.check_end(outcome.snapshot)
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
        batches = 0

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
        self.restarts += outcome.progress.restarts
        return outcome

    def job(self, restarts: int) -> Job:
        schedule, data = self.schedule, self.data
        return make_job(
            {
                "out": self.root,
                "data": {"format": "synthetic"},
                "train": {
                    "minibatch_examples": data.step_examples,
                    "batch_examples": data.step_examples * schedule.batch_steps,
                    "epochs": schedule.passes,
                    "depth": schedule.depth,
                    "snapshot_every_batches": schedule.snapshot_every,
                    "keep_snapshots": self.rng.randint(1, 2),
                    "validate_every_batches": schedule.validate_every,
                },
                "cluster": {
                    "nodes": self.wanted_nodes,
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
                for process in (*self.living(), driver):
                    process.kill()
                self.power_cut()
            elif kind == "zombie":  # a second driver takes over while the first one lives
                other = Process(self, f"usurper-{len(self.processes)}")
                self.ignore(other.spawn(self.drive(other, restarts=0)))

        self.later(when, strike)

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
