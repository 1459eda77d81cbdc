"""The in-memory parameter server of the slides (their MPI cluster solution), on Dask workers, to compare daskps with.

All rows are in memory, sharded over the workers by key. For every mini-batch each worker finds the distinct keys of its
examples, pulls their rows from the shards over the network, runs the network forward and backward, and pushes the sums
of its gradients back; the shards add up what all workers pushed and step their rows; then the next mini-batch begins.
Nothing is staged, cached or kept from one mini-batch to the next, and there is no disk.

Connections, packed sums, hash table, kernels, network and optimizers are those of daskps, so the model is the same to
the bit and only the way of the rows differs. Examples of the next mini-batch are read and their keys found meanwhile.

    from baseline import train_in_memory
    print(train_in_memory(job, client))
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Client, get_worker

from daskps import build
from daskps.budget import largest_cache
from daskps.build import build_network, row_filler, table_specs
from daskps.config import Job
from daskps.data.order import Steps
from daskps.device.device import CpuDevice, Workspace
from daskps.device.memory import keep_freed_memory
from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.errors import CapacityError, ProtocolError
from daskps.hbm.dedup import find_working_set
from daskps.hbm.gradient import Status, apply_sums
from daskps.hbm.table import HbmTable, TableSpec
from daskps.mem.cache import NONE, Cache
from daskps.nn.dense_model import EXAMPLE_ONE
from daskps.nn.metrics import Metrics
from daskps.node.begin import placement_of
from daskps.storage.partition import KeyPartition, KeysByOwner
from daskps.types import Batch, Floats, Int32s, Keys, WorkingSet
from daskps.wire.collective import sum_dense
from daskps.wire.message import MessageKind
from daskps.wire.session import Member, Session
from daskps.wire.transport import ListenOptions, LoopThread, Transport


@dataclass(frozen=True, slots=True)
class Trained:
    """What one worker has done."""

    metrics: dict[str, Any]  # state of its progressive metrics
    ends: list[float]  # when each step ended, in seconds since 1970
    bytes_sent: int


class Shard:
    """The rows of one table whose keys this worker owns. Used by one thread."""

    def __init__(self, job: Job, spec: TableSpec, pool: ComputePool) -> None:
        self._spec, self._device = spec, CpuDevice(0, pool)
        self._fill = row_filler(job, spec, self._device)
        share = job.budget.memory_bytes // len(job.tables)
        budget = largest_cache(share, store_bytes=0, row_bytes=spec.layout.row_bytes, nodes=1)
        self._table = Cache(budget, pool)
        self._place = np.full(self._table.cache_rows, -1, np.int32)
        self._status = Status(self._device)
        self._rows, self._sums = np.empty(0, np.int32), np.empty(0, np.int64)
        self._count = 0

    def pull(self, keys: Keys) -> tuple[Floats, Int32s]:
        """Rows of the keys, new ones among them, and their numbers here, for the push."""
        rows = np.empty((len(keys), self._spec.layout.width), np.float32)
        slots = self._table.find(keys, rows)
        missing = np.flatnonzero(slots == NONE).astype(np.uint32)
        if len(missing):
            if self._table.cached_rows + len(missing) > self._table.cache_rows:
                raise CapacityError(f"{self._table.cache_rows:,} rows fit in memory, and there is no disk: use daskps")
            self._table.insert(keys, missing, slots, 0)
            self._table.unpin(slots[missing], 0)
            fresh = np.empty((len(missing), rows.shape[1]), np.float32)
            self._fill(keys[missing], fresh)
            self._table.fill(slots, missing, fresh, rows)
        return rows, slots.view(np.int32)

    def add(self, numbers: Int32s, widths: Any, values: Any) -> None:
        """What one worker pushes in a step."""
        dim, room = self._spec.dim, self._count + len(numbers)
        if len(self._rows) < room:
            self._rows = np.concatenate([self._rows[: self._count], np.empty(room + room // 4, np.int32)])
            sums = np.empty(len(self._rows) * dim, np.int64)
            sums[: self._count * dim] = self._sums[: self._count * dim]
            self._sums = sums
        self._count = library().link_add(
            numbers=numbers,
            widths=widths,
            count=len(numbers),
            bytes=values,
            size=len(values),
            dim=dim,
            place=self._place,
            rows=len(self._place),
            own=0,
            sums=self._sums,
            fresh_rows=self._rows,
            fresh=self._sums,
            fresh_count=self._count,
        )
        if self._count < 0:
            raise ProtocolError(f"a push of table {self._spec.name!r} makes no sense ({self._count})")

    def step(self, weight: float) -> None:
        """All workers have pushed: step the rows."""
        rows = self._rows[: self._count]
        library().link_place(rows=rows, n=len(rows), forget=1, place=self._place)
        if weight > 0:
            apply_sums(
                self._device,
                touched=rows,
                sums=self._sums[: self._count * self._spec.dim].reshape(self._count, self._spec.dim),
                optimizer=self._spec.optimizer,
                weight=weight,
                rows=self._table.rows,
                status=self._status,
            )
        self._status.check()
        self._count = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The examples of a step with their distinct keys, ordered by owner."""

    batch: Batch
    sets: list[WorkingSet]
    owners: list[KeysByOwner]


