"""Messages between the nodes of a run: one lasting connection per pair of nodes, on the node's own event loop.

In: messages, from the loop's thread. Out: messages, given to `deliver`; lost peers, told to `lost`. Connections are
made by `distributed.comm`, so addresses, TLS and certificates are those of the Dask worker. On tcp and tls the frames
then go straight to the comm's stream; other protocols (ucx) carry the same frames through the comm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.comm.core import Comm, connect, listen
from tornado.iostream import StreamClosedError

from daskps.cluster.frames import decode, encode
from daskps.cluster.message import ABORT, Message, refusal
from daskps.cluster.session import Member
from daskps.errors import DaskpsError, PeerError, ProtocolError, StaleError

logger = logging.getLogger("daskps.cluster")

HELLO = "hello"
FLUSH_SECONDS = 2.0  # a peer that is stuck never reads what is still to be written
JOIN_SECONDS = 30.0  # all nodes join at the same moment; one that does not is gone


class _Pieces:
    """A message that came whole, read as if it came from a stream."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._data, self._at = memoryview(b"".join(parts)), 0

    async def read(self, count: int) -> bytes:
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    async def read_into(self, buffer: memoryview) -> None:
        buffer[:] = self._data[self._at : self._at + len(buffer)]
        self._at += len(buffer)


class Connection:
    """One peer."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._stream: Any = getattr(comm, "stream", None)
        self._last_write: asyncio.Future[None] | None = None  # only without a stream

    def write(self, message: Message) -> None:
        """Put a message on its way; OSError or StreamClosedError if the peer is gone."""
        parts = encode(message)
        if self._stream is not None:
            for part in parts:
                self._stream.write(part)
        else:
            self._last_write = asyncio.ensure_future(self._write_comm(self._last_write, parts))

    async def _write_comm(self, before: asyncio.Future[None] | None, parts: list[bytes | memoryview]) -> None:
        if before is not None:
            await before
        with contextlib.suppress(OSError):  # the peer is gone, which its reader here reports
            await self.comm.write([bytes(part) for part in parts])

    async def read(self) -> Message:
        """The next message."""
        if self._stream is not None:
            return await decode(self._stream.read_bytes, self._stream.read_into)
        pieces = _Pieces(await self.comm.read())
        return await decode(pieces.read, pieces.read_into)

    async def close(self) -> None:
        """Write what is still to be written, as far as the peer reads it, then close."""
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
    """This node's connections. Use: `start`, tell the others `address`, `join`, `send`, `close`; all on one loop."""

    def __init__(self) -> None:
        self.address = ""
        self._listener: Any = None
        self._member: Member | None = None
        self._connections: dict[int, Connection] = {}
        self._arrived: asyncio.Event = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []
        self._deliver: Callable[[Message], None] | None = None
        self._lost: Callable[[DaskpsError], None] | None = None
        self._closing = False

    async def start(self, listen_on: str, listen_args: Mapping[str, Any] | None = None) -> str:
        """Listen, e.g. on ``tls://10.0.0.3`` with what ``Security.get_listen_args("worker")`` says; the address.

        This opens one port, chosen by the system, for as long as the epoch lasts.
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
        """Connect to all lower ranks, wait for all higher ones. Messages go to `deliver`, lost peers to `lost`."""
        self._member, self._deliver, self._lost = member, deliver, lost
        seconds = min(member.wait_seconds, JOIN_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                for rank in range(member.rank):
                    comm = await connect(addresses[rank], deserialize=False, **(connection_args or {}))
                    connection = Connection(comm)
                    connection.write(Message(HELLO, member.run, member.epoch, member.rank, -1))
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
        """Put a message on its way."""
        try:
            self._connections[rank].write(message)
        except (StreamClosedError, OSError, KeyError) as error:
            self._report(rank, error)

    async def close(self) -> None:
        """Send what is still to be sent, close all connections and the port."""
        self._closing = True
        if self._listener is not None:
            self._listener.stop()
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _accept(self, comm: Comm) -> None:
        connection = Connection(comm)
        hello = await connection.read()
        member = self._member
        while member is None:  # a peer was told our address before we were told to join
            await asyncio.sleep(0.01)
            member = self._member
        expected = range(member.rank + 1, member.nodes)  # each once
        known = hello.sender in expected and hello.sender not in self._connections
        if hello.kind != HELLO or (hello.run, hello.epoch) != (member.run, member.epoch) or not known:
            error = StaleError(
                f"this is run {member.run!r}, epoch {member.epoch}, node {member.rank} of {member.nodes}; got {hello}"
            )
            connection.write(refusal(hello, member.rank, error))
            await connection.close()
            return
        self._add(hello.sender, connection)
        self._arrived.set()

    def _add(self, rank: int, connection: Connection) -> None:
        self._connections[rank] = connection
        self._readers.append(asyncio.ensure_future(self._read(rank, connection)))

    async def _read(self, rank: int, connection: Connection) -> None:
        assert self._member is not None
        assert self._deliver is not None
        assert self._lost is not None
        try:
            while True:
                message = await connection.read()
                if message.sender != rank:
                    raise ProtocolError(f"node {rank} sent a {message.kind!r} in the name of node {message.sender}")
                try:
                    self._deliver(message)
                except StaleError as error:
                    logger.warning("%s", error)
                    if message.kind != ABORT:
                        connection.write(refusal(message, self._member.rank, error))
        except DaskpsError as error:
            self._lost(error)
        except (StreamClosedError, OSError) as error:
            self._report(rank, error)
        except Exception as error:  # whatever a wrong message raises: a reader that died would tell nobody
            self._lost(ProtocolError(f"node {rank} sent what is no message of daskps: {error!r}"))

    def _report(self, rank: int, error: Exception) -> None:
        if not self._closing and self._lost is not None:
            self._lost(PeerError(f"node {rank} is gone: its connection was lost ({error!r})"))
