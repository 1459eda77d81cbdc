"""One node among its peers, in one epoch: everything that a stage may ask of the other nodes, in one object.

In: working sets, gradient sums, trained rows. Out: rows and sums over all nodes. All calls are coroutines on the node's
event loop; network, clock (the loop's) and the place where work runs are given, so that a simulator can give its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from daskps.cluster import collective, requester
from daskps.cluster.exchange import Buffers, Exchange
from daskps.cluster.message import Message, Network
from daskps.cluster.owner import Owner, Rows, Work
from daskps.cluster.partition import Grouped, KeyPartition
from daskps.cluster.requester import Pulled
from daskps.cluster.session import Member, Session
from daskps.types import Floats, Int64s, Keys


class Peers:
    """The protocol of one node. Made on the event loop, when its rows are open at the snapshot to start from."""

    def __init__(
        self,
        member: Member,
        network: Network,
        tables: Mapping[str, Rows],
        partition: KeyPartition,
        work: Work,
        *,
        first_batch: int,
        check_replicas: bool = False,
        aside: Work = requester.at_once,
    ) -> None:
        """`work` runs what MEM-PS does, one call after the other; `aside` what copies rows, off the event loop."""
        self.session = Session(member, network)
        self.partition = partition
        self.owner = Owner(self.session, tables, work, first_batch)
        self._check_replicas = check_replicas
        self._aside = aside
        self._buffers = Buffers()

    @property
    def rank(self) -> int:
        """This node's."""
        return self.session.rank

    @property
    def nodes(self) -> int:
        """How many there are."""
        return self.session.nodes

    def deliver(self, message: Message) -> None:
        """A message that came from a peer."""
        self.session.deliver(message)

    def group(self, keys: Keys) -> Grouped:
        """A working set's order by owner, as `pull` takes it; work, so not for the event loop."""
        return self.partition.group(keys)

    async def pull(self, batch: int, table: str, keys: Keys, owners: Grouped, out: Floats) -> Pulled:
        """The working set's free rows into `out` (U, W), and what is to be known about the others."""
        return await requester.pull(self.session, batch, table, keys, owners, out, self._aside)

    def late_rows(self, pulled: Pulled, out: Floats) -> AsyncIterator[Int64s]:
        """Positions of rows that an earlier batch had, as they come into `out`, the array that `pull` was given."""
        return requester.late_rows(self.session, pulled, out, self._aside)

    async def exchange(self, batch: int, pulled: Mapping[str, Pulled]) -> Exchange:
        """The sums between holders of the same rows, for the steps of a batch."""
        sharing = {table: one.sharing for table, one in pulled.items()}
        exchange = Exchange(self.session, batch, sharing, self._buffers, self.partition.pool)
        await exchange.begin()
        return exchange

    async def sum_dense(self, batch: int, step: int, mine: Int64s) -> Int64s:
        """Sums over all nodes; `mine` may be written to again two steps later."""
        return await collective.sum_dense(self.session, batch, step, mine)

    async def mean_dense(self, batch: int, step: int, mine: Floats, count: int) -> tuple[Floats, int]:
        """Means over all nodes and the largest count, for `sync_every` above 1."""
        return await collective.mean_dense(self.session, batch, step, mine, count)

    async def push(self, pulled: Pulled, rows: Floats, snapshot: str = "") -> None:
        """Trained rows (U, W) back to their owners; `snapshot` names the one that ends with this batch, if any."""
        await requester.push(self.session, pulled, rows, snapshot, self._check_replicas, self._aside)

    def end_batch(self, batch: int) -> None:
        """Every table of `batch` is pushed: nothing of it may come any more."""
        self.session.close_batch(batch)

    async def lookup(self, batch: int, number: int, table: str, keys: Keys, owners: Grouped, out: Floats) -> None:
        """Rows as after `batch`, for evaluation; `number` tells the lookups of one batch and table apart."""
        await requester.lookup(self.session, batch, number, table, keys, owners, out, self._aside)

    async def prepared(self, snapshot: str, batch: int) -> None:
        """Return when this node's partitions have prepared the snapshot that ends with `batch`."""
        await self.owner.prepared(snapshot, batch)

    def close(self) -> None:
        """Stop serving; what waits gets an error."""
        self.owner.close()
        self.session.close()
