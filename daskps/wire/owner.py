"""The owner's side of pull and push: pass the requests of all nodes for this node's rows to MEM-PS, in batch order.

Input: pull, push and lookup messages of all nodes, in any order. Output: rows (at once, or deferred until the earlier
batch has pushed them) and prepared snapshots. `owner_executor` runs the calls of MEM-PS in its thread, one at a time;
`write_executor` writes the pieces of snapshots in another one. This module only moves bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from daskps.errors import DaskpsError, ProtocolError, StaleError, TrainingError
from daskps.mem.cache import PullReply
from daskps.mem.memps import SnapshotPiece
from daskps.types import Floats, Keys
from daskps.wire.message import Message, MessageKind
from daskps.wire.session import Session

Executor = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs a long call away from the event loop


class Rows(Protocol):
    """Interface of MEM-PS that an owner uses."""

    def pull(self, keys: Keys, batch: int, node: int, *, out: Floats | None = None) -> Iterable[PullReply]: ...
    def push(self, keys: Keys, rows: Floats, batch: int, node: int) -> Iterable[PullReply]: ...
    def lookup(self, keys: Keys) -> Floats: ...
    def flush_begin(self, batch: int, snapshot_id: str) -> None: ...
    def next_piece(self) -> SnapshotPiece | None: ...
    def piece_written(self, piece: SnapshotPiece) -> None: ...


@dataclass(slots=True)
class _Queue:
    """Queue of messages of one kind, one from every node for every batch; batches are served in order."""

    batch: int  # the batch that is served now
    nodes: int
    taken: int = 0  # messages of this batch that were served
    waiting: dict[int, list[Message]] = field(default_factory=dict)  # by batch
    senders: dict[int, int] = field(default_factory=dict)  # by batch: bit set of the ranks whose message has come

    def put(self, message: Message) -> None:
        """Add a message; raise StaleError if it came before or if its batch is over."""
        bit = 1 << message.sender
        seen = self.senders.get(message.batch, 0)
        if message.batch < self.batch or seen & bit:
            why = "came twice" if seen & bit else f"came after that batch was over; batch {self.batch} is being served"
            raise StaleError(f"a {message} {why}")
        self.senders[message.batch] = seen | bit
        self.waiting.setdefault(message.batch, []).append(message)

    def next(self) -> Message | None:
        """Return a waiting message of the current batch, or None."""
        messages = self.waiting.get(self.batch)
        return messages.pop() if messages else None

    def done(self) -> bool:
        """Count one message as served; return True if it was the last of its batch."""
        self.taken += 1
        if self.taken < self.nodes:
            return False
        self.waiting.pop(self.batch)
        self.senders.pop(self.batch)
        self.batch, self.taken = self.batch + 1, 0
        return True


class TableOwner:
    """Server of one table's partitions on this node."""

    def __init__(
        self,
        session: Session,
        table: str,
        rows: Rows,
        owner_executor: Executor,
        write_executor: Executor,
        first_batch: int,
    ) -> None:
        self._session = session
        self._table = table
        self._rows = rows
        self._owner_executor, self._write_executor = owner_executor, write_executor
        self._pulls = _Queue(first_batch, session.nodes)
        self._pushes = _Queue(first_batch, session.nodes)
        self._lookups: list[Message] = []
        self._deferred_sent: dict[tuple[int, int], int] = {}  # by (node, batch): messages of deferred rows sent
        self._replicas: list[tuple[int, Keys, Keys]] = []  # node, keys, hashes
        self._prepared: dict[str, asyncio.Future[None]] = {}
        self._snapshots: asyncio.Queue[str] = asyncio.Queue()  # ids of snapshots that have begun: one at most
        self._wake = asyncio.Event()

    def take(self, message: Message) -> None:
        """Queue a message for this table; it is served when its turn comes."""
        if message.kind is MessageKind.LOOKUP:
            self._lookups.append(message)
        else:
            (self._pulls if message.kind is MessageKind.PULL else self._pushes).put(message)
        self._wake.set()

    async def serve(self) -> None:
        """Serve until cancelled. Pushes go first, because they unpin rows and complete deferred ones."""
        while True:
            if push := self._pushes.next():
                await self._push(push)
            elif pull := self._pulls.next():
                await self._pull(pull)
            elif lookup := self._ready_lookup():
                await self._lookup(lookup)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def write_snapshots(self) -> None:
        """Write snapshots until cancelled, while requests are served.

        Between two requests the thread of MEM-PS collects the rows of a piece; writing them would keep it too long.
        """
        while True:
            snapshot = await self._snapshots.get()
            while (piece := await self._owner_executor(self._rows.next_piece)) is not None:
                await self._write_executor(piece)
                await self._owner_executor(partial(self._rows.piece_written, piece))
            prepared = self.prepared(snapshot)
            if not prepared.done():  # it is done already if the run has failed
                prepared.set_result(None)
            self._snapshots.task_done()

    def prepared(self, snapshot: str) -> asyncio.Future[None]:
        """Return a future that is done when `snapshot` is prepared here.

        Writing begins when all pushes of the batch that names the snapshot are in.
        """
        return self._prepared.setdefault(snapshot, asyncio.get_running_loop().create_future())

    async def _pull(self, message: Message) -> None:
        keys = message.arrays[0]
        out = message.arrays[1] if len(message.arrays) > 1 else None  # a pull of this node itself: no copy of the rows
        deliver = await self._owner_executor(lambda: self._rows.pull(keys, message.batch, message.sender, out=out))
        self._pulls.done()
        self._send(deliver)

    async def _push(self, message: Message) -> None:
        keys, rows = message.arrays[:2]
        deliver: Iterable[PullReply] = ()
        if len(keys):  # MEM-PS ends a batch with its last row; an empty push after that would be stale
            deliver = await self._owner_executor(lambda: self._rows.push(keys, rows, message.batch, message.sender))
        if len(message.arrays) > 2:
            self._replicas.append((message.sender, message.arrays[2], message.arrays[3]))
        self._session.send(message.sender, MessageKind.TAKEN, message.batch, table=self._table)
        self._send(deliver)
        if self._pushes.done():
            self._compare(message.batch)
            if message.note:
                await self._snapshots.join()  # one snapshot at a time
                await self._owner_executor(lambda: self._rows.flush_begin(message.batch, message.note))
                self._snapshots.put_nowait(message.note)

    async def _lookup(self, message: Message) -> None:
        found = await self._owner_executor(lambda: self._rows.lookup(message.arrays[0]))
        target = (message.sender, MessageKind.FOUND, message.batch + 1)  # not `batch`: the session has closed it
        self._session.send(*target, step=message.step, table=self._table, arrays=(found,))

    def _send(self, deliveries: Iterable[PullReply]) -> None:
        """Send rows to their nodes: the first delivery of a batch is its answer, later ones carry deferred rows."""
        for delivery in deliveries:
            target = (delivery.node, delivery.batch)
            positions = () if delivery.positions is None else (delivery.positions,)
            rows = () if delivery.in_place else (delivery.rows,)
            if delivery.first:
                self._deferred_sent[target] = 0
                about = (delivery.forwarded, delivery.deferred, delivery.shared, delivery.holders)
                self._session.send(
                    *(delivery.node, MessageKind.ANSWER, delivery.batch),
                    table=self._table,
                    note="in place" if delivery.in_place else "some" if positions else "all",
                    arrays=(*about, *rows, *(positions if rows else ())),
                )
            else:
                step = self._deferred_sent[target]
                self._deferred_sent[target] = step + 1
                assert delivery.positions is not None
                self._session.send(
                    *(delivery.node, MessageKind.DEFERRED, delivery.batch),
                    step=step,
                    table=self._table,
                    arrays=(delivery.positions, *rows),
                )

    def _ready_lookup(self) -> Message | None:
        """Return a lookup whose batch has been pushed by all nodes, or None."""
        for index, message in enumerate(self._lookups):
            if self._pushes.batch > message.batch:
                if self._pushes.batch > message.batch + 1 or self._pushes.taken:
                    raise ProtocolError(
                        f"node {message.sender} looks up table {self._table!r} as of batch {message.batch}, but rows "
                        f"of batch {self._pushes.batch} were pushed: no batch may train while a model is evaluated"
                    )
                return self._lookups.pop(index)
        return None

    def _compare(self, batch: int) -> None:
        """Raise TrainingError unless all holders' hashes of each row are equal; an option for tests."""
        if not self._replicas:
            return
        nodes = np.concatenate([np.full(len(keys), node) for node, keys, _ in self._replicas])
        keys = np.concatenate([keys for _, keys, _ in self._replicas])
        hashes = np.concatenate([hashes for _, _, hashes in self._replicas])
        self._replicas.clear()
        order = np.lexsort((nodes, keys))
        nodes, keys, hashes = nodes[order], keys[order], hashes[order]
        wrong = np.flatnonzero((keys[1:] == keys[:-1]) & (hashes[1:] != hashes[:-1]))
        if len(wrong):
            first = int(wrong[0])
            raise TrainingError(
                f"replicas differ after batch {batch}: table {self._table!r}, key {keys[first]}, nodes {nodes[first]} "
                f"and {nodes[first + 1]}, and {len(wrong) - 1} more; a fault of daskps or of a machine's memory"
            )


