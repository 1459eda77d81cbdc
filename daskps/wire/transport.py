"""Connections between the nodes of a run: one permanent connection per pair of nodes, on an event loop of its own.

Input: messages for a rank. Output: messages from a rank, in order. The first message of a connection is limited in
size and time, because its sender is not known yet. No other module of this folder imports Dask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from distributed.comm.core import Comm, connect, listen
from tornado.iostream import StreamClosedError

from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DaskpsError, PeerError, ProtocolError, StaleError
from daskps.wire.message import Message, MessageKind, decode, encode, refusal
from daskps.wire.session import Member

T = TypeVar("T")


class LoopThread:
    """Thread with an event loop that runs until `close`."""

    def __init__(self, name: str = "daskps-network") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result. Calling this on the loop itself would deadlock."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule a function call on the loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Cancel all running coroutines and end the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


logger = logging.getLogger("daskps.wire")

FLUSH_SECONDS = 2.0  # longest wait for unsent bytes on close: a peer that hangs never reads them
JOIN_SECONDS = 30.0  # longest wait in `join`: all nodes join at the same time; one that does not is lost
# Anyone who reaches the port can connect. These limits bound what a stranger can cost before it has said who it is.
HELLO_BYTES = 4096  # size of the first message
HELLO_SECONDS = 10.0  # time until the first message
MAX_WAITING = 64  # number of connections that have not been accepted or refused yet


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Options for this worker's connections; `of_worker` takes them from the Dask worker."""

    listen_on: str = "tcp://127.0.0.1"
    listen_args: Mapping[str, Any] | None = None
    connection_args: Mapping[str, Any] | None = None

    @classmethod
    def of_worker(cls, worker: Any, protocol: str = "auto") -> ListenOptions:
        """Return the interface, protocol and certificates of the worker's own port.

        A `protocol` other than ``auto``, such as ``ucx``, replaces the worker's.
        """
        own, _, host_and_port = worker.address.partition("://")
        host = "127.0.0.1" if own == "inproc" else host_and_port.rpartition(":")[0]
        scheme = ("tcp" if own == "inproc" else own) if protocol == "auto" else protocol
        security = worker.security
        if security.require_encryption and scheme != "tls":
            raise ConfigError(
                f"cluster.protocol is {protocol}, but the worker {worker.address} requires encryption: set it to tls"
            )
        return cls(f"{scheme}://{host}", security.get_listen_args("worker"), security.get_connection_args("worker"))


