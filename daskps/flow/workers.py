"""Dask's workers as a driver sees them: tasks pinned to one worker and one stage's executor.

In: a Dask client. Out: what `daskps.flow.tasks.Cluster` says. Everything blocks the calling thread, so a coroutine that
waits for nothing else is never suspended, and `run_blocking` runs it to its end without an event loop: `train` may be
called where one is running already, as in a notebook.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

from dask.base import annotate
from distributed import Client, Future

from daskps.cluster.plugin import STAGES, NannyMemoryPlugin, NodePlugin
from daskps.errors import PeerError, TrainingError
from daskps.flow.stages import run_control, run_stage
from daskps.flow.tasks import HOLDING, Task

T = TypeVar("T")
CONTROL = "control"


class Workers:
    """The workers behind a client, whose scheduler may take `wait_seconds` to answer."""

    def __init__(self, client: Client, wait_seconds: float) -> None:
        self._client, self._wait_seconds = client, wait_seconds
        self._count = 0
        self._ended = threading.Event()
        self._heard: dict[str, tuple[float, float]] = {}  # of each worker: its last heartbeat, and when we saw it first

    def prepare(self) -> None:
        """Register the plugins; workers that come later get them, too."""
        try:
            self._client.register_plugin(NodePlugin())
            self._client.register_plugin(NannyMemoryPlugin())
        except OSError as error:
            raise PeerError(f"a worker was lost while the run began: {error!r}") from None

    def present(self) -> dict[str, float]:
        """Seconds without a heartbeat of every worker; counted here, as clocks of machines differ."""
        try:
            if (scheduler := self._client.scheduler) is None:
                raise OSError("the client is closed")
            # Client.scheduler_info may give what it was told before, or what it asks for in the background: of five.
            answer = self._client.sync(scheduler.identity, n_workers=-1, callback_timeout=self._wait_seconds)
            found = answer["workers"]
            now = time.monotonic()
        except OSError as error:
            raise TrainingError(
                f"Dask's scheduler is gone, or stuck: {error!r}; nothing is lost: start it again with its workers, "
                "then train again, which goes on from the last snapshot"
            ) from None
        self._heard = {
            worker: known
            if (known := self._heard.get(worker)) and known[0] == about["last_seen"]
            else (about["last_seen"], now)
            for worker, about in sorted(found.items())
        }
        return {worker: now - since for worker, (_, since) in self._heard.items()}

    def submit(self, worker: str, stage: str, run: str, *values: Any) -> Task:
        """A task of this one worker: `run_stage` for a stage of a batch, `run_control` for everything else."""
        self._count += 1
        staged = stage in STAGES and stage != CONTROL
        name = f"daskps-{stage if staged else CONTROL}"
        executor = "default" if stage == HOLDING else name
        key = (name, run, time.time_ns(), self._count)  # Dask groups tasks by the first part
        values = (stage, *values) if staged else (stage, run, *values)
        with annotate(executor=executor):
            future: Future[Any] = self._client.submit(
                run_stage if staged else run_control, *values, key=key, pure=False, workers=[worker], retries=0
            )
        return cast(Task, future)

    def watch(self, task: Task) -> None:
        """Let `pause` end when this task ends."""
        cast("Future[Any]", task).add_done_callback(lambda _: self._ended.set())

    async def pause(self, seconds: float) -> bool:
        """Wait until a watched task ends, or has since the last pause."""
        ended = self._ended.wait(seconds)
        self._ended.clear()  # who is told later sets it again; who was told before is seen by the caller
        return ended

    async def fetch(self, task: Task, seconds: float) -> Any:
        """What an ended task gave or raised."""
        try:
            return cast("Future[Any]", task).result(timeout=seconds)
        except OSError:
            if task.status == "error":
                raise
            raise TimeoutError from None  # the scheduler, or who has the result, does not answer

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def time(self) -> float:
        """The machine's clock."""
        return time.monotonic()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits by blocking only."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    coroutine.close()
    raise AssertionError("the coroutine waits for an event loop")
