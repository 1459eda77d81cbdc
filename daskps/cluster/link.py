"""A node's link to its peers, for stages: plain calls that block, from any thread.

In: working sets, gradient sums, trained rows, from the threads of the stages. Out: rows and sums over all nodes. Behind
it are the node's own event loop, its connections, and one thread in which MEM-PS works for all who ask. One node alone
takes the same way, without a socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.cluster import collective
from daskps.cluster.exchange import Exchange, Packed, Touched
from daskps.cluster.loop import LoopThread
from daskps.cluster.message import Array
from daskps.cluster.owner import Rows
from daskps.cluster.partition import Grouped, KeyPartition
from daskps.cluster.peers import Peers
from daskps.cluster.priority import step_back
from daskps.cluster.requester import Pulled
from daskps.cluster.session import Member
from daskps.cluster.transport import Transport
from daskps.errors import ConfigError, DaskpsError
from daskps.types import Bools, Floats, Int32s, Int64s, Keys, RowLayout


@dataclass(frozen=True, slots=True)
class Wire:
    """How this worker's connections are made; `of_worker` takes it over from Dask."""

    listen_on: str = "tcp://127.0.0.1"
    listen_args: Mapping[str, Any] | None = None
    connection_args: Mapping[str, Any] | None = None

    @classmethod
    def of_worker(cls, worker: Any, protocol: str = "auto") -> Wire:
        """Interface, protocol and certificates of the worker's own port; `protocol` (``ucx``) overrides the second."""
        own, _, place = worker.address.partition("://")
        host = "127.0.0.1" if own == "inproc" else place.rpartition(":")[0]
        scheme = ("tcp" if own == "inproc" else own) if protocol == "auto" else protocol
        security = worker.security
        if security.require_encryption and scheme != "tls":
            raise ConfigError(
                f"cluster.protocol is {protocol}, but the worker {worker.address} requires encryption: set it to tls"
            )
        return cls(f"{scheme}://{host}", security.get_listen_args("worker"), security.get_connection_args("worker"))