class _Pieces:
    """Stream interface over the bytes of one complete message."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._data, self._at = memoryview(b"".join(parts)), 0

    async def read_bytes(self, count: int) -> bytes:
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    async def read_into(self, buffer: memoryview) -> None:
        buffer[:] = self._data[self._at : self._at + len(buffer)]
        self._at += len(buffer)


class Connection:
    """Connection to one peer. Uses the comm's stream directly if it has one: no copy, no Dask serialization."""

    def __init__(self, comm: Comm, pool: ComputePool | None = None) -> None:
        self.comm = comm
        self._pool = pool or ComputePool(1)
        self._stream: Any = getattr(comm, "stream", None)
        self._last_write: asyncio.Future[None] | None = None  # used only if the comm has no stream

    def write(self, message: Message) -> None:
        """Send a message without waiting; raise OSError or StreamClosedError if the peer is gone."""
        parts = encode(message)
        if self._stream is not None:
            for part in parts:
                self._stream.write(part)
        else:
            self._last_write = asyncio.ensure_future(self._write_comm(self._last_write, parts))

    async def _write_comm(self, before: asyncio.Future[None] | None, parts: list[bytes | memoryview]) -> None:
        """Write the message after the one before it; writes of a comm must not overlap."""
        if before is not None:
            await before
        with contextlib.suppress(OSError):  # the peer is gone; the task that reads from it reports that
            await self.comm.write([bytes(part) for part in parts])

    async def read(self, limit_bytes: int | None = None) -> Message:
        """Return the next message; raise ProtocolError before reading it if its stated size exceeds the limit."""
        source: Any = _Pieces(await self.comm.read()) if self._stream is None else self._stream
        if not self._pool.trace.on:
            return await decode(source.read_bytes, source.read_into, limit_bytes, self._pool.buffers.empty)
        began = 0

        async def read_bytes(count: int) -> bytes:
            nonlocal began
            part: bytes = await source.read_bytes(count)
            began = began or time.perf_counter_ns()  # the message has begun to arrive; until then there was none
            return part

        message = await decode(read_bytes, source.read_into, limit_bytes, self._pool.buffers.empty)
        track = f"receive from node {message.sender}"
        self._pool.trace.add(f"receive {message.kind}", "network", began, track=track, bytes=message.nbytes)
        return message

    async def close(self) -> None:
        """Write the remaining bytes, for at most FLUSH_SECONDS, then close."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                if self._last_write is not None:
                    await asyncio.wait([self._last_write])
                await self.comm.close()
        if self._stream is not None:
            self._stream.close()
        else:
            self.comm.abort()


class Transport:
    """Connections of this node to all peers; all calls are made on one event loop.

    Use: `start`, send `address` to the other nodes, `join`, `send`, `close`.
    """

    def __init__(self, hello_seconds: float = HELLO_SECONDS, pool: ComputePool | None = None) -> None:
        """Create it without connections. Arrays of messages are received into buffers of `pool`, the node's."""
        self.address = ""
        self._pool = pool or ComputePool(1)
        self._hello_seconds = hello_seconds
        self._waiting = 0  # connections that have not been accepted or refused yet
        self._listener: Any = None
        self._member: Member | None = None
        self._connections: dict[int, Connection] = {}
        self._arrived: asyncio.Event = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []
        self._deliver: Callable[[Message], None] | None = None
        self._lost: Callable[[DaskpsError], None] | None = None
        self._closing = False

    async def start(self, listen_on: str, listen_args: Mapping[str, Any] | None = None) -> str:
        """Listen and return the address, e.g. on ``tls://10.0.0.3`` with ``Security.get_listen_args("worker")``.

        This opens one port, chosen by the operating system, until `close`.
        """
        self._listener = await listen(listen_on, self._accept, deserialize=False, **(listen_args or {}))
        self.address = self._listener.contact_address
        return self.address

    async def join(
        self,
        member: Member,
        addresses: Sequence[str],
        deliver: Callable[[Message], None],
        lost: Callable[[DaskpsError], None],
        connection_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect to all lower ranks and wait for all higher ones to connect.

        `deliver` is called with each message, `lost` with the error when a peer is lost.
        """
        self._member, self._deliver, self._lost = member, deliver, lost
        seconds = min(member.wait_seconds, JOIN_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                for rank in range(member.rank):
                    comm = await connect(addresses[rank], deserialize=False, **(connection_args or {}))
                    connection = Connection(comm, self._pool)
                    connection.write(Message(MessageKind.HELLO, member.run, member.incarnation, member.rank, -1))
                    self._add(rank, connection)
                while len(self._connections) < member.nodes - 1:
                    self._arrived.clear()
                    await self._arrived.wait()
        except (TimeoutError, OSError) as error:
            others = {rank: address for rank, address in enumerate(addresses) if rank != member.rank}
            missing = {rank: address for rank, address in others.items() if rank not in self._connections}
            raise PeerError(
                f"node {member.rank}, stage open: no connection with {missing} "
                f"within {seconds:g} s: {error!r}; workers must reach each other on ports of their own"
            ) from None

    def send(self, rank: int, message: Message) -> None:
        """Send a message without waiting; a lost peer is reported to `lost`."""
        trace, started = self._pool.trace, time.perf_counter_ns()
        try:
            self._connections[rank].write(message)
            if trace.on:
                trace.add(f"send {message.kind}", "network", started, to=rank, bytes=message.nbytes)
        except (StreamClosedError, OSError, KeyError) as error:
            self._report(rank, error)

    async def close(self) -> None:
        """Send the remaining bytes, then close all connections and the port."""
        self._closing = True
        if self._listener is not None:
            self._listener.stop()
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _accept(self, comm: Comm) -> None:
        """Accept a peer whose hello arrives within the limits of time and size; close every other connection."""
        if self._waiting >= MAX_WAITING:
            comm.abort()
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(self._hello_seconds):
                connection = Connection(comm, self._pool)
                hello = await connection.read(HELLO_BYTES)
            await self._judge(connection, hello)
        except (TimeoutError, ProtocolError, StreamClosedError, OSError) as error:
            logger.debug("a connection without a hello was closed: %r", error)
            comm.abort()
        finally:
            self._waiting -= 1

    async def _judge(self, connection: Connection, hello: Message) -> None:
        """Keep the connection if it comes from an expected node; otherwise refuse it without saying who is expected."""
        member = self._member
        while member is None:  # a peer got our address and connects before our own `join` was called
            await asyncio.sleep(0.01)
            member = self._member
        expected = range(member.rank + 1, member.nodes)  # each rank once
        known = hello.sender in expected and hello.sender not in self._connections
        if (
            hello.kind is not MessageKind.HELLO
            or (hello.run, hello.incarnation) != (member.run, member.incarnation)
            or not known
        ):
            error = StaleError(
                f"no node of run {hello.run!r}, incarnation {hello.incarnation}, rank {hello.sender} is wanted here"
            )
            connection.write(refusal(hello, member.rank, error))
            await connection.close()
            return
        self._add(hello.sender, connection)
        self._arrived.set()

    def _add(self, rank: int, connection: Connection) -> None:
        """Register a connection and start to read from it."""
        self._connections[rank] = connection
        self._readers.append(asyncio.ensure_future(self._read(rank, connection)))

    async def _read(self, rank: int, connection: Connection) -> None:
        """Deliver the peer's messages until the connection ends; report the reason to `lost`."""
        assert self._member is not None
        assert self._deliver is not None
        assert self._lost is not None
        try:
            while True:
                try:
                    message = await connection.read()
                except ProtocolError as error:
                    raise ProtocolError(f"node {rank} sent what is no message of daskps: {error}") from None
                if message.sender != rank:
                    raise ProtocolError(f"node {rank} sent a message in the name of another node: {message}")
                try:
                    self._deliver(message)
                except StaleError as error:
                    logger.warning("%s", error)
                    if message.kind is not MessageKind.ABORT:
                        connection.write(refusal(message, self._member.rank, error))
        except DaskpsError as error:
            self._lost(error)
        except (StreamClosedError, OSError) as error:
            self._report(rank, error)
        except Exception as error:  # a malformed message can raise anything; without this the task would end silently
            self._lost(ProtocolError(f"node {rank} sent what is no message of daskps: {error!r}"))

    def _report(self, rank: int, error: Exception) -> None:
        """Report a lost peer, unless this node is closing its connections itself."""
        if not self._closing and self._lost is not None:
            self._lost(PeerError(f"node {rank} is gone: its connection was lost ({error!r})"))
