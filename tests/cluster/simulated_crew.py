"""All simulated workers as a driver sees them: calls that take time, and fail when a worker is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from daskps.cluster.commit import Epoch, FileSum, Snapshot
from daskps.cluster.driver import Done
from daskps.errors import PeerError
from tests.cluster.disk import CrashError
from tests.cluster.process import Process
from tests.cluster.simulated_node import SimNode

if TYPE_CHECKING:
    from tests.cluster.simulator import World


class SimCrew:
    """The nodes as the driver sees them: calls that take time, and fail when a node is gone."""

    def __init__(self, world: World, driver: Process) -> None:
        self.world = world
        self.driver = driver
        self.nodes: list[SimNode] = []

    async def call(self, node: SimNode, method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        await asyncio.sleep(self.world.delay())
        if not node.alive:
            raise PeerError(f"{node.name} is lost")
        task = node.spawn(method(*args))  # type: ignore[arg-type]
        try:
            await asyncio.wait({task, node.lost}, return_when=asyncio.FIRST_COMPLETED)  # the driver watches for loss
            if not node.alive:
                await asyncio.sleep(self.world.delay())
                raise PeerError(f"{node.name} is lost")
        finally:
            task.cancel()
        if isinstance(error := None if task.cancelled() else task.exception(), CrashError) or task.cancelled():
            raise PeerError(f"{node.name} is lost")
        if error is not None:
            raise error
        await asyncio.sleep(self.world.delay())
        return task.result()

    async def all(self, method: str, *args: Any) -> list[Any]:
        tasks = [
            self.driver.spawn(self.call(node, getattr(node, method), self.epoch.number, *args)) for node in self.nodes
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def open(self, epoch: Epoch, snapshot: Snapshot | None, live: tuple[str, ...]) -> None:
        self.world.check_snapshot(snapshot)
        self.epoch = epoch
        crew = self.world.muster()
        self.nodes = list(self.world.nodes)  # those that are not wanted any more must let go, too
        await self.all("begin")
        self.nodes = crew
        ranks = enumerate(self.nodes)
        args = (epoch.number, snapshot, live)
        tasks = [self.driver.spawn(self.call(node, node.open, self.nodes, rank, *args)) for rank, node in ranks]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def run_batch(self, batch: int) -> Done | None:
        answers = await self.all("run_batch", batch)
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]  # type: ignore[no-any-return]

    async def prepared(self, snapshot: str, batch: int) -> Mapping[str, Any]:
        await self.all("prepared", snapshot, batch)
        return {}

    async def write_arrays(self, snapshot: str) -> Mapping[str, FileSum]:
        return await self.call(self.nodes[0], self.nodes[0].write_arrays, self.epoch.number, snapshot)  # type: ignore[no-any-return]

    async def confirm(self, snapshot: str, live: tuple[str, ...]) -> None:
        self.world.published(snapshot)
        await self.all("confirm", live)

    async def close(self, error: BaseException | None) -> None:
        for node in self.nodes:
            if node.alive and node.peers is not None and node.epoch == self.epoch.number:
                node.end_epoch()
