"""A node's session in one incarnation of a run: its rank, its peers, the messages that have arrived, and timeouts.

Input: messages from the network, in any order. Output: each message to the `receive` that waits for it, or to the
handler of its kind. A wait that exceeds its time, a peer that aborts, or a message of another run or incarnation is an
error that names node, stage and batch. Every pending wait raises it and all peers are told, so a run stops on all nodes
at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from daskps.errors import DaskpsError, PeerError, ProtocolError, StaleError
from daskps.wire.message import Array, Message, MessageKind, MessageSender

# For error messages. By kind of message: the stage that waits for it, and what it waits for.
WAITS = {
    MessageKind.ANSWER: ("pull", "the rows that are not deferred"),
    MessageKind.POSITIONS: ("train", "its positions of the shared rows"),
    MessageKind.DEFERRED: ("train", "deferred rows"),
    MessageKind.WEIGHTS: ("train", "the largest weight of each step"),
    MessageKind.SUMS: ("train", "gradient sums"),
    MessageKind.DENSE: ("train", "dense sums"),
    MessageKind.METRICS: ("train", "the metrics of its examples"),
    MessageKind.VALIDATION: ("evaluate", "the metrics of its validation examples"),
    MessageKind.TOUCHED: ("train", "which rows to merge"),
    MessageKind.REPLICAS: ("train", "rows to merge"),
    MessageKind.FOUND: ("evaluate", "the rows of a lookup"),
    MessageKind.TAKEN: ("push", "the confirmation of the push"),
}

T = TypeVar("T")
Place = tuple[MessageKind, int, int, str, int]  # identifies a message: kind, batch, step, table, sender


@dataclass(frozen=True, slots=True)
class Member:
    """Identity of a node in a run. Only `rank` differs between the nodes."""

    run: str
    incarnation: int
    rank: int
    nodes: int
    wait_seconds: float = 300.0


class Session:
    """Sender and dispatcher of a node's messages. All calls are made on the node's event loop."""

    def __init__(self, member: Member, network: MessageSender) -> None:
        self.member = member
        self.rank = member.rank
        self.nodes = member.nodes
        self.error: DaskpsError | None = None
        self.bytes_sent = 0
        self._network = network
        self._failed: Callable[[DaskpsError], None] = lambda error: None
        self._handlers: dict[MessageKind, Callable[[Message], None]] = {}
        self._arrived: dict[Place, Message] = {}
        self._waiting: dict[Place, asyncio.Future[Message]] = {}
        self._futures: dict[asyncio.Future[Any], int] = {}  # pending waits and their batch
        self._closed_batch = -1  # no message of this batch or an earlier one is expected

    @property
    def peers(self) -> list[int]:
        """Ranks of all other nodes."""
        return [rank for rank in range(self.nodes) if rank != self.rank]

    def on_failure(self, failed: Callable[[DaskpsError], None]) -> None:
        """Register a callback for the first error."""
        self._failed = failed

    def handle(self, kind: MessageKind, handler: Callable[[Message], None]) -> None:
        """Pass all messages of `kind` to `handler` instead of to a `receive`."""
        self._handlers[kind] = handler

    def send(
        self,
        rank: int,
        kind: MessageKind,
        batch: int,
        *,
        step: int = 0,
        table: str = "",
        note: str = "",
        arrays: tuple[Array, ...] = (),
    ) -> None:
        """Send a message without waiting; one to this node itself does not pass through the network."""
        self.check()
        member = self.member
        message = Message(kind, member.run, member.incarnation, self.rank, batch, step, table, note, arrays)
        if rank == self.rank:
            self._accept(message)
        else:
            self.bytes_sent += message.nbytes
            self._network.send(rank, message)

    async def receive(self, kind: MessageKind, batch: int, sender: int, *, step: int = 0, table: str = "") -> Message:
        """Wait for the message with these fields and return it; raise PeerError after `wait_seconds`."""
        place = (kind, batch, step, table, sender)
        self.check()
        if place in self._arrived:
            return self._arrived.pop(place)
        future = self._waiting[place] = asyncio.get_running_loop().create_future()
        stage, what = WAITS.get(kind, (kind, kind))
        of = f" of table {table!r}" if table else ""
        try:
            return await self.wait(future, stage, batch, f"node {sender} to send {what}{of}, step {step}")
        finally:
            self._waiting.pop(place, None)

    async def wait(self, future: asyncio.Future[T], stage: str, batch: int, what: str) -> T:
        """Return the future's result; raise PeerError if this run fails meanwhile, or after `wait_seconds`."""
        self.check()
        self._futures[future] = batch
        try:
            async with asyncio.timeout(self.member.wait_seconds):
                return await future
        except TimeoutError:
            error = PeerError(
                f"node {self.rank}, stage {stage}, batch {batch}: waited {self.member.wait_seconds:g} s for {what}; it "
                "is stuck, lost or too slow: look at its log, or raise cluster.wait_seconds"
            )
            self.fail(error)
            raise error from None
        finally:
            self._futures.pop(future, None)

    def deliver(self, message: Message) -> None:
        """Accept a message from the network. One that does not belong here raises, and the network reports it."""
        member = self.member
        if (message.run, message.incarnation) != (member.run, member.incarnation):
            raise StaleError(
                f"node {self.rank} of run {member.run!r}, incarnation {member.incarnation}, got a {message}, of run "
                f"{message.run!r}, incarnation {message.incarnation}: that incarnation is over, or its sender must "
                "open the model again"
            )
        if message.kind is MessageKind.ABORT:
            self.fail(PeerError(f"node {message.sender} stopped at batch {message.batch}: {message.note}"), tell=False)
            return
        self._accept(message)

    def close_batch(self, batch: int) -> None:
        """End `batch` on this node: nothing waits for it any more, and a later message of it is an error."""
        left = [message for message in self._arrived.values() if message.batch <= batch]
        if left:
            raise ProtocolError(f"node {self.rank} ends batch {batch}, but nothing has received: {left[0]}")
        self._closed_batch = max(self._closed_batch, batch)

    def fail(self, error: DaskpsError, tell: bool = True) -> None:
        """Stop this node's part in the run: every pending wait raises `error`, and all peers are told.

        Only the first error counts.
        """
        if self.error is not None:
            return
        self.error = error
        self._failed(error)
        for future in self._futures:
            if not future.done():
                future.set_exception(error)
        if tell:
            batch = min(self._futures.values(), default=self._closed_batch + 1)
            member = self.member
            for rank in self.peers:
                note = f"{type(error).__name__}: {error}"
                self._network.send(
                    rank, Message(MessageKind.ABORT, member.run, member.incarnation, self.rank, batch, note=note)
                )

    def check(self) -> None:
        """Raise the error that has stopped this node's part in the run, if there is one."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stop without telling the peers: the run is over, or this node is gone."""
        member = self.member
        self.fail(
            PeerError(f"node {self.rank} has closed incarnation {member.incarnation} of run {member.run!r}"), tell=False
        )

    def _accept(self, message: Message) -> None:
        """Pass a message to its handler or to its waiting `receive`, or keep it for a later one."""
        if handler := self._handlers.get(message.kind):
            handler(message)
            return
        if message.batch <= self._closed_batch:
            raise StaleError(f"node {self.rank} has ended batch {self._closed_batch}, but got a {message}")
        place = (message.kind, message.batch, message.step, message.table, message.sender)
        future = self._waiting.get(place)
        if future is not None and not future.done():
            future.set_result(message)
        elif place in self._arrived or future is not None:
            raise ProtocolError(f"node {self.rank} got twice: {message}; every message is sent once")
        else:
            self._arrived[place] = message
