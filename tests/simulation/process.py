"""A process of the simulated cluster: its tasks, its view of the disk, and its death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tests.simulation.disk import CrashError

if TYPE_CHECKING:
    from tests.simulation.simulator import World


class NodeFiles:
    """The disk as one process sees it: it may die before any operation that changes something."""

    def __init__(self, process: Process) -> None:
        self._process, self._disk = process, process.disk
        self.read, self.list, self.make_folder = self._disk.read, self._disk.list, self._disk.make_folder
        self.seize = self._disk.seize

    def share(self, path: str) -> Callable[[], None]:
        """Lock a file until the process lets go or dies."""
        if not self._process.may_lock:
            raise PermissionError(path)
        release = self._disk.share(path)
        shared = self._process.shared
        shared.append(release)

        def let_go() -> None:
            if release in shared:
                shared.remove(release)
                release()

        return let_go

    def write(self, path: str, data: bytes) -> None:
        self._process.breathe()
        self._disk.write(path, data)

    def sync(self, path: str) -> None:
        self._process.breathe()
        self._disk.sync(path)

    def link(self, source: str, target: str) -> None:
        self._process.breathe()
        self._disk.link(source, target)

    def remove(self, path: str) -> None:
        self._process.breathe()
        self._disk.remove(path)

    def remove_folder(self, path: str) -> None:
        self._process.breathe()
        self._disk.remove_folder(path)


class Process:
    """Something that can be killed: its tasks stop where they are, its memory and locks are gone."""

    def __init__(self, world: World, name: str, disk: Any = None, may_lock: bool = True) -> None:
        self.world = world
        self.name = name
        self.disk = disk or world.disk  # another one than the world's is that of its own machine
        self.may_lock = may_lock
        self.shared: list[Callable[[], None]] = []  # locks that it shares, to be given up
        self.alive = True
        self.tasks: dict[asyncio.Task[Any], None] = {}  # a set would be ordered by address
        self.stores: list[Any] = []  # open files of the real disk tier
        self.dies_after: int | None = None  # changes to the disk
        self.files = NodeFiles(self)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        world.processes.append(self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    def breathe(self) -> None:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                self.kill()
        if not self.alive:
            raise CrashError

    def kill(self) -> None:
        self.alive = False
        if not self.lost.done():
            self.lost.set_result(None)
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        while self.shared:
            self.shared.pop()()
        self.world.outlive(self)
