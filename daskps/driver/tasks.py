"""Tasks of a driver: claim workers, start tasks on them, wait for results, notice lost workers and find the cause.

Input: a `ClusterBackend` (Dask's, or the tests' simulator). Output: results of tasks by rank, or the error that ended
the run.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, Protocol

from daskps.errors import BackendError, LockedError, PeerError, StaleError
from daskps.node.dask import THREADS
from daskps.node.stages import Request
from daskps.types import Stage


@dataclass(frozen=True, slots=True)
class WorkerClaim:
    """Answer to a claim: the workers by rank, or none and the reason."""

    workers: tuple[str, ...]
    held: dict[str, str] = field(default_factory=dict)  # suitable workers that other runs have: worker -> holder
    busy_model: str = ""  # the run that trains the same model


logger = logging.getLogger("daskps.driver")

RETRYABLE = (PeerError, StaleError, LockedError, CancelledError)  # errors after which a new incarnation may succeed
LOOK_SECONDS = 1.0  # interval between checks that all workers are alive
CAUSE_SECONDS = 2.0  # wait for the error of the node that stopped the others
CLOSE_SECONDS = 30.0  # wait for a node to finish its current stage
SOON_LOOKS = 50  # the first 50 checks for workers are 0.1 s apart, later ones 1 s: a run may wait for hours
QUIET_SECONDS = 5.0  # workers silent for longer are skipped in best-effort calls (close, release) and in claims


class Task(Protocol):
    """Task on a worker. A `distributed.Future` is one."""

    @property
    def key(self) -> Any:
        """Identity of the task."""
        ...

    @property
    def status(self) -> str:
        """State of the task: ``pending``, ``finished``, ``error``, or ``cancelled`` and ``lost`` (Dask)."""
        ...

    def done(self) -> bool:
        """Return True if the task has ended, with a result or an error."""
        ...


class ClusterBackend(Protocol):
    """Workers and tasks as a driver needs them: Dask (`driver.dask.DaskBackend`), or the tests' simulator.

    A task whose worker is lost may stay pending for ever, so the driver asks `present` now and then. Methods that wait
    are coroutines: Dask's block, the simulator's run on its event loop. One driver uses one backend:

        workers = backend.claim(run, nodes=2, model=path, fit=[*backend.present()]).workers
        backend.prepare(run, workers)
        read = backend.submit(workers[0], Stage.READ, run, token)
        backend.watch(read)
        while not read.done() and workers[0] in backend.present():
            await backend.pause(1.0)
        answer = await backend.fetch(read, 1.0)

    tests/contracts/test_cluster_backends.py has what every implementation must do.
    """

    def present(self) -> dict[str, float]:
        """Return the addresses of the workers, in order, and for each the seconds since its last heartbeat."""
        ...

    def submit(self, worker: str, task: Stage | Request, run: str, *values: Any) -> Task:
        """Start a stage or a request on a worker, after the tasks that are among `values`.

        If one of those fails, this one fails with the same error and does not run. Tasks of one stage, and requests,
        run one at a time on a worker, in the order of their dependencies.
        """
        ...

    def watch(self, task: Task) -> None:
        """Make `pause` end when this task ends."""
        ...

    async def pause(self, seconds: float) -> bool:
        """Wait until a watched task ends, or has ended since the last pause; return False after `seconds`."""
        ...

    async def fetch(self, task: Task, seconds: float) -> Any:
        """Return the result of an ended task, or raise its error; TimeoutError if it does not come in `seconds`."""
        ...

    def error(self, task: Task) -> BaseException | None:
        """Return the error of a task that has ended with one; None for any other task."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...

    def time(self) -> float:
        """Return a monotonic time in seconds."""
        ...

    def unfit(self, workers: Collection[str]) -> dict[str, str]:
        """Return those of these workers that cannot run a node of this driver, and why."""
        ...

    def claim(self, run: str, nodes: int, model: str, fit: Sequence[str]) -> WorkerClaim:
        """Claim `nodes` of the `fit` workers for a run of the model at path `model`: all of them or none.

        Workers that other runs have are not taken.
        """
        ...

    def held(self, run: str) -> dict[str, str]:
        """Return the workers that other runs have, and which run."""
        ...

    def prepare(self, run: str, workers: Sequence[str]) -> None:
        """Install what a node needs on claimed workers; raise PeerError if one is lost meanwhile."""
        ...


