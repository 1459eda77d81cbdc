"""A simulated worker: runs what drivers ask for, each kind of stage on a thread of its own, as executors do.

What happens to the node that is open here when a driver comes (`release`, `find_node`, `take_over` ...) is real code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from daskps.errors import DaskpsError, StaleError
from daskps.node.begin import IncarnationStart, take_over
from daskps.node.dask import CONTROL
from daskps.node.stages import Request, check_free, close, find_node, holding, method_of, release
from daskps.storage.model_directory import ModelDirectory
from daskps.types import BatchId, Stage
from daskps.wire.message import Message, MessageKind, refusal
from tests.simulation.process import Process
from tests.simulation.simulated_node import SimNode

if TYPE_CHECKING:
    from tests.simulation.simulator import World


class SimWorker(Process):
    """A worker and its place for a node, `node`."""

    def __init__(self, world: World, name: str, disk: Any = None) -> None:
        super().__init__(world, name, disk)
        self.node: SimNode | None = None
        self.opening: str | None = None
        self._threads: dict[str, asyncio.Lock] = {}
        self.gone_at: float | None = None  # when the scheduler hears that it is

    async def run(self, task: Stage | Request, run: str, values: list[Any]) -> Any:
        """What Dask would run as `run_stage` or `run_request`."""
        if isinstance(task, Stage):
            token: BatchId = values[0]
            async with self._threads.setdefault(task, asyncio.Lock()):
                node = find_node(self, task, token.run, token.incarnation)
                return await self._guarded(node, node.stages()[task], values)
        async with self._threads.setdefault(CONTROL, asyncio.Lock()):
            return await self._answer(task, run, *values)

    async def _answer(self, request: Request, run: str, incarnation: int, *values: Any) -> Any:
        match request:
            case Request.HOLDING:
                return holding(self, *values)
            case Request.BEGIN:
                return self._begin(run, incarnation, *values)
            case Request.RELEASE:
                return release(self, run, incarnation, *values)
            case Request.OPEN:
                check_free(self)
                rank, nodes, job, begun, _, _ = values
                try:
                    self.node = SimNode(self, run, rank, nodes, job, begun)
                except Exception as error:
                    self.world.not_opened.append((self.name, run, incarnation, error))
                    raise
                return self.node.info()
            case Request.CLOSE:
                return close(self, run, incarnation)
        node = find_node(self, request, run, incarnation)
        return await self._guarded(node, method_of(node, request), list(values))

    def _begin(self, run: str, incarnation: int, *values: Any) -> IncarnationStart:
        if not (incarnation or values[1:]):  # of what a node without a driver has, the driver asks anyway
            self.world.row_folders.check_outlived()
        taken = take_over(self.directory(), run, incarnation)
        snapshot = self.directory().resume_point()
        self.world.check_snapshot(snapshot)
        return IncarnationStart(taken.number, taken.index, snapshot.id if snapshot else None, None, taken.model)

    async def _guarded(self, node: SimNode, call: Callable[..., Awaitable[Any]], values: list[Any]) -> Any:
        """What is raised inside stops all nodes."""
        try:
            return await call(*values)
        except Exception as error:
            if node.peers is not None:
                node.peers.session.fail(error if isinstance(error, DaskpsError) else DaskpsError(repr(error)))
            raise

    def deliver(self, sender: SimWorker, message: Message) -> None:
        node = self.node
        try:
            if node is None:
                raise StaleError("no incarnation is open here")
            if node.peers is None:
                node.early.append((sender, message))  # it waits in the socket
                return
            node.peers.session.deliver(message)
        except StaleError as error:
            self.world.stale += 1
            if message.kind is not MessageKind.ABORT:
                self.world.carry(self, sender, refusal(message, -1, error))
        except DaskpsError as error:
            assert node is not None
            assert node.peers is not None
            node.peers.session.fail(error)

    def directory(self) -> ModelDirectory:
        return self.world.directory(self)

    def kill(self) -> None:
        was_alive = self.alive
        super().kill()
        if was_alive:
            self.gone_at = asyncio.get_running_loop().time() + self.world.delay()
            if self.node is not None:
                self.node.tell_gone()
