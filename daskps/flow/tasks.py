"""The tasks of one epoch: starting them on nodes, waiting for them, and noticing when a node is lost or stuck.

In: the cluster, the addresses of a run's workers by rank. Out: answers, or the error where it began. Dask keeps a task
whose only worker is gone until that worker comes back, so whoever waits has to look after the workers.

All that waits is a coroutine and asks the cluster alone to wait, so that the tests' cluster with its simulated clock
runs this very code. Dask's (`daskps.flow.workers`) blocks instead: there, no coroutine is ever suspended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Protocol

from distributed.scheduler import KilledWorker

from daskps.errors import BackendError, LockedError, PeerError, StaleError

LOST = (PeerError, StaleError, LockedError, KilledWorker, CancelledError)  # another epoch may do better
HOLDING = "holding"  # the one question that workers answer whatever they are at: whether they have a model open
LOOK_SECONDS = 1.0  # between two looks at whether all workers are there
CAUSE_SECONDS = 2.0  # for the node that stopped the others to say why
CLOSE_SECONDS = 30.0  # for a node to finish the stage that it is at
QUIET_SECONDS = 5.0  # nobody waits any longer for such a worker to do what it is asked to as a favour


class Task(Protocol):
    """Work on a node that was asked for. A `distributed.Future` is one."""

    @property
    def key(self) -> Any: ...
    @property
    def status(self) -> str: ...
    def done(self) -> bool: ...
    def exception(self) -> BaseException | None: ...


class Cluster(Protocol):
    """The workers, as a driver sees them."""

    def present(self) -> dict[str, float]:
        """Addresses of the workers, in order, and for how many seconds nothing was heard of each."""
        ...

    def submit(self, worker: str, stage: str, run: str, *values: Any) -> Task:
        """Have a worker run a stage, or do what else it is asked for, after the tasks that are among `values`."""
        ...

    def watch(self, task: Task) -> None:
        """Let `pause` end when this task ends."""
        ...

    async def pause(self, seconds: float) -> bool:
        """Wait until a watched task ends, or has since the last pause; False if so many seconds pass before."""
        ...

    async def fetch(self, task: Task, seconds: float) -> Any:
        """What an ended task gave or raised; TimeoutError if it cannot be had within so many seconds."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def time(self) -> float:
        """Seconds that only grow."""
        ...

    def prepare(self) -> None:
        """Make workers places where nodes can live, those that will come, too; PeerError if one goes meanwhile."""
        ...


