"""Messages between nodes (a kind, a small header and NumPy arrays), and their encoding as bytes.

An encoded message is a length, a msgpack header, then the bytes of the arrays. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import msgpack
import numpy as np
import numpy.typing as npt

from daskps.errors import ProtocolError

Array = npt.NDArray[Any]


class MessageKind(StrEnum):
    """Kinds of messages. PROTOCOL.md says who sends each one, when, and what it carries."""

    HELLO = "hello"
    ABORT = "abort"
    PULL = "pull"
    ANSWER = "answer"
    DEFERRED = "deferred"
    PUSH = "push"
    TAKEN = "taken"
    LOOKUP = "lookup"
    FOUND = "found"
    POSITIONS = "positions"
    WEIGHTS = "weights"
    SUMS = "sums"
    TOUCHED = "touched"
    REPLICAS = "replicas"
    DENSE = "dense"
    METRICS = "metrics"
    VALIDATION = "validation"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. (kind, batch, step, table, sender) is unique within an incarnation."""

    kind: MessageKind
    run: str
    incarnation: int  # of the run; a message of another one is stale
    sender: int  # rank
    batch: int
    step: int = 0  # within the batch; also numbers several messages of one kind
    table: str = ""
    note: str = ""  # a snapshot's id, the layout of an answer's rows, or the reason of an abort
    arrays: tuple[Array, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(array.nbytes for array in self.arrays)

    def __str__(self) -> str:
        table = f", table {self.table!r}" if self.table else ""
        return f"message {self.kind} of batch {self.batch}, step {self.step}{table}, from node {self.sender}"


def refusal(message: Message, rank: int, error: Exception) -> Message:
    """Return the abort that answers a message which does not belong here.

    It carries the sender's own run and incarnation; otherwise the sender would reject it as stale.
    """
    note = f"{type(error).__name__}: {error}"
    return Message(MessageKind.ABORT, message.run, message.incarnation, rank, message.batch, note=note)


class MessageSender(Protocol):
    """Sender of messages to the other nodes of a run; `transport.Transport`, or the simulated network of the tests.

    Messages may arrive in any order, but never twice. A lost peer is reported, not hidden.
    """

    def send(self, rank: int, message: Message) -> None:
        """Send a message without waiting. The sender must not change the arrays afterwards."""
        ...


_LENGTH = struct.Struct("<IQ")  # bytes of the header, bytes of all arrays
PREFIX_BYTES = _LENGTH.size
JOINED_BYTES = 64 << 10  # arrays of up to 64 KiB in all are copied into one buffer: one system call instead of several
HEADER_LIMIT = 1 << 20  # bytes
NUMBERS = frozenset("iuf")  # kinds of dtypes that are allowed: int, uint, float


def encode(message: Message) -> list[bytes | memoryview]:
    """Return the message as buffers to be written one after the other."""
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    fields = (message.kind, message.run, message.incarnation, message.sender, message.batch, message.step)
    header = msgpack.packb((*fields, message.table, message.note, shapes))
    parts: list[bytes | memoryview] = [_LENGTH.pack(len(header), message.nbytes), header]
    parts += [array.reshape(-1).view(np.uint8).data for array in arrays if array.nbytes]
    if message.nbytes <= JOINED_BYTES:
        return [b"".join(parts)]
    return [b"".join(parts[:2]), *parts[2:]]


async def decode(
    read: Callable[[int], Awaitable[bytes]],
    read_into: Callable[[memoryview], Awaitable[Any]],
    limit_bytes: int | None = None,
    empty: Callable[..., Array] = np.empty,
) -> Message:
    """Return the next message. `read(n)` gives n bytes; `read_into(buffer)` fills a buffer; `empty` makes its arrays.

    With `limit_bytes`, raise ProtocolError if the header is longer or if there are arrays, before either is read.
    """
    header_bytes, array_bytes = _LENGTH.unpack(await read(PREFIX_BYTES))
    if limit_bytes is not None and (array_bytes or header_bytes > limit_bytes):
        raise ProtocolError(
            f"the first message has {header_bytes:,} bytes and {array_bytes:,} bytes of arrays; from an unknown peer "
            f"at most {limit_bytes:,} bytes without arrays are read"
        )
    if header_bytes > HEADER_LIMIT:
        raise ProtocolError(f"a message has a header of {header_bytes:,} bytes; the peer is no node of daskps")
    header = await read(header_bytes)
    try:
        name, run, incarnation, sender, batch, step, table, note, described = msgpack.unpackb(header)
        kind = MessageKind(name)
        shapes = [(tuple(shape), _number(dtype)) for dtype, shape in described]
        wanted_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        negative = any(side < 0 for shape, _ in shapes for side in shape)
    except (ValueError, TypeError) as error:
        raise ProtocolError(
            f"a message has an invalid header: {error!r}; all nodes must run one version of daskps"
        ) from None
    if negative or wanted_bytes != array_bytes:  # before anything is allocated
        raise ProtocolError(
            f"a message {kind} announces arrays of {array_bytes:,} bytes in all, but describes others: {described}"
        )
    arrays = [empty(shape, dtype) for shape, dtype in shapes]
    if array_bytes <= JOINED_BYTES:
        data, start = memoryview(await read(array_bytes) if array_bytes else b""), 0
        for array in arrays:
            array.reshape(-1).view(np.uint8).data[:] = data[start : start + array.nbytes]
            start += array.nbytes
    else:
        for array in arrays:
            if array.nbytes:
                await read_into(array.reshape(-1).view(np.uint8).data)
    return Message(kind, run, incarnation, sender, batch, step, table, note, tuple(arrays))


def _number(name: str) -> np.dtype[Any]:
    """Return the dtype; raise ProtocolError unless it is an integer or a float."""
    dtype = np.dtype(name)
    if dtype.kind not in NUMBERS:
        raise ProtocolError(f"a message has an array of dtype {name!r}; nodes exchange numbers only")
    return dtype