class Owner:
    """Server of all tables of a node: two asyncio tasks per table, for requests and for snapshots."""

    def __init__(
        self,
        session: Session,
        tables: Mapping[str, Rows],
        owner_executor: Executor,
        write_executor: Executor,
        first_batch: int,
    ) -> None:
        self._session = session
        self.tables = {
            name: TableOwner(session, name, rows, owner_executor, write_executor, first_batch)
            for name, rows in sorted(tables.items())
        }
        self._tasks = [
            asyncio.create_task(self._guard(run))
            for owner in self.tables.values()
            for run in (owner.serve, owner.write_snapshots)
        ]
        for kind in (MessageKind.PULL, MessageKind.PUSH, MessageKind.LOOKUP):
            session.handle(kind, self._take)

    async def prepared(self, snapshot: str, batch: int) -> None:
        """Return when every table's partition has prepared `snapshot`, which holds `batch`."""
        for name, owner in self.tables.items():
            what = f"snapshot {snapshot} of table {name!r} to be prepared"
            await self._session.wait(owner.prepared(snapshot), "flush", batch, what)

    def close(self) -> None:
        """Stop serving."""
        for task in self._tasks:
            task.cancel()

    def _take(self, message: Message) -> None:
        """Pass a message to the owner of its table."""
        owner = self.tables.get(message.table)
        if owner is None:
            known = ", ".join(self.tables)
            raise ProtocolError(f"node {message.sender} asks for table {message.table!r}; there are {known}")
        owner.take(message)

    async def _guard(self, run: Callable[[], Awaitable[None]]) -> None:
        """Run a task of a table; an error of it ends the run on all nodes."""
        try:
            await run()
        except DaskpsError as error:
            self._session.fail(error)
        except Exception as error:
            self._session.fail(TrainingError(f"node {self._session.rank} cannot serve its rows: {error!r}"))