class Worker:
    """A worker and its shards: one thread computes steps, one serves the shards, one reads ahead."""

    def __init__(self, job: Job, rank: int, nodes: int, wire: ListenOptions) -> None:
        keep_freed_memory()
        self.job, self.rank, self.nodes = job, rank, nodes
        self.pool = ComputePool(job.cluster.cores or 1)
        self.device = CpuDevice(0, self.pool)
        features = build.features(job)
        self.specs = table_specs(job, features)
        self.network = build_network(job, self.specs, features, self.device)
        self.metrics = Metrics()
        self.reader = build.open_training(job, self.pool, rank, nodes)
        self.steps = Steps(job.train.minibatch_examples, nodes, rank, 1, job.train.block_examples)
        self.partition = KeyPartition(placement_of(job), nodes, self.pool)
        self.shards = {spec.name: Shard(job, spec, self.pool) for spec in self.specs}
        self._wire, self._loop = wire, LoopThread("baseline-network")
        self._serving = ThreadPoolExecutor(1, thread_name_prefix="baseline-shard")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="baseline-read")
        self._scratch = Workspace(self.device)

        async def listen() -> Transport:
            transport = Transport()
            await transport.start(wire.listen_on, wire.listen_args)
            return transport

        self._transport = self._loop.run(listen())
        self.address: str = self._transport.address

    def train(self, run: str, addresses: list[str]) -> Trained:
        """Every step of the data."""

        async def join() -> Session:
            session = Session(Member(run, 1, self.rank, self.nodes, self.job.cluster.wait_seconds), self._transport)
            arguments = (addresses, session.deliver, session.fail, self._wire.connection_args)
            if self.nodes > 1:
                await self._transport.join(session.member, *arguments)
            count = self.steps.count(self.reader.examples)
            self._servers = [asyncio.create_task(self._guard(session, spec, count)) for spec in self.specs]
            return session

        session = self._loop.run(join())
        count, ends = self.steps.count(self.reader.examples), []
        ready = self._ahead.submit(self._read, 0)
        for step in range(count):
            now = ready.result()
            if step + 1 < count:
                ready = self._ahead.submit(self._read, step + 1)
            self._step(session, step, now)
            ends.append(time.time())
        self._loop.run(self._finish())
        return Trained(self.metrics.state(), ends, session.bytes_sent)

    async def _finish(self) -> None:
        await asyncio.gather(*self._servers)

    def close(self) -> None:
        self._loop.run(self._transport.close())
        self._loop.close()
        for executor in (self._serving, self._ahead):
            executor.shutdown()
        self.reader.close()
        self.pool.close()

    # -- the worker ------------------------------------------------------------------------------------------------

    def _read(self, step: int) -> Ready:
        batch, _ = self.reader.read_steps(step, step + 1)
        sets = [find_working_set(batch, spec.slots, [self.device], self._scratch) for spec in self.specs]
        return Ready(batch, sets, [self.partition.group(one.keys) for one in sets])

    def _step(self, session: Session, step: int, ready: Ready) -> None:
        """Pull, forward and backward, push."""
        tables, numbers = self._pull(session, step, ready)
        batch, parts, pooled = ready.batch, [], []
        for table, working_set in zip(tables, ready.sets, strict=True):
            part = table.part(working_set.row_of, working_set.offsets, working_set.weights, [0, batch.examples])
            parts.append(part)
            pooled.append(table.pool(part, 0))
        first = self.steps.slice(step, self.reader.examples)[0] - self.steps.examples(step, self.reader.examples)[0]
        result = self.network.step(
            pooled=pooled,
            labels=batch.labels,
            dense=batch.dense,
            example_weights=batch.example_weights,
            first_block=first // self.steps.block_examples,
            gradients=pooled,
        )
        result.check()
        self.metrics.update(batch.labels, result.logits, batch.example_weights)
        sums = [table.sum(part, [slope]) for table, part, slope in zip(tables, parts, result.gradients, strict=True)]
        for table, part, slope in zip(tables, parts, result.gradients, strict=True):
            table.check(part, [slope])
        self._push(session, step, ready, numbers, sums, result.sums)
        self.network.apply(self._loop.run(sum_dense(session, step, 0, result.sums)))

    def _pull(self, session: Session, step: int, ready: Ready) -> tuple[list[HbmTable], list[list[Int32s]]]:
        groups = [[one.group(owner) for owner in range(self.nodes)] for one in ready.owners]
        asked = [[one.keys[group] for group in mine] for one, mine in zip(ready.sets, groups, strict=True)]

        async def pull() -> list[list[Any]]:
            for spec, keys in zip(self.specs, asked, strict=True):
                for owner in range(self.nodes):
                    session.send(owner, MessageKind.PULL, step, table=spec.name, arrays=(keys[owner],))
            return [
                [
                    (await session.receive(MessageKind.ANSWER, step, owner, table=spec.name)).arrays
                    for owner in range(self.nodes)
                ]
                for spec in self.specs
            ]

        tables, numbers = [], []
        for spec, one, mine, given in zip(self.specs, ready.sets, groups, self._loop.run(pull()), strict=True):
            rows = np.empty((len(one.keys), spec.layout.width), np.float32)
            for group, (values, _) in zip(mine, given, strict=True):
                library().link_scatter(rows=rows, width=rows.shape[1], positions=group, n=len(group), values=values)
            table = HbmTable(spec, [self.device], one, rows)
            table.load()
            tables.append(table)
            numbers.append([slots for _, slots in given])
        return tables, numbers

    def _push(
        self, session: Session, step: int, ready: Ready, numbers: list[list[Int32s]], sums: list[Any], dense: Any
    ) -> None:
        packed: list[tuple[int, str, tuple[Any, ...]]] = []
        for spec, one, theirs, (rows, values) in zip(self.specs, ready.owners, numbers, sums, strict=True):
            for owner in range(self.nodes):
                group, number_of = one.group(owner), np.full(int(one.starts[-1]), -1, np.int32)
                number_of[group] = theirs[owner]
                packed.append((owner, spec.name, _pack(rows, number_of, values, len(group))))

        async def push() -> None:
            for owner, table, arrays in packed:
                session.send(owner, MessageKind.SUMS, step, table=table, arrays=(*arrays, dense[-1:].copy()))

        self._loop.run(push())

    # -- the shards ------------------------------------------------------------------------------------------------

    async def _guard(self, session: Session, spec: TableSpec, steps: int) -> None:
        try:
            await self._serve(session, spec.name, steps)
        except Exception as error:
            session.fail(ProtocolError(f"shard {self.rank} of table {spec.name!r}: {error!r}"))
            raise

    async def _serve(self, session: Session, table: str, steps: int) -> None:
        """Pulls of a step are answered when all pushes of the step before are in: workers are never stale."""
        shard = self.shards[table]
        loop = asyncio.get_running_loop()

        async def work(call: Callable[..., Any], *values: Any) -> Any:
            return await loop.run_in_executor(self._serving, call, *values)

        async def give(step: int, node: int) -> None:
            keys = (await session.receive(MessageKind.PULL, step, node, table=table)).arrays[0]
            session.send(node, MessageKind.ANSWER, step, table=table, arrays=await work(shard.pull, keys))

        async def take(step: int, node: int) -> int:
            *arrays, weight = (await session.receive(MessageKind.SUMS, step, node, table=table)).arrays
            await work(shard.add, *arrays)
            return int(weight[0])

        for step in range(steps):
            await asyncio.gather(*(give(step, node) for node in range(self.nodes)))
            weights = await asyncio.gather(*(take(step, node) for node in range(self.nodes)))
            await work(shard.step, sum(weights) / EXAMPLE_ONE)


