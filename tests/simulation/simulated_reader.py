"""A process that opens the model during training and reads it twice: both must give the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daskps.errors import CorruptionError, SnapshotError
from tests.simulation.process import Process
from tests.simulation.simloop import sleep

if TYPE_CHECKING:
    from tests.simulation.simulator import World

ROUNDS = 3


class SimReader(Process):
    """A reader, with or without leases on its snapshots. It is sometimes killed, and its leases end."""

    def __init__(self, world: World, name: str, locks: bool) -> None:
        super().__init__(world, name, may_lock=locks)

    def start(self) -> None:
        self.world.watch(self.spawn(self._read()))

    def _pause(self, delays: int) -> asyncio.Future[None]:
        return sleep(self.world.aside.random() * delays * self.world.schedule.mean_delay)

    async def _read(self) -> None:
        directory, world = self.world.directory(self), self.world
        for _ in range(ROUNDS):
            await self._pause(20)
            while (lease := directory.read()) is None:
                await self._pause(5)
            assert lease.locked == self.may_lock
            try:
                with directory.unless_dropped(lease.snapshot.id):  # as an open model does
                    tables = world.tables_of(self, lease.snapshot)
                    world.check_read(self, lease.snapshot, tables)
                    await self._pause(100)
                    world.check_read(self, lease.snapshot, tables)
                world.reads += 1
            except SnapshotError:
                assert not self.may_lock or world.misplaced, "a snapshot that is locked was dropped"
                world.gone += not world.misplaced
            except CorruptionError:
                assert world.misplaced, "nothing is damaged"
            if world.aside.random() < 0.2:
                self.kill()
                return
            lease.close()
            world.release(self)
