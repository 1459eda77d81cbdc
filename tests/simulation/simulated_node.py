"""A simulated node of one incarnation: the stages of a batch over the real protocol; training is an integer function.

It has the methods of `daskps.node.node.OpenNode` that drivers ask for, and the stages of `daskps.node.stages`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.config import Job
from daskps.data.order import Steps
from daskps.device.pool import ComputePool
from daskps.errors import PeerError, StaleError
from daskps.mem import MemPS
from daskps.node.begin import IncarnationStart, check_begun
from daskps.node.memory import CapacityReport
from daskps.node.node import NodeInfo, Publication
from daskps.reports import BatchReport, StageTime, Summary, validations_of
from daskps.storage.model_directory import Incarnation, SnapshotMeta, apply_live
from daskps.storage.partition import KeyPartition, KeysByOwner
from daskps.types import BatchId, Stage
from daskps.wire.client import PullResult
from daskps.wire.link import Peers
from daskps.wire.message import Message
from daskps.wire.session import Member
from tests.simulation import reference
from tests.simulation.simloop import sleep
from tests.simulation.simulated_store import TableParts
from tests.simulation.simulated_training import train_apart, train_together

if TYPE_CHECKING:
    from tests.simulation.simulated_worker import SimWorker

WIDTH = 2  # a value and a count
POOL = ComputePool(1)
CAPACITY = 1_000_000
READ_STEPS = 5  # larger batches are read in pieces


class SimFlight:
    """A batch in flight: by table its keys, in any order or by owner, and their owners."""

    def __init__(self, keys: dict[str, np.ndarray], owners: dict[str, KeysByOwner]) -> None:
        self.keys, self.owners = keys, owners
        self.rows = {table: np.full((len(part), WIDTH), np.nan, np.float32) for table, part in keys.items()}
        self.places = {table: {key: row for row, key in enumerate(part.tolist())} for table, part in keys.items()}
        self.pulled: dict[str, PullResult] = {}
        self.loaded = False


class SimNode:
    """An open node. `close` may come at any moment, and then nothing of it works any more."""

    def __init__(self, worker: SimWorker, run: str, rank: int, nodes: int, job: Job, begun: IncarnationStart) -> None:
        self.worker, self.world, self.run, self.rank, self.nodes = worker, worker.world, run, rank, nodes
        self.directory = worker.directory()
        check_begun(self.directory, begun, run, rank)
        self.incarnation = Incarnation(self.directory, run, begun.incarnation, begun.index, begun.model)
        self.peers: Peers | None = None
        self.early: list[tuple[SimWorker, Message]] = []
        self.crew: list[SimWorker] = []
        self.flights: dict[int, SimFlight] = {}
        self.previous: SimFlight | None = None
        self._job, self._closed, self._thread = job, False, asyncio.Lock()
        self._captured: dict[str, dict[str, np.ndarray]] = {}
        self.pushed: dict[str, StageTime] = {}  # of batches that end with a snapshot
        snapshot = None if begun.snapshot is None else self.directory.snapshot(begun.snapshot)
        self.start = SnapshotMeta(-1, 0, 0) if snapshot is None else snapshot.draft
        self._published = snapshot
        self._recorded: list[int] = []  # batches
        self.step = -(-self.start.position // self.world.data.step_examples)  # after the last batch that was trained
        self.snapshot = begun.snapshot
        self.dense = self.world.dense_of(None if snapshot is None else self.directory.load(snapshot))
        if self.world.apart is not None:
            self.world.apart.begin(begun.incarnation, begun.snapshot)
        self.partition = KeyPartition(self.world.placement, nodes, POOL)
        self.stores: dict[str, Any] = {}
        try:
            self.rows = {str(table): self._open_table(table) for table in range(self.world.schedule.tables)}
        except BaseException:
            self.close()
            raise

    def _open_table(self, table: int) -> MemPS:
        world = self.world
        state = self.directory.state()
        path = f"{world.root}/tables/{table}"
        digests = self._published.digests(str(table)) if self._published is not None else {}
        owned = self.partition.owned(self.rank)
        parts = TableParts(path, world.placement, owned, self.snapshot, state.live, self.incarnation.model, digests)
        self.stores[str(table)] = world.row_folders.open(self.worker, parts)
        return MemPS(
            layout=world.layout,
            store=self.stores[str(table)],
            initial=lambda keys, out: world.initial(table, keys, out),
            memory_bytes=36_000 + 120 * world.schedule.cache_rows,
            pool=POOL,
            nodes=self.nodes,
            run=self.run,
            incarnation=self.incarnation.number,
            first_batch=self.start.batch + 1,
        )

    def info(self) -> NodeInfo:
        data = self.world.data
        return NodeInfo(
            incarnation=self.incarnation.number,
            address=self.worker.name,
            directory=self.world.root,
            snapshot=self.snapshot,
            batch=self.start.batch,
            position=self.start.position,
            rows=data.steps * data.step_examples,
            steps=Steps(data.step_examples),
            validation_rows=self.world.schedule.validation_rows,
            read_steps=READ_STEPS,
            metrics={},
            validations=validations_of(self.start.progress),
            best=self.start.progress.get("best"),
        )

    async def join(self, addresses: list[str]) -> None:
        await sleep(self.world.delay())
        self._check()
        self.crew = [self.world.by_name[address] for address in addresses]
        member = Member(self.run, self.incarnation.number, self.rank, self.nodes, wait_seconds=self.world.wait_seconds)
        self.peers = Peers(
            *(member, self, self.rows, self.partition, self.work),
            first_batch=self.start.batch + 1,
            check_replicas=self.world.schedule.check_replicas,
            write_executor=self.write,
        )
        self.worker.tasks |= dict.fromkeys(self.peers.owner._tasks)
        for sender, message in self.early:
            self.worker.deliver(sender, message)

    # ------------------------------------------------------------------ network and thread

    def send(self, rank: int, message: Message) -> None:
        self.world.carry(self.worker, self.crew[rank], message)

    async def work(self, call: Callable[[], Any]) -> Any:
        """The owner's thread: takes a while, one call after the other."""
        async with self._thread:
            await sleep(self.world.delay() / 4)
            self._check()
            return call()

    async def write(self, call: Callable[[], Any]) -> Any:
        """The thread that writes snapshots: takes a while, beside the owner's."""
        await sleep(self.world.delay() / 4)
        self._check()
        return call()

    def _check(self) -> None:
        if self._closed:
            raise StaleError(f"run {self.run} incarnation {self.incarnation.number} has ended on {self.worker.name}")

    @property
    def joined(self) -> Peers:
        self._check()
        assert self.peers is not None
        return self.peers

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.peers is not None:
            self.peers.close()
        self.world.release(self.worker)
        self.tell_gone()

    def tell_gone(self) -> None:
        """Its connections end, which the others hear after a while."""
        place = self.run, self.incarnation.number
        for worker in self.crew:
            if worker is not self.worker:
                self.world.later(self.world.delay(), _hear_gone, worker, place, self.rank)

    # ------------------------------------------------------------------------------ stages

    def stages(self) -> dict[Stage, Callable[[BatchId], Awaitable[Any]]]:
        return {
            Stage.READ: self.read,
            Stage.DEDUP: self.dedup,
            Stage.PULL: self.pull,
            Stage.LOAD: self.load,
            Stage.TRAIN: self.train,
            Stage.PUSH: self.push,
        }

    async def read(self, token: BatchId) -> None:
        await sleep(self.world.delay() / 4)

    async def dedup(self, token: BatchId) -> CapacityReport:
        data, schedule = self.world.data, self.world.schedule
        self._check()
        examples = [e for step in range(token.first_step, token.stop_step) for e in self.slice(step)]
        keys, owners = {}, {}
        for table in range(schedule.tables):
            found = {key for example in examples for key in data.keys[example][table]}
            order = sorted(found, key=lambda key: reference.mixed(key, token.first_step))
            keys[str(table)], owners[str(table)] = self._group(np.array(order, np.uint64))
        self.flights[token.first_step] = SimFlight(keys, owners)
        steps = token.stop_step - token.first_step
        fitting = self.world.rng.randint(1, steps) if self.world.rng.random() < 0.2 else steps
        asked = tuple(tuple(np.diff(found.starts).tolist()) for found in owners.values())
        shares = self.world.rng.choice((1, 1, 1, 1, 2, 9))
        return CapacityReport(self.rank, fitting, asked, (CAPACITY,) * len(keys), shares)

    def _group(self, keys: np.ndarray) -> tuple[np.ndarray, KeysByOwner]:
        """The keys as they are, with their order by owner; or in that order, as nodes of a run have them."""
        found = self.partition.group(keys)
        if self.world.schedule.by_owner and found.order is not None:
            return keys[found.order], KeysByOwner(None, found.starts)
        return keys, found

    async def pull(self, token: BatchId) -> None:
        flight, peers = self.flights[token.first_step], self.joined
        pulled = await asyncio.gather(
            *(
                peers.pull(token.batch, table, keys, flight.owners[table], flight.rows[table])
                for table, keys in flight.keys.items()
            )
        )
        flight.pulled = dict(zip(flight.keys, pulled, strict=True))

    async def load(self, token: BatchId) -> None:
        await sleep(self.world.delay() / 4)
        self._check()
        self.flights[token.first_step].loaded = True

    async def train(self, token: BatchId) -> None:
        flight, peers, world = self.flights[token.first_step], self.joined, self.world
        while not flight.loaded:
            await sleep(world.delay())
            self.joined.session.check()
        for table, pulled in flight.pulled.items():
            async for _ in peers.deferred_rows(pulled, flight.rows[table]):
                pass
            for position in pulled.forwarded.tolist():
                assert self.previous is not None
                place = self.previous.places[table][int(pulled.keys[position])]
                flight.rows[table][position] = self.previous.rows[table][place]
            where = f"{self.worker.name} trains batch {token.batch}"
            before = world.model_after(token.incarnation, token.batch - 1, token.first_step)
            world.check_rows(before, int(table), pulled.keys, flight.rows[table], where)
            world.deferred += sum(pulled.deferred)
            world.forwarded += len(pulled.forwarded)
            world.in_place += flight.owners[table].order is None and self.nodes > 1
        exchange = await peers.exchange(token.batch, flight.pulled)
        if world.apart is None:
            await train_together(self, flight, exchange, token)
        else:
            await train_apart(self, flight, exchange, token, world.apart.every)
            world.apart.train(token.incarnation, token.batch, self.nodes, token.first_step, token.stop_step)
        self._check()
        self.previous, self.step = flight, token.stop_step
        if token.snapshot:
            self._capture(token.snapshot)

    async def dawdle(self) -> None:
        if self.world.rng.random() < 0.3:
            await sleep(self.world.delay())

    async def push(self, token: BatchId) -> BatchReport:
        flight, peers, started = self.flights[token.first_step], self.joined, asyncio.get_running_loop().time()
        await asyncio.gather(
            *(peers.push(flight.pulled[table], rows, token.snapshot) for table, rows in flight.rows.items())
        )
        peers.session.close_batch(token.batch)
        del self.flights[token.first_step]
        if token.snapshot:
            await peers.owner.prepared(token.snapshot, token.batch)
        digests = self._digests(token.snapshot) if token.snapshot else {}
        examples = sum(len(self.slice(step)) for step in range(token.first_step, token.stop_step))
        times = (StageTime(Stage.PUSH, started, asyncio.get_running_loop().time()),)
        if token.snapshot:
            self.pushed[token.snapshot] = times[0]
        counts, levels = {"distinct_keys": 1.0}, {"row_capacity": float(CAPACITY), "read_steps": READ_STEPS}
        return BatchReport(token, self.rank, examples, times, counts, {}, levels, digests=digests)

    def slice(self, step: int) -> range:
        return self.world.data.slice(step, self.rank, self.nodes)

    # ------------------------------------------------------------- snapshots, and evaluation

    def _capture(self, name: str) -> None:
        words = self.dense if self.world.apart is not None else self.dense[:1]
        self._captured[name] = {"dense": np.array(words, np.uint32)}

    async def prepare(self, name: str, batch: int) -> dict[str, Any]:
        self._capture(name)
        for rows in self.rows.values():
            await self.work(lambda rows=rows: rows.flush(batch, name))
        return self._digests(name)

    def _digests(self, name: str) -> dict[str, Any]:
        return {table: store.digests(name) for table, store in self.stores.items()}

    async def record(self, lines: list[str], last_batch: int) -> None:
        self._recorded += [line["batch"] for line in map(json.loads, lines) if line["kind"] == "batch"]
        assert self._recorded == [*range(self.start.batch + 1, last_batch + 1)]

    async def summary(self) -> Summary:
        return Summary()

    async def publish(self, snapshot: Publication) -> tuple[str, ...]:
        self._check()
        name, batch, position, progress = snapshot.name, snapshot.batch, snapshot.position, snapshot.progress
        await self.record(snapshot.lines, snapshot.last_batch)
        assert self._recorded == [*range(self.start.batch + 1, batch + 1)], "a snapshot's batches are in the record"
        draft = SnapshotMeta(batch, position, self.world.schedule.partitions, progress=progress)
        if self._job.merges_batches:
            self.world.check_whole(position)
        self.incarnation.publish(draft, self._captured.pop(name), snapshot.digests)
        self.world.published(name)
        pushes = [worker.node.pushed.get(name) for worker in self.crew if worker.node is not None]
        place = f"{self.run} {self.incarnation.number}"
        if found := [push for push in pushes if push is not None]:
            took = max(push.seconds for push in found)
            self.world.check_pace(self._job, place, min(push.started for push in found), took)
        else:  # at rest: how long it took, from which the next one counts, only the driver knows
            self.world.last_snapshot.pop(place, None)
        self.incarnation.keep(self._job.train.keep_snapshots, progress.get("best"))
        self.world.check_kept(self.directory, self._job.train.keep_snapshots, progress.get("best"))
        return self.directory.state().live

    async def end_with(self, best: str) -> str | None:
        self._check()
        self.incarnation.end_with(best)
        self.world.ended_with_best += 1
        return self.directory.state().last

    async def confirm(self, live: tuple[str, ...]) -> None:
        for store in self.stores.values():
            await self.work(lambda store=store: [apply_live(partition, live) for partition in store.stores.values()])

    async def evaluate(self, batch: int) -> dict[str, float]:
        """Look up keys that every node knows of, and some that nobody does; they are as after the batch."""
        position = self.world.rng.choice(self.world.data.keys)
        for table in range(self.world.schedule.tables):
            keys = np.unique(np.array([*position[table], 12345], np.uint64))
            rows = np.empty((len(keys), WIDTH), np.float32)
            await self.joined.lookup(batch, table, str(table), keys, self.partition.group(keys), rows)
            now = self.world.model_after(self.incarnation.number, batch, self.step)
            self.world.check_rows(now, table, keys, rows, f"an evaluation after batch {batch}")
            self.world.evaluated += 1
        return {"log_loss": self.world.loss_after(self.step)}


def _hear_gone(worker: SimWorker, place: tuple[str, int], rank: int) -> None:
    node = worker.node
    if worker.alive and node is not None and node.peers is not None and (node.run, node.incarnation.number) == place:
        node.peers.session.fail(PeerError(f"node {rank} is gone: its connection was lost"))
