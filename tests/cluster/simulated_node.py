"""A simulated worker: the stages of a batch as coroutines over the real protocol; training is an integer function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.cluster.commit import Draft, FileSum, ModelDirectory, Snapshot
from daskps.cluster.driver import Done
from daskps.cluster.exchange import Touched
from daskps.cluster.message import Message, refusal
from daskps.cluster.partition import KeyPartition
from daskps.cluster.peers import Peers
from daskps.cluster.session import Member
from daskps.errors import DaskpsError, StaleError
from daskps.mem import MemPS
from daskps.ssd.placement import Placement
from daskps.types import Field, RowLayout
from tests.cluster import reference
from tests.cluster.process import Process

if TYPE_CHECKING:
    from tests.cluster.simulator import World

LAYOUT = RowLayout((Field("value", 1, "uint32"), Field("count", 1, "uint32")))
POOL = ComputePool(1)


class Turns:
    """Batches pass a stage in order."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def enter(self, peers: Peers, stage: str, batch: int) -> None:
        if self._next < batch:
            future = self._waiting[batch] = asyncio.get_running_loop().create_future()
            await peers.session.wait(future, stage, batch, "its turn")

    def leave(self) -> None:
        self._next += 1
        future = self._waiting.pop(self._next, None)
        if future is not None and not future.done():
            future.set_result(None)


class EpochState:
    """What a node has in memory during one epoch; tasks of an older one keep theirs."""

    dense: int
    position: int

    def __init__(self) -> None:
        self.tables: dict[int, dict[str, tuple[dict[int, int], np.ndarray]]] = {}
        self.arrays: dict[str, dict[str, np.ndarray]] = {}


