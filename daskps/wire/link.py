"""A node's link to its peers, as the stages use it: blocking calls from any thread.

Input: pulls, pushes and gradient sums of this node. Output: the answers of its peers. The link owns the node's event
loop, its connections, the owner's thread (the only one that uses MEM-PS), the thread that writes snapshots and the two
threads that copy rows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from daskps.device.pool import ComputePool, lower_thread_priority
from daskps.errors import DaskpsError
from daskps.storage.partition import KeyPartition, KeysByOwner
from daskps.types import Bools, Floats, Int32s, Int64s, Keys, RowLayout
from daskps.wire import client, collective
from daskps.wire.client import PullResult
from daskps.wire.collective import Collective, Handle, HostCollective, Tag
from daskps.wire.exchange import Buffers, Exchange, Packed, Touched
from daskps.wire.message import Array, MessageKind, MessageSender
from daskps.wire.owner import Executor, Owner, Rows
from daskps.wire.session import Member, Session
from daskps.wire.transport import ListenOptions, LoopThread, Transport

T = TypeVar("T")


class Peers:
    """Protocol of one node: session, owner and client side together, all on the event loop.

    It is created when the node's rows are open at the snapshot to start from.
    """

    def __init__(
        self,
        member: Member,
        network: MessageSender,
        tables: Mapping[str, Rows],
        partition: KeyPartition,
        owner_executor: Executor,
        *,
        first_batch: int,
        check_replicas: bool = False,
        copy_executor: Executor = client.run_inline,
        write_executor: Executor = client.run_inline,
    ) -> None:
        """Start to serve `tables`.

        `owner_executor` runs the calls of MEM-PS, one after the other; `copy_executor` copies rows, `write_executor`
        writes snapshots, both away from the event loop.
        """
        self.session = Session(member, network)
        self.partition = partition
        self.owner = Owner(self.session, tables, owner_executor, write_executor, first_batch)
        self._check_replicas = check_replicas
        self._copy_executor = copy_executor
        self._buffers = Buffers()

    async def pull(self, batch: int, table: str, keys: Keys, owners: KeysByOwner, out: Floats) -> PullResult:
        """Pull the rows that are not deferred into `out` (U, W); return which rows are deferred, forwarded, shared."""
        return await client.pull(self.session, batch, table, keys, owners, out, self._copy_executor)

    def deferred_rows(self, pulled: PullResult, out: Floats) -> AsyncIterator[Int64s]:
        """Receive deferred rows into `out`, the array given to `pull`; yield their positions, message by message."""
        return client.deferred_rows(self.session, pulled, out, self._copy_executor)

    async def exchange(self, batch: int, pulled: Mapping[str, PullResult]) -> Exchange:
        """Return the exchange of gradient sums between holders of the same rows, for the steps of a batch."""
        sharing = {table: one.sharing for table, one in pulled.items()}
        exchange = Exchange(self.session, batch, sharing, self._buffers, self.partition.pool)
        await exchange.begin()
        return exchange

    async def push(self, pulled: PullResult, rows: Floats, snapshot: str = "") -> None:
        """Send trained rows (U, W) to their owners; `snapshot` names the snapshot that ends with this batch, if any."""
        empty = self.partition.pool.buffers.empty
        await client.push(self.session, pulled, rows, snapshot, self._check_replicas, self._copy_executor, empty)

    async def lookup(self, batch: int, number: int, table: str, keys: Keys, owners: KeysByOwner, out: Floats) -> None:
        """Read rows as after `batch`, for evaluation; `number` distinguishes the lookups of one batch and table."""
        await client.lookup(self.session, batch, number, table, keys, owners, out, self._copy_executor)

    def close(self) -> None:
        """Stop serving; every pending wait raises an error."""
        self.owner.close()
        self.session.close()


class Link:
    """Blocking interface to the peers, one per incarnation.

    Use: create it, send its `address` to the other nodes, call `join` when all addresses are known, then `close`.
    """

    def __init__(self, wire: ListenOptions, alone: bool = False, pool: ComputePool | None = None) -> None:
        """Open a port, unless this node is `alone`. Messages are received into buffers of `pool`, the node's."""
        self._wire = wire
        self._loop = LoopThread()
        pool = pool or ComputePool(1)
        self._trace = pool.trace
        self._transport: Transport = self._loop.run(_make_transport(pool))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="daskps-owner", initializer=lower_thread_priority)
        # Two threads, so that a pull and a push can copy at the same time.
        self._copies = ThreadPoolExecutor(2, thread_name_prefix="daskps-copy", initializer=lower_thread_priority)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="daskps-snapshot", initializer=lower_thread_priority)
        self._peers: Peers | None = None
        self.busy_seconds = 0.0  # time that MEM-PS has worked on this node, for requests of any node
        self.address = "" if alone else self._loop.run(self._transport.start(wire.listen_on, wire.listen_args))

    @property
    def peers(self) -> Peers:
        """Protocol object behind this link; for statistics and tests."""
        assert self._peers is not None, "join first"
        return self._peers

    @property
    def collective(self) -> Collective:
        """Collective over all nodes; call it from any thread but the event loop's."""
        return HostCollective(self.peers.session, self._start)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Handle[T]:
        """Start a coroutine on the event loop."""
        return _Started(self._loop.start(coroutine))

    def join(
        self,
        member: Member,
        addresses: Sequence[str],
        tables: Mapping[str, Rows],
        partition: KeyPartition,
        *,
        first_batch: int,
        check_replicas: bool = False,
        failed: Callable[[DaskpsError], None] = lambda error: None,
    ) -> None:
        """Connect to all peers and begin to serve this node's rows.

        `failed` is called on the event loop with the first error.
        """

        async def begin() -> None:
            self._peers = peers = Peers(
                *(member, self._transport, tables, partition, self._in_owner_thread),
                first_batch=first_batch,
                check_replicas=check_replicas,
                copy_executor=self._in_copy_thread,
                write_executor=self._in_write_thread,
            )
            peers.session.on_failure(failed)
            if member.nodes > 1:
                arguments = self._wire.connection_args
                await self._transport.join(member, addresses, peers.session.deliver, peers.session.fail, arguments)

        self._loop.run(begin())

    async def _in_owner_thread(self, call: Callable[[], Any]) -> Any:
        """Run a call of MEM-PS in the owner's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, call)

    async def _in_copy_thread(self, call: Callable[[], Any]) -> Any:
        """Run a copy of rows in one of the copy threads."""
        return await asyncio.get_running_loop().run_in_executor(
            self._copies, self._trace.call, "copy rows", "network", call
        )

    async def _in_write_thread(self, call: Callable[[], Any]) -> Any:
        """Write a piece of a snapshot in the thread for that."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, call)

    def _timed(self, call: Callable[[], Any]) -> Any:
        """Run a call and add its time to `busy_seconds`."""
        start = time.perf_counter()
        try:
            return call()
        finally:
            self.busy_seconds += time.perf_counter() - start

    def pull(
        self,
        batch: int,
        wanted: Mapping[str, tuple[Keys, Floats]],
        owners: Mapping[str, KeysByOwner] | None = None,
    ) -> dict[str, PullResult]:
        """Pull the rows of each table's keys that are not deferred into its array (U, W); keys may be in any order.

        Return for each table which rows are deferred, forwarded and shared. `owners` is the grouping of each table's
        keys by owner, if the caller already has it.
        """
        owners = owners or {table: self.peers.partition.group(keys) for table, (keys, _) in wanted.items()}

        async def all_tables() -> list[PullResult]:
            return await asyncio.gather(
                *(self.peers.pull(batch, table, keys, owners[table], out) for table, (keys, out) in wanted.items())
            )

        return dict(zip(wanted, self._loop.run(all_tables()), strict=True))

    def wait_deferred(self, pulled: Mapping[str, PullResult], outs: Mapping[str, Floats]) -> dict[str, Int64s]:
        """Wait until every deferred row is in its array, the one given to `pull`; return the rows' positions."""

        async def all_tables() -> dict[str, Int64s]:
            came = {}
            for table, one in pulled.items():
                positions = [positions async for positions in self.peers.deferred_rows(one, outs[table])]
                came[table] = np.concatenate([np.empty(0, np.int64), *positions])
            return came

        return self._loop.run(all_tables())

    def exchange(self, batch: int, pulled: Mapping[str, PullResult]) -> BatchExchange:
        """Return the exchange for the steps of a batch."""
        exchange = self._loop.run(self.peers.exchange(batch, pulled))
        return BatchExchange(self._loop, self.peers.session, self.collective, batch, exchange)

    def push(self, pulled: Mapping[str, PullResult], rows: Mapping[str, Floats], snapshot: str = "") -> None:
        """Send trained rows to their owners and end the batch on this node; the arrays may be reused afterwards."""

        async def all_tables() -> None:
            await asyncio.gather(*(self.peers.push(one, rows[table], snapshot) for table, one in pulled.items()))
            for batch in {one.batch for one in pulled.values()}:
                self.peers.session.close_batch(batch)

        self._loop.run(all_tables())

    def lookup(self, batch: int, number: int, wanted: Mapping[str, tuple[Keys, Floats]]) -> None:
        """Read rows as after `batch` into the arrays, for evaluation; `number` distinguishes lookups of one batch."""
        owners = {table: self.peers.partition.group(keys) for table, (keys, _) in wanted.items()}

        async def all_tables() -> None:
            for table, (keys, out) in wanted.items():
                await self.peers.lookup(batch, number, table, keys, owners[table], out)

        self._loop.run(all_tables())

    def gather(self, kind: MessageKind, batch: int, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
        """Send arrays to rank 0. Rank 0 gets those of all others in rank order; the others get [] and do not wait."""
        return self._loop.run(collective.gather(self.peers.session, kind, batch, tuple(arrays)))

    def prepared(self, snapshot: str, batch: int) -> None:
        """Wait until this node's partitions have prepared the snapshot that ends with `batch`."""
        self._loop.run(self.peers.owner.prepared(snapshot, batch))

    def run_in_owner_thread(self, call: Callable[[], Any]) -> Any:
        """Run `call` in the thread in which MEM-PS and its store are used, and wait for it."""
        return self._thread.submit(call).result()

    def fail(self, error: DaskpsError, tell: bool = True) -> None:
        """Stop this node's part in the run and tell all peers why; every pending wait raises `error`."""
        if self._peers is not None:
            self._loop.call(self._peers.session.fail, error, tell)

    def close(self) -> None:
        """Close the link: pending waits raise an error, peers see the connection end, MEM-PS is not used any more."""

        async def end() -> None:
            if self._peers is not None:
                self._peers.close()
            await self._transport.close()

        self._loop.run(end())
        self._thread.shutdown(wait=True)
        self._copies.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        self._loop.close()


@dataclass(frozen=True, slots=True)
class _Started(Generic[T]):
    """Coroutine that runs on an event loop of another thread."""

    _future: Future[T]

    def wait(self) -> T:
        return self._future.result()


class BatchExchange:
    """Blocking exchange of sums over all nodes for the steps of one batch; used by the train stage."""

    def __init__(
        self, loop: LoopThread, session: Session, collective: Collective, batch: int, exchange: Exchange
    ) -> None:
        self._loop, self._session, self._collective = loop, session, collective
        self._batch, self._exchange = batch, exchange

    def start(self, step: int, touched: Mapping[str, Touched], dense: Int64s) -> Pending:
        """Send this node's sums of a step. Every node does so for every step, and calls `finish` before the next one.

        `dense` may be written to again two steps later.
        """
        packed = self._exchange.pack(touched)
        rows = self._collective.exchange(Tag(MessageKind.SUMS, self._batch, step), packed)
        return Pending(
            *(self._exchange, touched, rows),
            self._collective.sum(Tag(MessageKind.DENSE, self._batch, step), dense),
        )

    def merge(
        self,
        step: int,
        touched: Mapping[str, Bools],
        layouts: Mapping[str, RowLayout],
        gather: Callable[[str, Int32s], Floats],
        base: Callable[[str, Int32s], Floats],
        dense: Floats,
        dense_steps: int,
    ) -> tuple[dict[str, tuple[Int32s, Floats]], tuple[Floats, int]]:
        """Return merged rows (`Exchange.merge_rows`), dense values and their step count; for `sync_every` above 1."""

        async def both() -> tuple[dict[str, tuple[Int32s, Floats]], tuple[Floats, int]]:
            return await asyncio.gather(
                self._exchange.merge_rows(step, touched, layouts, gather, base),
                collective.mean_dense(self._session, self._batch, step, dense, dense_steps),
            )

        return self._loop.run(both())


@dataclass(frozen=True, slots=True)
class Pending:
    """Step whose sums have been sent and not yet received."""

    _exchange: Exchange
    _touched: Mapping[str, Touched]
    _rows: Handle[dict[int, Packed]]
    _dense: Handle[Int64s]

    def finish(self) -> tuple[dict[str, tuple[Touched, Touched]], Int64s]:
        """Wait for the sums over all nodes and return them.

        For each table: the rows touched here, updated in place, and the rows that only other nodes touched. Then the
        sums of the dense network.
        """
        summed = self._exchange.add(self._touched, self._rows.wait())
        return summed, self._dense.wait()


async def _make_transport(pool: ComputePool) -> Transport:
    """Create the transport on the event loop, where all its calls are made."""
    return Transport(pool=pool)