class Link:
    """Use: make, tell the others `address`, `join` when all addresses are known, `close`. One per epoch."""

    def __init__(self, wire: Wire, alone: bool = False) -> None:
        self._wire = wire
        self._loop = LoopThread()
        self._transport: Transport = self._loop.run(_make_transport())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="daskps-owner", initializer=step_back)
        # A pull's and a push's.
        self._copies = ThreadPoolExecutor(2, thread_name_prefix="daskps-copy", initializer=step_back)
        self._peers: Peers | None = None
        self.busy_seconds = 0.0  # that MEM-PS has worked here, for whomever
        self.address = "" if alone else self._loop.run(self._transport.start(wire.listen_on, wire.listen_args))

    @property
    def peers(self) -> Peers:
        """The protocol behind; for statistics and tests."""
        assert self._peers is not None, "join first"
        return self._peers

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
        """Connect to all peers, begin to serve this node's rows; `failed` is told of the first error, on the loop."""

        async def begin() -> None:
            self._peers = peers = Peers(
                *(member, self._transport, tables, partition, self._work),
                first_batch=first_batch,
                check_replicas=check_replicas,
                aside=self._aside,
            )
            peers.session.on_failure(failed)
            if member.nodes > 1:
                arguments = self._wire.connection_args
                await self._transport.join(member, addresses, peers.deliver, peers.session.fail, arguments)

        self._loop.run(begin())

    async def _work(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, call)

    async def _aside(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._copies, call)

    def _timed(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return call()
        finally:
            self.busy_seconds += time.perf_counter() - start

    def pull(
        self,
        batch: int,
        wanted: Mapping[str, tuple[Keys, Floats]],
        owners: Mapping[str, Grouped] | None = None,
    ) -> dict[str, Pulled]:
        """Free rows of each table's keys into its array (U, W), in any order; what is to be known about the others.

        `owners` says how each table's keys are ordered by owner, where that is known.
        """
        owners = owners or {table: self.peers.group(keys) for table, (keys, _) in wanted.items()}

        async def all_tables() -> list[Pulled]:
            return await asyncio.gather(
                *(self.peers.pull(batch, table, keys, owners[table], out) for table, (keys, out) in wanted.items())
            )

        return dict(zip(wanted, self._loop.run(all_tables()), strict=True))

    def wait_late(self, pulled: Mapping[str, Pulled], outs: Mapping[str, Floats]) -> dict[str, Int64s]:
        """Wait until every late row is in its array, the one that `pull` was given; positions of those that came."""

        async def all_tables() -> dict[str, Int64s]:
            came = {}
            for table, one in pulled.items():
                positions = [positions async for positions in self.peers.late_rows(one, outs[table])]
                came[table] = np.concatenate([np.empty(0, np.int64), *positions])
            return came

        return self._loop.run(all_tables())

    def exchange(self, batch: int, pulled: Mapping[str, Pulled]) -> BatchExchange:
        """The steps of a batch."""
        return BatchExchange(self._loop, self.peers, batch, self._loop.run(self.peers.exchange(batch, pulled)))

    def push(self, pulled: Mapping[str, Pulled], rows: Mapping[str, Floats], snapshot: str = "") -> None:
        """Trained rows back to their owners; the arrays may be reused when this returns. Ends the batch here."""

        async def all_tables() -> None:
            await asyncio.gather(*(self.peers.push(one, rows[table], snapshot) for table, one in pulled.items()))
            for batch in {one.batch for one in pulled.values()}:
                self.peers.end_batch(batch)

        self._loop.run(all_tables())

    def lookup(self, batch: int, number: int, wanted: Mapping[str, tuple[Keys, Floats]]) -> None:
        """Rows as after `batch` into the arrays, for evaluation; `number` tells lookups of one batch apart."""
        owners = {table: self.peers.group(keys) for table, (keys, _) in wanted.items()}

        async def all_tables() -> None:
            for table, (keys, out) in wanted.items():
                await self.peers.lookup(batch, number, table, keys, owners[table], out)

        self._loop.run(all_tables())

    def gather(self, kind: str, batch: int, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
        """Rank 0 gets the arrays of all others, by rank; the others, who get nothing, do not wait."""
        return self._loop.run(collective.gather(self.peers.session, kind, batch, tuple(arrays)))

    def prepared(self, snapshot: str, batch: int) -> None:
        """Wait until this node's partitions have prepared the snapshot that ends with `batch`."""
        self._loop.run(self.peers.prepared(snapshot, batch))

    def work(self, call: Callable[[], Any]) -> Any:
        """Run `call` in the thread in which MEM-PS and its store are used, and wait for it."""
        return self._thread.submit(call).result()

    def fail(self, error: DaskpsError, tell: bool = True) -> None:
        """Stop this node's part and tell all peers why; those who wait get an error."""
        if self._peers is not None:
            self._loop.call(self._peers.session.fail, error, tell)

    def close(self) -> None:
        """End the link: what waits gets an error, peers see the connection end, and the rows are not used any more."""

        async def end() -> None:
            if self._peers is not None:
                self._peers.close()
            await self._transport.close()

        self._loop.run(end())
        self._thread.shutdown(wait=True)
        self._copies.shutdown(wait=True)
        self._loop.close()


class BatchExchange:
    """What nodes add up in the steps of one batch, for the train stage."""

    def __init__(self, loop: LoopThread, peers: Peers, batch: int, exchange: Exchange) -> None:
        self._loop, self._peers, self._batch, self._exchange = loop, peers, batch, exchange

    def start(self, step: int, touched: Mapping[str, Touched], dense: Int64s) -> Pending:
        """Send what this node has of a step; all nodes do so for every step, and `finish` it before the next.

        `dense` may be written to again two steps later.
        """
        packed = self._exchange.pack(touched)

        async def both() -> tuple[dict[int, Packed], Int64s]:
            return await asyncio.gather(
                self._exchange.swap(step, packed), self._peers.sum_dense(self._batch, step, dense)
            )

        return Pending(self._exchange, touched, self._loop.start(both()))

    def merge(
        self,
        step: int,
        touched: Mapping[str, Bools],
        layouts: Mapping[str, RowLayout],
        gather: Callable[[str, Int32s], Floats],
        dense: Floats,
        dense_steps: int,
    ) -> tuple[dict[str, tuple[Int32s, Floats]], tuple[Floats, int]]:
        """For `sync_every` above 1: merged rows (`Exchange.merge_rows`), dense values and their step count."""

        async def both() -> tuple[dict[str, tuple[Int32s, Floats]], tuple[Floats, int]]:
            return await asyncio.gather(
                self._exchange.merge_rows(step, touched, layouts, gather),
                self._peers.mean_dense(self._batch, step, dense, dense_steps),
            )

        return self._loop.run(both())


@dataclass(frozen=True, slots=True)
class Pending:
    """A step whose sums are on their way."""

    _exchange: Exchange
    _touched: Mapping[str, Touched]
    _answer: Future[tuple[dict[int, Packed], Int64s]]

    def finish(self) -> tuple[dict[str, tuple[Touched, Touched]], Int64s]:
        """Sums of all nodes: of rows touched here, added to in place, of rows only others touched, of the network."""
        received, dense = self._answer.result()
        return self._exchange.add(self._touched, received), dense


async def _make_transport() -> Transport:
    return Transport()
