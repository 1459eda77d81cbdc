"""Real connections: what is sent arrives as it was, nothing is unpickled, and a peer that is gone is noticed."""

import asyncio
import contextlib
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
from distributed.comm.core import connect
from distributed.security import Security
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tornado.iostream import StreamClosedError

from daskps.errors import PeerError, ProtocolError
from daskps.wire.collective import sum_dense
from daskps.wire.message import Message, MessageKind, decode, encode
from daskps.wire.session import Member, Session
from daskps.wire.transport import HELLO_BYTES, MAX_WAITING, Connection, LoopThread, Transport, _Pieces

dtypes = st.sampled_from([np.uint8, np.uint32, np.int32, np.int64, np.uint64, np.float32, np.float64])
arrays = npst.arrays(dtypes, npst.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=40))


async def decoded(parts: list[Any]) -> Message:
    pieces = _Pieces(parts)
    return await decode(pieces.read_bytes, pieces.read_into)


@given(sent=st.lists(arrays, max_size=4), note=st.text(max_size=5), large=st.booleans())
def test_a_message_is_the_same_after_its_journey(sent: list[np.ndarray], note: str, large: bool) -> None:
    if large:
        sent.append(np.arange(20_000, dtype=np.int64))
    message = Message(MessageKind.SUMS, "run", 3, 1, 2**40, -1, "tabelle ü", note, tuple(sent))
    found = asyncio.run(decoded(encode(message)))
    fields = [name for name in Message.__dataclass_fields__ if name != "arrays"]
    assert [getattr(found, name) for name in fields] == [getattr(message, name) for name in fields]
    assert len(found.arrays) == len(sent)
    for received, original in zip(found.arrays, sent, strict=True):
        assert (received.dtype, received.shape) == (original.dtype, original.shape)
        assert received.tobytes() == original.tobytes()
        assert received.flags.writeable


def test_arrays_that_are_not_contiguous_arrive_as_they_look() -> None:
    array = np.arange(24).reshape(4, 6)[::2, 1::2]
    found = asyncio.run(decoded(encode(Message(MessageKind.SUMS, "run", 1, 0, 0, arrays=(array,)))))
    np.testing.assert_array_equal(found.arrays[0], array)


@pytest.mark.parametrize(
    "header",
    [
        ("sums", "run", 1, 0, 0, 0, "", ""),
        ("sums", "run", 1, 0, 0, 0, "", "", [("zz", [1])]),
        ("sums", "run", 1, 0, 0, 0, "", "", [("<i8", [-1, -1])]),
        ("sums", "run", 1, 0, 0, 0, "", "", [("<i8", [1 << 50])]),
        ("sums", "run", 1, 0, 0, 0, "", "", 7),
        ("no such kind", "run", 1, 0, 0, 0, "", "", [("<i8", [1])]),
        7,
    ],
)
def test_an_invalid_header_is_refused_before_anything_is_allocated(header: Any) -> None:
    packed = msgpack.packb(header)
    with pytest.raises(ProtocolError):
        asyncio.run(decoded([struct.pack("<IQ", len(packed), 8) + packed + bytes(8)]))


def test_arrays_of_objects_are_refused_before_anything_is_unpickled() -> None:
    payload = pickle.dumps(print)
    header = msgpack.packb(("sums", "run", 1, 0, 0, 0, "", "", [("|O", [1])]))
    with pytest.raises(ProtocolError, match="numbers only"):
        asyncio.run(decoded([struct.pack("<IQ", len(header), 8) + header + payload]))


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(ProtocolError, match="no node of daskps"):
        asyncio.run(decoded([b"GET / HTTP/1.1\r\n\r\n"]))
    header = msgpack.packb(("sums", "run", 1, 0, 0, 0, "", "", [("<i8", [3])]))
    with pytest.raises(ProtocolError, match="but describes others"):
        asyncio.run(decoded([struct.pack("<IQ", len(header), 8) + header + bytes(8)]))


class Nodes:
    """Real transports, each on its own loop, in this process."""

    def __init__(self, count: int, on: str = "tcp://127.0.0.1", security: Security | None = None) -> None:
        security = security or Security()
        self.loops = [LoopThread() for _ in range(count)]
        self.transports = [loop.run(self._make()) for loop in self.loops]
        listen_args = security.get_listen_args("worker")
        starts = zip(self.loops, self.transports, strict=True)
        self.addresses = [loop.run(transport.start(on, listen_args)) for loop, transport in starts]
        members = [Member("run", 1, rank, count, wait_seconds=20.0) for rank in range(count)]
        self.sessions = [Session(*pair) for pair in zip(members, self.transports, strict=True)]
        arguments = security.get_connection_args("worker")
        self.on_all(lambda s: self.transports[s.rank].join(s.member, self.addresses, s.deliver, s.fail, arguments))

    @staticmethod
    async def _make() -> Transport:
        return Transport()

    def on_all(self, call: Callable[[Session], Any]) -> list[Any]:
        async def on_this(session: Session) -> Any:
            return await call(session)

        waiting = [
            asyncio.run_coroutine_threadsafe(on_this(session), loop._loop)
            for loop, session in zip(self.loops, self.sessions, strict=True)
        ]
        return [future.exception() or future.result() for future in waiting]

    def close(self) -> None:
        for loop, transport in zip(self.loops, self.transports, strict=True):
            loop.run(transport.close())
            loop.close()