class Tasks:
    """Tasks of one incarnation."""

    def __init__(self, cluster: ClusterBackend, workers: Sequence[str], run: str, wait_seconds: float) -> None:
        self.cluster, self.workers, self.run = cluster, list(workers), run
        self._silence_seconds = wait_seconds + CAUSE_SECONDS  # longer: its peers know its stage and report it first
        self.waiting_for = ""  # what the driver waits for; part of error messages

    def start(self, rank: int, task: Stage | Request, *values: Any) -> Task:
        """Start a task on a node."""
        return self.cluster.submit(self.workers[rank], task, self.run, *values)

    async def results(self, tasks: Sequence[Task]) -> list[Any]:
        """Return the results, in order; raise the first error, or PeerError if a worker of the run is lost."""
        for task in tasks:
            self.cluster.watch(task)
        results: dict[Any, Any] = {}
        while left := [task for task in tasks if task.key not in results]:
            task = await self.first(left)
            results[task.key] = await self.result(task, tasks)
        return [results[task.key] for task in tasks]

    async def first(self, tasks: Iterable[Task]) -> Task:
        """Wait until one of these watched tasks has ended and return it; PeerError if a worker of the run is lost."""
        tasks = list(tasks)
        while True:
            for task in tasks:
                if task.done():
                    return task
            if not await self.cluster.pause(LOOK_SECONDS):
                self.check_alive()

    async def result(self, task: Task, others: Iterable[Task]) -> Any:
        """Return the result of an ended task, or raise its error.

        Nodes stop each other, so the true cause may be the error of one of the tasks in `others`.
        """
        while True:
            try:
                return await self.cluster.fetch(task, LOOK_SECONDS)
            except TimeoutError:  # its result was on a lost worker, and Dask would run the task again
                if task.status == "error":
                    raise
                self.check_alive()
            except RETRYABLE as error:
                self.check_alive()
                raise await self._cause(error, others) from None

    async def _cause(self, error: BaseException, others: Iterable[Task]) -> BaseException:
        """Return the first error of `others` that is not retryable, or else `error`; wait CAUSE_SECONDS for it."""
        until = self.cluster.time() + (CAUSE_SECONDS if len(self.workers) > 1 else 0)
        for other in list(others):
            self.cluster.watch(other)
            while not other.done() and (left := until - self.cluster.time()) > 0:
                await self.cluster.pause(left)
            found = self.cluster.error(other)
            if found is not None and not isinstance(found, RETRYABLE):
                return found
        return error

    def check_alive(self) -> None:
        """Raise PeerError if a worker of the run is gone or has been silent for too long."""
        there = self.cluster.present()
        for rank, worker in enumerate(self.workers):
            if worker not in there:
                raise PeerError(
                    f"node {rank}, {self.waiting_for}: the worker {worker} is gone; look at its log, or its machine"
                )
            if there[worker] > self._silence_seconds:
                raise PeerError(
                    f"node {rank}, {self.waiting_for}: the worker {worker} has been silent for {there[worker]:.0f} s; "
                    "it is stuck: look at its log and its machine, or raise cluster.wait_seconds"
                )

    async def run_best_effort(self, workers: Iterable[str], request: Request, *values: Any) -> dict[str, Any]:
        """Run a request on workers with best effort: skip silent ones, wait at most CLOSE_SECONDS, ignore errors.

        Return the answers by worker, of those that answered.
        """
        cluster = self.cluster
        asked = {worker: cluster.submit(worker, request, self.run, *values) for worker in self._lively(workers)}
        for task in asked.values():
            cluster.watch(task)
        until = cluster.time() + CLOSE_SECONDS
        while cluster.time() < until and not all(task.done() for task in asked.values()):
            if not await cluster.pause(LOOK_SECONDS):
                asked = {worker: asked[worker] for worker in self._lively(asked)}
        answers = {}
        for worker, task in asked.items():
            if task.status == "finished":
                with contextlib.suppress(TimeoutError, *RETRYABLE):  # the worker is gone by now
                    answers[worker] = await cluster.fetch(task, LOOK_SECONDS)
        return answers

    async def holding(self, path: str) -> dict[str, bool | None]:
        """Return for every worker True if it has the model at `path` open, False if another one, None if none."""
        return await self.run_best_effort(self.able(), Request.HOLDING, 0, path)

    def able(self) -> list[str]:
        """Return all workers that may have a node.

        A worker without this version of daskps has none, and our task would end its process.
        """
        lively = self._lively(self.cluster.present())
        unfit = self.cluster.unfit(lively)
        return [worker for worker in lively if worker not in unfit]

    def nodes_by_machine(self) -> list[int]:
        """Return by rank the number of the run's nodes on the same machine, including this one."""
        machines = [worker.rpartition(":")[0] for worker in self.workers]
        return [machines.count(machine) for machine in machines]

    def _lively(self, workers: Iterable[str]) -> list[str]:
        """Return the workers that were heard of within QUIET_SECONDS."""
        there = self.cluster.present()
        return [worker for worker in workers if there.get(worker, QUIET_SECONDS) < QUIET_SECONDS]


