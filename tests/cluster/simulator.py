"""A whole cluster in one thread: nodes, driver, network and disk, with a seed for everything that may go wrong.

The real code runs: `daskps.cluster` (driver, commit, owner, requester, exchange) and `daskps.mem`. Simulated are time,
the network (messages delayed and reordered, processes lost), the disk (unsynced writes lost), row stores, and training,
which is an integer function. Everything is compared with plain dictionaries, at every pull, at every opening of a
snapshot, and at the end. `python -m tests.cluster.simulator FIRST COUNT` runs schedules from the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from daskps.cluster.commit import ModelDirectory, Snapshot
from daskps.cluster.driver import Plan, drive
from daskps.cluster.files import LocalFiles
from daskps.cluster.log import Log
from daskps.cluster.message import Message
from daskps.errors import DaskpsError, LockedError, PeerError, StaleError
from daskps.ssd.placement import Placement
from tests.cluster import reference
from tests.cluster.disk import CrashError, SimulatedDisk
from tests.cluster.process import Process
from tests.cluster.reference import Data, States
from tests.cluster.simloop import SimLoop
from tests.cluster.simulated_crew import SimCrew
from tests.cluster.simulated_node import LAYOUT, SimNode
from tests.cluster.simulated_store import RealShelf, SimulatedShelf


@dataclass(frozen=True)
class Schedule:
    """What a seed decides at the start."""

    tables: int
    partitions: int
    partition_by: str
    depth: int
    batch_steps: int
    snapshot_every: int
    cache_rows: int
    mean_delay: float
    faults: int
    check_replicas: bool


class World:
    """Everything there is."""

    def __init__(self, seed: int, trace: Callable[..., None], folder: Path | None) -> None:
        self.trace = trace
        self.rng = rng = random.Random(seed)
        self.wait_seconds = 300.0
        self.schedule = Schedule(
            tables=rng.choice([1, 1, 2]),
            partitions=rng.randint(5, 7),
            partition_by=rng.choice(["mixed", "modulo"]),
            depth=rng.randint(1, 4),
            batch_steps=rng.randint(1, 3),
            snapshot_every=rng.randint(1, 4),
            cache_rows=rng.choice([16, 24, 64, 200]),
            mean_delay=rng.choice([0.01, 0.2, 1.0]),
            faults=rng.choice([0, 1, 1, 2, 3]),
            check_replicas=rng.random() < 0.5,
        )
        self.data = Data.make(
            *(rng, self.schedule.tables), steps=rng.randint(3, 8), step_examples=rng.randint(1, 6), universe=12
        )
        self.states = States.of(self.data, self.schedule.tables)
        self.placement = Placement(self.schedule.partitions, self.schedule.partition_by)  # type: ignore[arg-type]
        self.root = "model" if folder is None else f"{folder}/model"
        self.disk: Any = SimulatedDisk(random.Random(seed + 1)) if folder is None else LocalFiles()
        self.shelf: Any = SimulatedShelf(LAYOUT) if folder is None else RealShelf(LAYOUT)
        self.nodes: list[SimNode] = []  # all workers that live, in use or not
        self.processes: list[Process] = []
        self.tokens = 0
        self.restarts = -1  # epochs begun but for the first
        self.stale = self.late = self.copied = self.most_nodes = 0  # what happened, for statistics
        self.least = -1  # the newest snapshot whose publishing was told to anybody, as a position
        self.events: list[str] = []

    # ------------------------------------------------------------------- services

    def delay(self) -> float:
        """Mostly short, sometimes long enough to be overtaken by everything."""
        return self.rng.expovariate(1 / self.schedule.mean_delay) * (20 if self.rng.random() < 0.05 else 1)

    def carry(self, sender: SimNode, receiver: SimNode, message: Message) -> None:
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
        log = Log(files, f"{self.root}/log", token)
        return ModelDirectory(self.root, files, clock=lambda: 0.0, log=log)

    def release(self, process: Process) -> None:
        self.shelf.release(process)

    def power_cut(self) -> None:
        if isinstance(self.disk, SimulatedDisk):  # a real disk keeps its power
            self.disk.power_cut()

    def muster(self) -> list[SimNode]:
        """Workers for an epoch: new ones for the lost, and now and then another number of them."""
        self.nodes = [node for node in self.nodes if node.alive]
        if self.restarts < 0 or self.rng.random() < 0.3:
            self.wanted_nodes = self.rng.randint(1, 5)
        while len(self.nodes) < self.wanted_nodes:
            self.tokens += 1
            self.nodes.append(SimNode(self, f"worker-{self.tokens}"))
        self.most_nodes = max(self.most_nodes, self.wanted_nodes)
        self.restarts += 1
        return self.rng.sample(self.nodes, self.wanted_nodes)

    def initial(self, table: int, keys: np.ndarray, out: np.ndarray) -> None:
        for place, key in enumerate(keys.tolist()):
            out.view(np.uint32)[place] = reference.initial(self.data.seed, table, key)

    # --------------------------------------------------------------------- checks

    def check_rows(self, step: int, table: int, keys: np.ndarray, rows: np.ndarray, where: str) -> None:
        """Rows must be as the dictionary has them before `step`."""
        for key, row in zip(keys.tolist(), rows.view(np.uint32).tolist(), strict=True):
            expected = self.states.rows[step][table].get(key) or reference.initial(self.data.seed, table, key)
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

    def check_end(self, snapshot: Snapshot | None) -> None:
        """The model on disk, read as a stranger would: nothing left over, and whole after a power cut."""
        stranger = Process(self, "stranger")
        if not any(event.startswith("zombie") for event in self.events):
            self.check_tidy(self.directory(stranger), stranger)
        self.power_cut()
        directory = self.directory(stranger)
        found = directory.snapshot()
        assert found is not None
        assert snapshot is not None
        assert found.id == snapshot.id
        assert found.draft.position == self.data.steps * self.data.step_examples
        assert int(directory.load(found)["dense"][0]) == self.states.dense[-1]
        live = directory.state().live
        for table, expected in enumerate(self.states.rows[-1]):
            rows = self.shelf.read(stranger, f"{self.root}/tables/{table}", self.placement, found.id, live)
            keys = np.array([*expected], np.uint64)
            bits = np.array([np.frombuffer(rows[key], np.float32) for key in expected], np.float32).reshape(-1, 2)
            self.check_rows(self.data.steps, table, keys, bits, "the final model")

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
        try:
            await self.train()
        finally:
            for process in self.processes:
                process.kill()

    async def train(self) -> None:
        loop = asyncio.get_running_loop()
        faults = self.schedule.faults
        snapshot = None
        for attempt in range(40):
            driver = Process(self, f"driver-{attempt}")
            plan = Plan(self.schedule.depth, keep_snapshots=self.rng.randint(1, 2), restarts=3)
            task = driver.spawn(drive(self.directory(driver), SimCrew(self, driver), "run", plan))
            if faults > 0:
                faults -= 1
                self.plan_fault(loop, driver)
            with contextlib.suppress(PeerError, LockedError, StaleError, CrashError, asyncio.CancelledError):
                snapshot = await task
                self.check_end(snapshot)
                return
            driver.kill()
            await asyncio.sleep(self.delay())
        raise AssertionError("no driver came to an end")

    def plan_fault(self, loop: asyncio.AbstractEventLoop, driver: Process) -> None:
        """Choose what goes wrong, and when."""
        when = self.rng.random() * 60 * self.schedule.mean_delay
        kind = self.rng.choice(["worker", "worker disk", "driver", "driver disk", "power", "zombie"])
        self.events.append(f"{kind} at {when:.2f}")
        changes = int(self.rng.random() ** 2 * 120)

        def strike() -> None:
            if kind in ("worker", "worker disk") and self.nodes:
                victim = self.rng.choice(self.nodes)
                victim.kill() if kind == "worker" else setattr(victim, "dies_after", changes)
            elif kind == "driver":
                driver.kill()
            elif kind == "power":
                for process in (*self.nodes, driver):
                    process.kill()
                self.power_cut()
            elif kind == "zombie":  # a second driver takes over while the first one lives
                other = Process(self, "usurper")
                self.ignore(other.spawn(drive(self.directory(other), SimCrew(self, other), "run", Plan(2, restarts=0))))

        if kind == "driver disk":
            driver.dies_after = changes
        else:
            loop.call_later(when, strike)

    def ignore(self, task: asyncio.Task[Any]) -> None:
        """A usurper may fail like any driver; only wrong results count."""

        def look(done: asyncio.Task[Any]) -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None and not isinstance(error, PeerError | StaleError | CrashError | DaskpsError):
                self.failure = error

        self.failure: BaseException | None = None
        task.add_done_callback(look)


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
    failure = getattr(world, "failure", None)
    if failure is not None:
        raise failure
    return world


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for number in range(first, first + count):
        run(number)
    print(f"{count} schedules from seed {first} on: all as the dictionaries say")
