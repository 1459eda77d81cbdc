"""A process of the simulated cluster: its tasks, its files, and its death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from daskps.storage.files import Files, LocalFiles, SystemCalls
from tests.simulation.disk import CrashError, SimulatedDisk, SimulatedFiles

if TYPE_CHECKING:
    from tests.simulation.simulator import World


class KillableCalls(SystemCalls):
    """System calls of a process that may die before any of them."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def create(self, path: str, flags: int = 0) -> int:
        self._process.breathe()
        return super().create(path, flags)

    def sync(self, path: str) -> None:
        self._process.breathe()
        super().sync(path)

    def rename(self, source: str, target: str) -> None:
        self._process.breathe()
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._process.breathe()
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._process.breathe()
        super().unlink(path)


def process_files(process: Process, root: str) -> Files:
    """The files below a root as one process sees them: it may die before any operation that changes something.

    They are on the simulated disk, or, if there is none, real ones. A process gives up its locks when it dies.
    """
    files: Any
    if isinstance(process.disk, SimulatedDisk):
        files = SimulatedFiles(process.disk, root, process.breathe)
    else:
        files = LocalFiles(root, KillableCalls(process))
    take = files.share

    def share(name: str) -> Callable[[], None]:
        if not process.may_lock:
            raise PermissionError(name)
        release = take(name)
        process.shared.append(release)

        def let_go() -> None:
            if release in process.shared:
                process.shared.remove(release)
                release()

        return let_go

    files.share = share
    return files  # type: ignore[no-any-return]


class Process:
    """A process that can be killed: its tasks stop at once, and its memory and locks are gone."""

    def __init__(self, world: World, name: str, disk: Any = None, may_lock: bool = True) -> None:
        self.world = world
        self.name = name
        self.disk = disk or world.disk  # None: real files; another one than the world's is that of its own machine
        self.may_lock = may_lock
        self.shared: list[Callable[[], None]] = []  # locks that it shares, to be given up
        self.alive = True
        self.tasks: dict[asyncio.Task[Any], None] = {}  # a set would be ordered by address
        self.stores: list[Any] = []  # open files of the real disk tier
        self.dies_after: int | None = None  # changes to the disk
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        world.processes.append(self)

    def files(self, root: str) -> Files:
        return process_files(self, root)

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