async def claim_workers(
    cluster: ClusterBackend, nodes: int, run: str, model: str, seconds: float, should_stop: Callable[[], bool]
) -> list[str]:
    """Wait for enough workers and claim them; return them by rank. From now on they belong to the run.

    Raise BackendError after `seconds`, or as soon as `should_stop()` is True.
    """
    begun, looks, named = cluster.time(), 0, ""
    while True:
        quiet = cluster.present()
        lively = [worker for worker in quiet if quiet[worker] < QUIET_SECONDS]
        unfit = cluster.unfit(lively)
        answer = cluster.claim(run, nodes, model, [worker for worker in lively if worker not in unfit])
        why = _listed("not chosen", unfit)
        if answer.workers:
            if why:
                logger.warning("workers %s", why)
            return list(answer.workers)
        lacking = [f"the job wants {nodes} nodes, the cluster has {len(quiet)} workers"]
        if len(quiet) > len(lively):
            lacking.append(f"{len(quiet) - len(lively)} of them silent")
        words = "; ".join(part for part in (", ".join(lacking), _listed("held", answer.held), why) if part)
        if answer.busy_model:
            words = f"{model} is being trained by {answer.busy_model}"
        waited = cluster.time() - begun
        if waited >= seconds or should_stop():
            waited = round(min(waited, seconds), 1)
            raise BackendError(
                f"{words}. Waited {waited:g} s: start more workers (`dask worker SCHEDULER --nworkers 1 --nthreads "
                f"{THREADS} --memory-limit 0`), stop the other run, or wait longer (--wait SECONDS, worker_seconds)"
            )
        if words != named:
            logger.info("waiting up to %g s for workers: %s", round(seconds - waited, 1), words)
            named = words
        looks += 1
        await cluster.sleep(0.1 if looks < SOON_LOOKS else min(1.0, max(0.1, seconds - waited)))


def _listed(what: str, workers: dict[str, str]) -> str:
    """Return a list of workers with the reason for each, as text; empty if there are none."""
    return f"{what}: " + ", ".join(f"{worker} ({why})" for worker, why in workers.items()) if workers else ""
