"""Messages as bytes: a length, a small msgpack header, then the arrays' own bytes. Nothing is ever unpickled.

In: a `Message` or a stream. Out: buffers to write, without copies of large arrays; a message whose arrays were read
straight into memory that is used again: fresh pages cost as much as reading.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import numpy as np

from daskps.backend.device import MEMORY
from daskps.cluster.message import Message
from daskps.errors import ProtocolError

_LENGTH = struct.Struct("<IQ")  # bytes of the header, bytes of all arrays
PREFIX_BYTES = _LENGTH.size
JOINED_BYTES = 64 << 10  # arrays up to here are copied into one buffer: one system call instead of several
HEADER_LIMIT = 1 << 20
KINDS = frozenset("iuf")  # of dtypes: numbers only


def encode(message: Message) -> list[bytes | memoryview]:
    """The message as buffers to be written one after the other."""
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    fields = (message.kind, message.run, message.epoch, message.sender, message.batch, message.step)
    header = msgpack.packb((*fields, message.table, message.note, shapes))
    parts: list[bytes | memoryview] = [_LENGTH.pack(len(header), message.nbytes), header]
    parts += [array.reshape(-1).view(np.uint8).data for array in arrays if array.nbytes]
    if message.nbytes <= JOINED_BYTES:
        return [b"".join(parts)]
    return [b"".join(parts[:2]), *parts[2:]]


async def decode(read: Callable[[int], Awaitable[bytes]], read_into: Callable[[memoryview], Awaitable[Any]]) -> Message:
    """The next message. `read(n)` gives n bytes; `read_into(buffer)` fills a buffer."""
    header_bytes, array_bytes = _LENGTH.unpack(await read(PREFIX_BYTES))
    if header_bytes > HEADER_LIMIT:
        raise ProtocolError(f"a message begins with a header of {header_bytes:,} bytes; the peer is no node of daskps")
    header = await read(header_bytes)
    try:
        kind, run, epoch, sender, batch, step, table, note, described = msgpack.unpackb(header)
        shapes = [(tuple(shape), _number(dtype)) for dtype, shape in described]
        wanted_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)
        negative = any(side < 0 for shape, _ in shapes for side in shape)
    except (ValueError, TypeError) as error:
        raise ProtocolError(
            f"a message has a header that makes no sense: {error!r}; all nodes must run one version"
        ) from None
    if negative or wanted_bytes != array_bytes:  # before anything is allocated
        raise ProtocolError(f"a {kind!r} message says {array_bytes:,} bytes, but its arrays have others: {described}")
    arrays = [MEMORY.empty(shape, dtype) for shape, dtype in shapes]
    if array_bytes <= JOINED_BYTES:
        data, start = memoryview(await read(array_bytes) if array_bytes else b""), 0
        for array in arrays:
            array.reshape(-1).view(np.uint8).data[:] = data[start : start + array.nbytes]
            start += array.nbytes
    else:
        for array in arrays:
            if array.nbytes:
                await read_into(array.reshape(-1).view(np.uint8).data)
    return Message(kind, run, epoch, sender, batch, step, table, note, tuple(arrays))


def _number(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in KINDS:
        raise ProtocolError(f"a message has an array of dtype {name!r}; nodes exchange numbers only")
    return dtype