def _pack(rows: Int32s, theirs: Int32s, sums: Any, room: int) -> tuple[Any, ...]:
    dim, count = sums.shape[1], np.empty(1, np.int64)
    numbers, widths = np.empty(room, np.int32), np.empty(room, np.uint8)
    values = np.empty(room * dim * 8 + 8, np.uint8)
    size = library().link_pack(
        rows=rows,
        n=len(rows),
        theirs=theirs,
        sums=sums,
        dim=dim,
        numbers=numbers,
        widths=widths,
        bytes=values,
        count=count,
    )
    return numbers[: int(count[0])], widths[: int(count[0])], values[:size]


# -- on Dask ---------------------------------------------------------------------------------------------------------

_workers: dict[str, Worker] = {}  # of this process, by the Dask worker's address


def _open(job: Job, rank: int, nodes: int) -> str:
    here = get_worker()
    _workers[here.address] = Worker(job, rank, nodes, ListenOptions.of_worker(here))
    return _workers[here.address].address


def _train(run: str, addresses: list[str]) -> Trained:
    worker = _workers.pop(get_worker().address)
    try:
        return worker.train(run, addresses)
    finally:
        worker.close()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of the baseline gives."""

    metrics: dict[str, float]  # progressive, over all workers
    step_ends: list[float]  # when the last worker ended each step
    bytes_sent: int  # by all workers


def train_in_memory(job: Job, client: Client) -> Outcome:
    """Train `job` on `cluster.nodes` workers of the client, all rows in memory."""
    nodes = job.cluster.nodes
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])[:nodes]
    runs = itertools.count()

    def on_all(call: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        key = f"baseline-{time.time_ns()}-{next(runs)}"
        futures = [
            client.submit(call, *arguments(rank), workers=[worker], key=f"{key}-{rank}", pure=False)
            for rank, worker in enumerate(workers)
        ]
        return list(client.gather(futures))

    addresses = on_all(_open, lambda rank: (job, rank, nodes))
    trained: list[Trained] = on_all(_train, lambda rank: ("baseline", addresses))
    metrics = Metrics()
    for one in trained:
        metrics.add(one.metrics)
    ends = [max(times) for times in zip(*(one.ends for one in trained), strict=True)]
    return Outcome(metrics.summary(), ends, sum(one.bytes_sent for one in trained))
