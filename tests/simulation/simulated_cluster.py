"""The simulated workers as a driver sees them: a `daskps.driver.tasks.ClusterBackend` on the simulated clock.

A task is on its way for a while, waits for the tasks before it and for its turn on the worker, and its end is heard of
later. Like Dask, a task whose worker is gone waits for ever; one whose driver is gone is forgotten if it has not begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from daskps.driver.tasks import WorkerClaim
from daskps.node.stages import Request
from daskps.types import Stage
from tests.simulation.disk import CrashError
from tests.simulation.process import Process
from tests.simulation.simloop import set_once, sleep

if TYPE_CHECKING:
    from tests.simulation.simulated_worker import SimWorker
    from tests.simulation.simulator import World


class SimTask:
    """Work that was asked for."""

    def __init__(self, key: int, worker: SimWorker) -> None:
        self.key, self.worker = key, worker
        self.status = "pending"
        self.value: Any = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(self) -> bool:
        return self.ended.done()

    def end(self, status: str, value: Any) -> None:
        self.status, self.value = status, value
        self.ended.set_result(None)


class SimCluster:
    """What one driver, a process of its own, has of the cluster."""

    def __init__(self, world: World, driver: Process) -> None:
        self._world, self._driver = world, driver
        self._ended = False  # a watched task, since the last pause
        self._pausing: asyncio.Future[bool] | None = None

    def present(self) -> dict[str, float]:
        self._breathe()
        return {worker.name: 0.0 for worker in self._world.listed()}

    def unfit(self, workers: Collection[str]) -> dict[str, str]:
        return {}

    def claim(self, run: str, nodes: int, model: str, fit: Sequence[str]) -> WorkerClaim:
        """Like a scheduler that was cut off and takes every other driver for dead: incarnations must be enough."""
        self._breathe()
        return WorkerClaim(tuple(fit[:nodes]) if len(fit) >= nodes else ())

    def held(self, run: str) -> dict[str, str]:
        return {}

    def prepare(self, run: str, workers: Sequence[str]) -> None:
        self._breathe()

    def submit(self, worker: str, task: Stage | Request, run: str, *values: Any) -> SimTask:
        self._breathe()
        self._world.tasks += 1
        started = SimTask(self._world.tasks, self._world.by_name[worker])
        before = [value for value in values if isinstance(value, SimTask)]
        plain = [value for value in values if not isinstance(value, SimTask)]
        self._world.spawn(self._run(started, before, task, run, plain))
        return started

    async def _run(
        self, task: SimTask, before: list[SimTask], what: Stage | Request, run: str, values: list[Any]
    ) -> None:
        for earlier in before:
            await earlier.ended
            if earlier.status == "error":
                task.end("error", earlier.value)
                return
        await sleep(self._world.delay())
        worker = task.worker
        if not (worker.alive and self._driver.alive):
            return
        work = worker.spawn(worker.run(what, run, values))
        await _either(work, worker.lost)
        if not work.done() or work.cancelled():
            return  # the worker died
        error = work.exception()
        await sleep(self._world.delay())
        if isinstance(error, CrashError):
            return
        if error is None:
            task.end("finished", work.result())
        else:
            task.end("error", error)

    def watch(self, task: Any) -> None:
        task.ended.add_done_callback(self._wake)

    def _wake(self, ended: Any) -> None:
        self._ended = True
        if self._pausing is not None:
            set_once(self._pausing, True)

    async def pause(self, seconds: float) -> bool:
        self._breathe()
        if not self._ended:
            loop = asyncio.get_running_loop()
            self._pausing = loop.create_future()
            timer = loop.call_later(seconds, set_once, self._pausing, False)
            try:
                await self._pausing
            finally:
                timer.cancel()
        self._breathe()
        ended, self._ended = self._ended, False
        return ended

    async def fetch(self, task: Any, seconds: float) -> Any:
        await self.sleep(self._world.delay())
        if task.status == "error":
            raise task.value
        if not task.worker.alive:  # small results stay where they were made
            await self.sleep(seconds)
            raise TimeoutError
        return task.value

    def error(self, task: Any) -> BaseException | None:
        return task.value if task.status == "error" else None

    async def sleep(self, seconds: float) -> None:
        self._breathe()
        await sleep(seconds)
        self._breathe()

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def _breathe(self) -> None:
        """A driver that was killed does nothing any more."""
        if not self._driver.alive:
            raise CrashError


async def _either(one: asyncio.Future[Any], other: asyncio.Future[Any]) -> None:
    """Return when one of them is done. `asyncio.wait` does the same in three times the time."""
    over = asyncio.get_running_loop().create_future()

    def end(_: asyncio.Future[Any]) -> None:
        set_once(over, None)

    one.add_done_callback(end)
    other.add_done_callback(end)
    try:
        await over
    finally:
        one.remove_done_callback(end)
        other.remove_done_callback(end)