@pytest.fixture
def nodes() -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(*args: Any) -> Nodes:
        made.append(Nodes(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_nodes_sum_over_real_connections(nodes: Callable[..., Nodes], count: int) -> None:
    joined = nodes(count)

    async def steps(session: Session) -> int:
        for step in range(20):
            mine = np.full(1 + step * 3000, session.rank + step, np.int64)
            total = await sum_dense(session, 0, step, mine)
            assert (total == sum(rank + step for rank in range(count))).all()
        return session.bytes_sent

    sent = joined.on_all(steps)
    assert all(isinstance(count, int) for count in sent), sent


def test_a_protocol_without_a_stream_carries_the_same_messages(nodes: Callable[..., Nodes]) -> None:
    """As ucx has none; that of workers in one process stands in for it."""
    joined = nodes(3, "inproc://")
    large = np.arange(100_000, dtype=np.int64)
    results = joined.on_all(lambda session: sum_dense(session, 0, 0, large + session.rank))
    for result in results:
        np.testing.assert_array_equal(result, 3 * large + 3)


@pytest.mark.parametrize("header", [(["sums"], "run", 1, 1, 0, 0, "", "", []), ("sums", "run", 1, 1, 0, 0, [], "", [])])
def test_a_message_that_nothing_can_be_made_of_ends_the_run(nodes: Callable[..., Nodes], header: Any) -> None:
    joined, packed = nodes(2), msgpack.packb(header)

    async def garble_or_wait(session: Session) -> None:
        if session.rank == 1:
            joined.transports[1]._connections[0].comm.stream.write(struct.pack("<IQ", len(packed), 0) + packed)
        await session.receive(MessageKind.DENSE, 0, 1 - session.rank)

    results = joined.on_all(garble_or_wait)
    assert isinstance(results[0], ProtocolError)
    assert "node 1 sent what is no message of daskps" in str(results[0])
    assert isinstance(results[1], PeerError)


def test_nodes_talk_over_tls_and_refuse_a_peer_without_a_certificate(nodes: Callable[..., Nodes]) -> None:
    joined = nodes(2, "tls://127.0.0.1", Security.temporary())
    assert all(address.startswith("tls://") for address in joined.addresses)
    results = joined.on_all(lambda session: sum_dense(session, 0, 0, np.full(100_000, 1, np.int64)))
    assert all((result == 2).all() for result in results)

    async def intrude() -> None:
        transport = Transport()
        member = Member("run", 1, 1, 2, wait_seconds=3.0)
        await transport.join(member, joined.addresses, print, print, Security.temporary().get_connection_args("worker"))

    with pytest.raises(PeerError, match="no connection with"):
        asyncio.run(intrude())


def test_a_peer_that_is_gone_stops_those_who_wait_for_it(nodes: Callable[..., Nodes]) -> None:
    joined = nodes(3)

    async def wait_or_leave(session: Session) -> None:
        if session.rank == 1:
            for connection in joined.transports[1]._connections.values():
                connection.comm.abort()
            return
        await session.receive(MessageKind.SUMS, 0, 1)

    results = joined.on_all(wait_or_leave)
    assert isinstance(results[0], PeerError)
    assert isinstance(results[2], PeerError)
    assert "node 1" in str(results[0])


def test_a_peer_that_reads_nothing_does_not_keep_a_node_from_closing(nodes: Callable[..., Nodes]) -> None:
    joined = nodes(2)
    stuck = threading.Event()
    joined.loops[1].call(stuck.wait)

    async def write_much_and_close() -> None:
        joined.sessions[0].send(1, MessageKind.REPLICAS, 0, arrays=(np.zeros(8_000_000),))
        await joined.transports[0].close()

    joined.loops[0].run(write_much_and_close())
    closed = [connection.comm.closed() for connection in joined.transports[0]._connections.values()]
    stuck.set()
    assert closed == [True]


def test_a_message_in_the_name_of_another_node_ends_the_run(nodes: Callable[..., Nodes]) -> None:
    joined = nodes(2)

    async def lie_or_wait(session: Session) -> None:
        if session.rank == 0:
            joined.transports[0].send(1, Message(MessageKind.SUMS, "run", 1, 1, 0))
        await session.receive(MessageKind.SUMS, 0, 1 - session.rank)

    results = joined.on_all(lie_or_wait)
    assert "in the name of another node: message sums of batch 0, step 0, from node 1" in str(results[1])


def test_a_node_of_another_incarnation_is_refused(nodes: Callable[..., Nodes]) -> None:
    joined = nodes(2)
    told: list[Message] = []

    async def join_late() -> None:
        transport = Transport()
        member = Member("run", 0, 1, 2, wait_seconds=5.0)
        gone = asyncio.get_running_loop().create_future()
        await transport.join(member, joined.addresses, told.append, gone.set_result)
        await gone
        await transport.close()

    asyncio.run(join_late())
    assert [message.kind for message in told] == [MessageKind.ABORT]
    assert "StaleError: no node of run 'run', incarnation 0, rank 1 is wanted here" in told[0].note


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_a_second_node_of_one_rank_or_one_of_no_rank_is_refused(nodes: Callable[..., Nodes], rank: int) -> None:
    joined = nodes(2)

    async def intrude() -> Message:
        connection = Connection(await connect(joined.addresses[0], deserialize=False))
        connection.write(Message(MessageKind.HELLO, "run", 1, rank, -1))
        async with asyncio.timeout(20.0):  # one that was let in would wait for ever
            answer = await connection.read()
        await connection.close()
        return answer

    answer = asyncio.run(intrude())
    assert answer.kind is MessageKind.ABORT
    assert f"StaleError: no node of run 'run', incarnation 1, rank {rank} is wanted here" in answer.note
    results = joined.on_all(lambda session: sum_dense(session, 0, 0, np.ones(3, np.int64)))
    assert all((result == 2).all() for result in results)


def works(joined: Nodes, batch: int) -> bool:
    """Return True if the nodes still sum over their connections."""
    results = joined.on_all(lambda session: sum_dense(session, batch, 0, np.ones(3, np.int64)))
    return all((result == 2).all() for result in results)


async def closed(connection: Connection) -> bool:
    """Return True when the peer has closed the connection; one that it keeps open makes the test hang."""
    try:
        await connection.read()
    except (StreamClosedError, OSError):
        return True
    return False


def test_a_stranger_is_told_nothing_of_the_run(nodes: Callable[..., Nodes]) -> None:
    joined = nodes(2)

    async def ask() -> Message:
        connection = Connection(await connect(joined.addresses[0], deserialize=False))
        connection.write(Message(MessageKind.HELLO, "a guess", 7, 1, -1))
        answer = await connection.read()
        await connection.close()
        return answer

    answer = asyncio.run(ask())
    assert "'run'" not in answer.note
    assert "incarnation 1" not in answer.note


def test_a_large_hello_is_not_even_read(nodes: Callable[..., Nodes]) -> None:
    joined, process = nodes(2), psutil.Process()
    shape = (150_000_000,)
    header = msgpack.packb((MessageKind.HELLO, "no run", 1, 1, -1, 0, "", "", [("|u1", shape)]))

    async def send() -> bool:
        connection = Connection(await connect(joined.addresses[0], deserialize=False))
        stream = connection.comm.stream
        await stream.write(struct.pack("<IQ", len(header), shape[0]) + header)
        with contextlib.suppress(StreamClosedError):
            for _ in range(shape[0] // len(piece)):
                await stream.write(piece)  # until the other side hangs up
        return await closed(connection)

    piece = bytes(1 << 20)
    before = process.memory_info().rss
    assert asyncio.run(send())
    assert process.memory_info().rss - before < 50_000_000
    assert works(joined, 0)


def test_a_long_header_is_no_hello(nodes: Callable[..., Nodes]) -> None:
    joined = nodes(2)

    async def send() -> bool:
        connection = Connection(await connect(joined.addresses[0], deserialize=False))
        connection.write(Message(MessageKind.HELLO, "run", 1, 1, -1, note="x" * HELLO_BYTES))
        return await closed(connection)

    assert asyncio.run(send())
    assert works(joined, 0)


def test_idle_connections_do_not_take_all_descriptors(nodes: Callable[..., Nodes]) -> None:
    """More strangers connect and say nothing than may wait: the others are closed, and the run goes on."""
    joined = nodes(2)

    async def crowd() -> int:
        kept = [Connection(await connect(joined.addresses[0], deserialize=False)) for _ in range(MAX_WAITING)]
        more = [Connection(await connect(joined.addresses[0], deserialize=False)) for _ in range(200)]
        results = await asyncio.gather(*(closed(connection) for connection in more))
        assert joined.transports[0]._waiting == MAX_WAITING
        for connection in (*kept, *more):
            connection.comm.abort()
        return sum(results)

    assert asyncio.run(crowd()) == 200
    assert works(joined, 0)


def test_a_hello_that_does_not_come_in_time_frees_its_place() -> None:
    async def alone() -> None:
        transport = Transport(hello_seconds=0.05)
        address = await transport.start("tcp://127.0.0.1")
        connection = Connection(await connect(address, deserialize=False))
        assert await closed(connection)
        while transport._waiting:
            await asyncio.sleep(0.01)
        await transport.close()

    asyncio.run(alone())


def test_a_node_that_never_comes_is_named() -> None:
    async def alone() -> None:
        transport = Transport()
        address = await transport.start("tcp://127.0.0.1")
        try:
            await transport.join(Member("run", 1, 0, 2, 0.2), [address, "tcp://127.0.0.1:9"], print, print)
        finally:
            await transport.close()

    with pytest.raises(PeerError, match=r"node 0, stage open: no connection with \{1: 'tcp://127\.0\.0\.1:9'\}"):
        asyncio.run(alone())