class SimNode(Process):
    """A worker with its node."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.peers: Peers | None = None  # type: ignore[assignment]
        self.epoch = 0
        self.control = asyncio.Lock()  # epochs begin and open one after the other, as on the worker's control thread

    # ------------------------------------------------------------------ network

    def send(self, rank: int, message: Message) -> None:
        self.world.carry(self, self.crew[rank], message)

    def deliver(self, sender: SimNode, message: Message) -> None:
        try:
            if self.peers is None:
                raise StaleError("no epoch is open here")
            self.peers.deliver(message)
        except StaleError as error:
            self.world.stale += 1
            if message.kind != "abort":
                self.world.carry(self, sender, refusal(message, -1, error))
        except DaskpsError as error:
            assert self.peers is not None
            self.peers.session.fail(error)

    async def work(self, call: Callable[[], Any]) -> Any:
        """The owner's thread: takes a while, one call after the other."""
        async with self.thread:
            await asyncio.sleep(self.world.delay() / 4)
            return call()

    # -------------------------------------------------------------------- epochs

    async def open(
        self, crew: list[SimNode], rank: int, epoch: int, snapshot: Snapshot | None, live: tuple[str, ...]
    ) -> None:
        async with self.control:
            await self._open(crew, rank, epoch, snapshot, live)

    async def _open(
        self, crew: list[SimNode], rank: int, epoch: int, snapshot: Snapshot | None, live: tuple[str, ...]
    ) -> None:
        if epoch != self.epoch:
            raise StaleError(f"{self.name} was told of epoch {self.epoch}, epoch {epoch} is too late")
        world, schedule = self.world, self.world.schedule
        self.crew, self.thread = crew, asyncio.Lock()
        placement = Placement(schedule.partitions, schedule.partition_by)  # type: ignore[arg-type]
        partition = KeyPartition(placement, len(crew), POOL)  # type: ignore[arg-type]
        first_batch = 0 if snapshot is None else snapshot.draft.batch + 1
        position = 0 if snapshot is None else snapshot.draft.position
        self.stores_by_table: dict[str, Any] = {}
        rows = {}
        for table in range(schedule.tables):
            await asyncio.sleep(world.delay())
            name = None if snapshot is None else snapshot.id
            path = f"{world.root}/tables/{table}"
            self.stores_by_table[str(table)] = world.shelf.open(
                self, path, placement, partition.owned(rank), name, live
            )
            rows[str(table)] = MemPS(
                layout=LAYOUT,
                store=self.stores_by_table[str(table)],
                initial=lambda keys, out, table=table: world.initial(table, keys, out),
                memory_bytes=20_000 + 120 * schedule.cache_rows,
                pool=POOL,
                nodes=len(crew),
                run="run",
                epoch=epoch,
                first_batch=first_batch,
            )
        self.state = EpochState()
        self.state.dense = 1 if snapshot is None else int(self.directory().load(snapshot)["dense"][0])
        member = Member("run", epoch, rank, len(crew), wait_seconds=world.wait_seconds)
        self.peers = Peers(
            *(member, self, rows, partition, self.work),
            first_batch=first_batch,
            check_replicas=schedule.check_replicas,
        )
        self.tasks |= dict.fromkeys(self.peers.owner._tasks)
        self.state.position = position
        self.turns = {stage: Turns(first_batch) for stage in ("cut", "pull", "load", "train", "push")}

    async def begin(self, epoch: int) -> None:
        """A new epoch begins: let go of every older one, so that others can take over the partitions."""
        async with self.control:
            if epoch <= self.epoch:
                raise StaleError(f"{self.name} was told of epoch {self.epoch}, epoch {epoch} is too late")
            self.end_epoch()
            self.epoch = epoch

    def end_epoch(self) -> None:
        """Let go of everything, as a node does that is told to, or whose epoch has failed."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None  # type: ignore[assignment]
        self.world.release(self)

    def directory(self) -> ModelDirectory:
        return self.world.directory(self)

    # ------------------------------------------------------------------- a batch

    def in_epoch(self, epoch: int) -> Peers:
        """Every call of a driver names its epoch, as every message does."""
        if self.peers is None or self.epoch != epoch:
            raise StaleError(f"{self.name} is not in epoch {epoch}")
        return self.peers

    async def run_batch(self, epoch: int, batch: int) -> Done | None:
        peers, state, world, data = self.in_epoch(epoch), self.state, self.world, self.world.data
        turns = self.turns
        session = peers.session
        await turns["cut"].enter(peers, "cut", batch)
        start = state.position // data.step_examples
        left = min(world.schedule.batch_steps, data.steps - start)
        if left == 0:
            turns["cut"].leave()
            return None
        steps = await peers.agree_steps(batch, world.rng.randint(1, left), "a step needs it")
        stop = start + steps
        state.position = position = stop * data.step_examples
        turns["cut"].leave()

        slices = {step: data.slice(step, peers.rank, peers.nodes) for step in range(start, stop)}
        await turns["pull"].enter(peers, "pull", batch)
        pulled, tables = {}, {}
        asked = []
        for table in range(world.schedule.tables):
            keys = {key for step in slices.values() for example in step for key in data.keys[example][table]}
            array = np.array(sorted(keys, key=lambda key: reference.mixed(key, batch)), np.uint64)
            rows = np.full((len(keys), LAYOUT.width), np.nan, np.float32)
            tables[str(table)] = ({key: row for row, key in enumerate(array.tolist())}, rows)
            asked.append(self.spawn(peers.pull(batch, str(table), array, peers.group(array), rows)))
        await asyncio.sleep(0)  # pulls of this batch are on their way before those of the next
        turns["pull"].leave()
        for table in range(world.schedule.tables):
            pulled[str(table)] = await asked[table]

        await turns["load"].enter(peers, "load", batch)
        for table, (_, rows) in tables.items():
            async for _ in peers.late_rows(pulled[table], rows):
                pass
        await turns["train"].enter(peers, "train", batch)
        before = state.tables.pop(batch - 1, None)
        for table, (_, rows) in tables.items():
            for position_ in pulled[table].copied.tolist():
                assert before is not None
                key = int(pulled[table].keys[position_])
                rows[position_] = before[table][1][before[table][0][key]]
            world.check_rows(start, int(table), pulled[table].keys, rows, f"{self.name} pulls batch {batch}")
            world.late += sum(pulled[table].late)
            world.copied += len(pulled[table].copied)
        state.tables[batch] = tables
        turns["load"].leave()

        exchange = await peers.exchange(batch, pulled)
        for step in range(start, stop):
            await self.train_step(peers, state, exchange, batch, step, slices[step], tables)
            if world.rng.random() < 0.3:
                await asyncio.sleep(world.delay())
        last = stop == data.steps
        due = last or (batch + 1) % world.schedule.snapshot_every == 0
        snapshot = f"{epoch:06d}-{batch:08d}" if due else ""
        if due:
            state.arrays[snapshot] = {"dense": np.array([state.dense], np.uint32)}
        turns["train"].leave()

        await turns["push"].enter(peers, "push", batch)
        await asyncio.gather(*(peers.push(pulled[table], rows, snapshot) for table, (_, rows) in tables.items()))
        peers.end_batch(batch)
        turns["push"].leave()
        if session.error is not None:
            raise session.error
        return Done(Draft(batch, position, world.schedule.partitions), due)

    async def train_step(
        self, peers: Peers, state: EpochState, exchange: Any, batch: int, step: int, examples: range, tables: Any
    ) -> None:
        data, touched, all_sums = self.world.data, {}, 0
        for table, (places, rows) in tables.items():
            bits = rows.view(np.uint32)
            sums: dict[int, int] = {}
            for example in examples:
                for key in data.keys[example][int(table)]:
                    row = (int(bits[places[key], 0]), int(bits[places[key], 1]))
                    sums[key] = sums.get(key, 0) + reference.gradient(example, key, row)
            touched[table] = Touched(
                np.array([places[key] for key in sums], np.int32),
                np.array(list(sums.values()), np.int64).reshape(-1, 1),
            )
            all_sums += sum(sums.values())
        summed, dense = await asyncio.gather(
            exchange.sum_rows(step, touched),
            peers.sum_dense(batch, step, np.array([all_sums, len(examples)], np.int64)),
        )
        assert dense[1] == data.step_examples
        state.dense = (state.dense * 3 + int(dense[0])) & reference.MASK
        for table, (_, rows) in tables.items():
            bits = rows.view(np.uint32)
            for some in summed[table]:
                for row, total in zip(some.rows.tolist(), some.sums[:, 0].tolist(), strict=True):
                    bits[row] = reference.updated((int(bits[row, 0]), int(bits[row, 1])), total)

    # ----------------------------------------------------------------- snapshots

    async def prepared(self, epoch: int, snapshot: str, batch: int) -> None:
        await self.in_epoch(epoch).prepared(snapshot, batch)

    async def write_arrays(self, epoch: int, snapshot: str) -> dict[str, FileSum]:
        self.in_epoch(epoch)
        return self.directory().write_arrays(snapshot, self.state.arrays.pop(snapshot))

    async def confirm(self, epoch: int, live: tuple[str, ...]) -> None:
        self.in_epoch(epoch)

        def tell() -> None:
            for store in self.stores_by_table.values():
                store.follow(live)

        await self.work(tell)
