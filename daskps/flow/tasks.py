"""Tasks on chosen workers: submitting them, waiting for them, and noticing when a worker or a node is lost.

In: a Dask client, the addresses of a run's workers by rank. Out: answers, or the error where it began. Dask keeps a
task whose only worker is gone until that worker comes back, so whoever waits has to look after the workers.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeAlias

from dask.base import annotate
from distributed import Client, Future
from distributed.scheduler import KilledWorker

from daskps.errors import LockedError, PeerError, StaleError

Task: TypeAlias = Future[Any]

LOST = (PeerError, StaleError, LockedError, KilledWorker, CancelledError)  # another epoch may do better
LOOK_SECONDS = 1.0  # between two looks at whether all workers are there
CAUSE_SECONDS = 2.0  # for the node that stopped the others to say why
CLOSE_SECONDS = 30.0


class Tasks:
    """The tasks of one epoch."""

    def __init__(self, client: Client, workers: Sequence[str], run: str) -> None:
        self.client, self.workers, self.run = client, list(workers), run
        self._count = 0

    def submit(self, executor: str, worker: str, call: Callable[..., Any], *values: Any) -> Task:
        """A task of this one worker's executor."""
        self._count += 1
        key = (f"daskps-{executor}", self.run, time.time_ns(), self._count)  # Dask groups tasks by the first part
        with annotate(executor=f"daskps-{executor}"):
            return self.client.submit(call, *values, key=key, pure=False, workers=[worker], retries=0)

    def results(self, futures: Sequence[Task]) -> list[Any]:
        """The results, in order; the first error, or PeerError if a worker of the run goes."""
        done: queue.Queue[Task] = queue.Queue()
        for future in futures:
            future.add_done_callback(done.put)
        results: dict[Any, Any] = {}
        while len(results) < len(futures):
            future = self.next(done)
            results[future.key] = self.result(future, futures)
        return [results[future.key] for future in futures]

    def next(self, done: queue.Queue[Task]) -> Task:
        """The next task that ends; PeerError if a worker of the run goes."""
        while True:
            try:
                return done.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                self.look()

    def result(self, future: Task, others: Iterable[Task]) -> Any:
        """What an ended task gave, or raised; nodes stop each other, so `others` may know better why."""
        while True:
            try:
                return future.result(timeout=LOOK_SECONDS)
            except TimeoutError:  # what it gave was on a worker that is gone: Dask would run the task again
                if future.status == "error":
                    raise
                self.look()
            except LOST as error:
                self.look()
                raise self._cause(error, others) from None

    def _cause(self, error: BaseException, others: Iterable[Task]) -> BaseException:
        until = time.monotonic() + (CAUSE_SECONDS if len(self.workers) > 1 else 0)
        for other in list(others):
            while not other.done() and time.monotonic() < until:
                time.sleep(0.01)
            found: BaseException | None = other.exception() if other.status == "error" else None
            if found is not None and not isinstance(found, LOST):
                return found
        return error

    def look(self) -> None:
        """PeerError if a worker of the run is not there any more."""
        there = present(self.client)
        for rank, worker in enumerate(self.workers):
            if worker not in there:
                raise PeerError(f"node {rank}, the worker {worker}, is gone; look at its log, or its machine")

    def on_present(self, workers: Iterable[str], call: Callable[..., Any], *values: Any) -> None:
        """Have workers that are there do something, as far as they can within a while."""
        futures = [
            self.submit("control", worker, call, *values) for worker in workers if worker in present(self.client)
        ]
        until = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < until and not all(future.done() for future in futures):
            time.sleep(0.005)


def present(client: Client) -> list[str]:
    """Addresses of the cluster's workers, in order."""
    return sorted(client.scheduler_info(n_workers=-1)["workers"])