class Tasks:
    """The tasks of one epoch."""

    def __init__(self, cluster: Cluster, workers: Sequence[str], run: str, wait_seconds: float) -> None:
        self.cluster, self.workers, self.run = cluster, list(workers), run
        self._silence_seconds = wait_seconds + CAUSE_SECONDS  # its peers, who know its stage, are to say it first
        self.doing = ""  # what the driver waits for, for errors

    def start(self, rank: int, stage: str, *values: Any) -> Task:
        """A task on a node."""
        return self.cluster.submit(self.workers[rank], stage, self.run, *values)

    async def results(self, tasks: Sequence[Task]) -> list[Any]:
        """The results, in order; the first error, or PeerError if a worker of the run goes."""
        for task in tasks:
            self.cluster.watch(task)
        results: dict[Any, Any] = {}
        while left := [task for task in tasks if task.key not in results]:
            task = await self.first(left)
            results[task.key] = await self.result(task, tasks)
        return [results[task.key] for task in tasks]

    async def first(self, tasks: Iterable[Task]) -> Task:
        """One of these watched tasks that has ended; PeerError if a worker of the run goes."""
        tasks = list(tasks)
        while True:
            for task in tasks:
                if task.done():
                    return task
            if not await self.cluster.pause(LOOK_SECONDS):
                self.look()

    async def result(self, task: Task, others: Iterable[Task]) -> Any:
        """What an ended task gave, or raised; nodes stop each other, so `others` may know better why."""
        while True:
            try:
                return await self.cluster.fetch(task, LOOK_SECONDS)
            except TimeoutError:  # what it gave was on a worker that is gone: Dask would run the task again
                if task.status == "error":
                    raise
                self.look()
            except LOST as error:
                self.look()
                raise await self._cause(error, others) from None

    async def _cause(self, error: BaseException, others: Iterable[Task]) -> BaseException:
        until = self.cluster.time() + (CAUSE_SECONDS if len(self.workers) > 1 else 0)
        for other in list(others):
            self.cluster.watch(other)
            while not other.done() and (left := until - self.cluster.time()) > 0:
                await self.cluster.pause(left)
            found: BaseException | None = other.exception() if other.status == "error" else None
            if found is not None and not isinstance(found, LOST):
                return found
        return error

    def look(self) -> None:
        """PeerError if a worker of the run is not there any more, or has been silent for too long."""
        there = self.cluster.present()
        for rank, worker in enumerate(self.workers):
            if worker not in there:
                raise PeerError(
                    f"node {rank}, {self.doing}: the worker {worker} is gone; look at its log, or its machine"
                )
            if there[worker] > self._silence_seconds:
                raise PeerError(
                    f"node {rank}, {self.doing}: the worker {worker} was not heard of for {there[worker]:.0f} s; it is "
                    "stuck: look at its log and its machine, or raise cluster.wait_seconds"
                )

    async def try_on(self, workers: Iterable[str], stage: str, *values: Any) -> dict[str, Any]:
        """Have workers do something, as far as they are there and can within a while; what those that could answer."""
        cluster = self.cluster
        asked = {worker: cluster.submit(worker, stage, self.run, *values) for worker in self._lively(workers)}
        for task in asked.values():
            cluster.watch(task)
        until = cluster.time() + CLOSE_SECONDS
        while cluster.time() < until and not all(task.done() for task in asked.values()):
            if not await cluster.pause(LOOK_SECONDS):
                asked = {worker: asked[worker] for worker in self._lively(asked)}
        answers = {}
        for worker, task in asked.items():
            if task.status == "finished":
                with contextlib.suppress(TimeoutError, *LOST):  # it is gone by now
                    answers[worker] = await cluster.fetch(task, LOOK_SECONDS)
        return answers

    async def holding(self, path: str) -> dict[str, bool | None]:
        """Of every worker, whether the model that it has open is the one at `path`; None: it has none."""
        return await self.try_on(self.cluster.present(), HOLDING, 0, path)

    def nodes_by_machine(self) -> list[int]:
        """By rank: how many nodes of the run are on the same machine, with this one."""
        machines = [worker.rpartition(":")[0] for worker in self.workers]
        return [machines.count(machine) for machine in machines]

    def _lively(self, workers: Iterable[str]) -> list[str]:
        there = self.cluster.present()
        return [worker for worker in workers if there.get(worker, QUIET_SECONDS) < QUIET_SECONDS]


async def wait_for_workers(cluster: Cluster, nodes: int, seconds: float) -> list[str]:
    """All workers, when they are enough for so many nodes."""
    until = cluster.time() + seconds
    while True:
        quiet = cluster.present()
        workers = [worker for worker in quiet if quiet[worker] < QUIET_SECONDS]
        if len(workers) >= nodes:
            return workers
        if cluster.time() >= until:
            silent = f", {len(quiet) - len(workers)} of them silent" if len(quiet) > len(workers) else ""
            raise BackendError(f"the job wants {nodes} nodes, the cluster has {len(quiet)} workers{silent}")
        await cluster.sleep(0.1)


async def choose_workers(cluster: Cluster, workers: Sequence[str], nodes: int, run: str, path: str) -> list[str]:
    """Workers for so many nodes, by rank. Where there are more, those on which another model is open come last."""
    if len(workers) == nodes:
        return list(workers)
    known = await Tasks(cluster, workers, run, 0.0).holding(path)
    return sorted(workers, key=lambda worker: known.get(worker, False) is False)[:nodes]
