"""The segments of a store: filled in memory, written behind, pinned while read, deleted when not needed.

Input: rows to append, places to read. Output: rows. Neighbouring blocks of a segment are read in one call.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import pairwise
from threading import RLock
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from daskps.device.memory import BufferPool
from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.errors import CapacityError, CorruptionError, StoreError
from daskps.ssd.format import SegmentShape, block_sums, chunk_names, crc32c
from daskps.ssd.index import Bytes
from daskps.ssd.manifest import SegmentEntry
from daskps.ssd.options import Statistics
from daskps.storage.files import ALIGNMENT, Files
from daskps.types import Floats, Int64s, Keys

# Free write buffers that a store keeps for its next segments; a new one costs page faults (3 ms for 12 MB).
SPARE_BUFFERS = 2
# Segments that are read ahead of the one being processed.
AHEAD_SEGMENTS = 4
# Largest single read in bytes; storage/FORMAT.md ("Reading rows") has the measurement.
RANGE_BYTES = 1 << 20
# Limits of the work that one I/O thread takes at a time.
TASK_BYTES = 4 << 20
TASK_RANGES = 512
# Ranges that the kernel is told to prefetch before they are read.
AHEAD = 32

S = TypeVar("S")
T = TypeVar("T")
Requests: TypeAlias = npt.NDArray[np.uint64]  # read.cpp says what a request is
_NAMES = ("keys", "rows", "checksums")
_scratch = threading.local()  # a read buffer for each I/O thread


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised array whose address is a multiple of ALIGNMENT."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def read_sums(files: Files, name: str, offset: int, data: npt.NDArray[Any], block_bytes: int) -> npt.NDArray[np.uint32]:
    """Fill `data` with the bytes of a file from `offset` on; return the checksum of each block.

    The last block may be shorter than `block_bytes`.
    """
    fd = files.descriptor(name)
    if fd is None:
        files.read_into(name, offset, [data])
        return block_sums(data, data.nbytes, block_bytes)
    sums, what = np.empty(-(-data.nbytes // block_bytes), np.uint32), np.zeros(2, np.int64)
    try:
        library().ssd_read_sums(
            fd=fd, offset=offset, n=data.nbytes, block_bytes=block_bytes, out=data, sums=sums, what=what
        )
    finally:
        os.close(fd)
    if what[0]:
        raise read_error(files, name, int(what[0]), int(what[1]))
    return sums


def first_difference(sums: npt.NDArray[np.uint32], expected: npt.NDArray[np.uint32]) -> int | None:
    """Return the number of the first block whose checksum is not the expected one, None if all are."""
    wrong = np.flatnonzero(sums != expected[: len(sums)])
    return int(wrong[0]) if len(wrong) else None


def read_error(files: Files, name: str, kind: int, value: int) -> StoreError:
    """Return the error to raise when a native read has failed (read.cpp).

    kind 1: `value` is errno; kind 2: `value` is the byte at which the file ends.
    """
    if kind == 1:
        return StoreError(f"{files.url}/{name}: cannot read: {os.strerror(value)}")
    array = name.split("/")[0]
    return CorruptionError(f"{files.url}/{name} (array {array}): the file ends at byte {value}, too early")


@dataclass(slots=True, eq=False)
class Segment:
    """A segment. `keys` and `rows` are its write buffers, until it is written; from then on `checksum` is set."""

    number: int
    count: int = 0  # rows
    keys: Keys | None = None  # (R,)
    rows: Floats | None = None  # (R, width)
    checksum: int | None = None  # CRC-32C of `sums`
    sums: npt.NDArray[np.uint32] | None = None  # checksums of all blocks, if they have been computed or read
    pins: int = 0  # readers
    writing: Future[None] | None = None
    syncing: Future[None] | None = field(default=None)

    @property
    def entry(self) -> SegmentEntry:
        """Return what a snapshot records about a written segment."""
        assert self.checksum is not None
        return SegmentEntry(self.number, self.count, self.checksum)


@dataclass(frozen=True, slots=True)
class _Task:
    """The ranges [first, last) of a segment, which one I/O thread reads."""

    segment: Segment
    ranges: Int64s  # (n, 4): offset, bytes, first request, last request
    first: int
    last: int


class SegmentFiles:
    """The segments of a partition: write-behind, pinned while read, deleted when not needed any more.

    It gives segments their numbers and buffers. `lock` guards what readers and writers share.
    """

    def __init__(
        self, files: Files, shape: SegmentShape, io: Executor, lock: RLock, counters: Statistics, pool: ComputePool
    ) -> None:
        self.current: dict[int, Segment] = {}
        self._files, self._shape, self._io, self._lock, self._counters = files, shape, io, lock, counters
        self._pool, self.trace = pool, pool.trace
        self._reserved: set[int] = set()  # numbers of segments that snapshots need
        self._to_delete: list[Segment] = []  # to be deleted when no reader is left
        self._still_read: dict[int, Segment] = {}  # not current, kept by a snapshot, with readers when dropped
        self._spare: list[tuple[Keys, Floats]] = []  # free write buffers
        self._buffers = 0  # write buffers, free ones included

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory of write buffers and block checksums."""
        return self.buffer_bytes + sum(
            segment.sums.nbytes for segment in self.current.values() if segment.sums is not None
        )

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of memory of write buffers."""
        return self._buffers * (self._shape.keys_bytes + self._shape.rows_bytes)

    def reserve(self, numbers: set[int]) -> None:
        """Set the numbers of the segments that snapshots need. They are not given to new segments."""
        self._reserved = numbers

    def stage(self) -> Segment:
        """Return a new, empty segment in memory, with the smallest free number."""
        with self._lock:
            taken = self._reserved | self.current.keys() | {segment.number for segment in self._to_delete}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            if number >= self._shape.most_files:
                raise CapacityError(
                    f"{self._files.url}: {number} segments of {self._shape.file_rows} rows are in use, all that "
                    "32-bit places can name; drop snapshots, or spread the table over more partitions"
                )
            keys, rows = self.buffers()
            segment = self.current[number] = Segment(number, keys=keys, rows=rows)
            return segment

    def buffers(self) -> tuple[Keys, Floats]:
        """Return a free pair of write buffers (keys, rows), or a new one."""
        if self._spare:
            return self._spare.pop()
        self._buffers += 1
        shape = self._shape
        keys = aligned_empty((shape.file_rows,), np.uint64)
        return keys, aligned_empty((shape.file_rows, shape.layout.width), np.float32)

    def adopt(self, entry: SegmentEntry) -> None:
        """Add a segment of a snapshot to the current ones."""
        self.current[entry.number] = Segment(entry.number, entry.rows, checksum=entry.crc32c)

    def write(self, segment: Segment) -> None:
        """Start to write a full (or the last) segment on an I/O thread; `segment.writing` is the future."""
        segment.writing = self._io.submit(self.trace.call, "write segment", "io", self._write, segment)

    def pin(self, segment: Segment) -> Floats | None:
        """Keep a segment for a reader; return its rows if they are still in memory. The caller holds the lock."""
        segment.pins += 1
        return segment.rows

    def unpin(self, segment: Segment) -> None:
        """Release a segment after reading."""
        with self._lock:
            segment.pins -= 1
            self._recycle(segment)

    def exchange(self, segment: Segment, keys: Keys, rows: Floats) -> None:
        """Replace the buffers of a staged segment. Old buffers that a reader still uses are not reused."""
        with self._lock:
            self._free_buffers(segment)
            segment.keys, segment.rows = keys, rows

    def drop(self, segment: Segment, *, kept: bool) -> None:
        """Remove a segment from the current ones. Unless a snapshot needs it (`kept`), `sweep` deletes it from disk."""
        with self._lock:
            del self.current[segment.number]
            if not kept:
                self._to_delete.append(segment)
            elif segment.pins:
                self._still_read[segment.number] = segment

    def discard(self, entries: list[SegmentEntry]) -> None:
        """Mark segments for deletion that are not current and that no snapshot needs any more."""
        with self._lock:
            for entry in entries:
                segment = self._still_read.pop(entry.number, None)
                self._to_delete.append(segment or Segment(entry.number, entry.rows, checksum=entry.crc32c))

    def sweep(self) -> None:
        """Delete the segments marked for deletion that have no reader, after waiting for unfinished writes."""
        with self._lock:
            unread = [segment for segment in self._to_delete if not segment.pins]
        for segment in unread:
            for future in (segment.writing, segment.syncing):
                if future is not None:
                    future.exception()
        with self._lock:
            ready = [segment for segment in unread if segment in self._to_delete and not segment.pins]
        for segment in ready:
            for name in chunk_names(segment.number):
                self._files.remove(name)
            with self._lock:
                self._to_delete.remove(segment)
                self._free_buffers(segment)

    @property
    def leaving_bytes(self) -> int:
        """Return the bytes on disk of segments that are marked for deletion but still there."""
        return sum(self._shape.data_bytes(segment.count) for segment in self._to_delete)

    def wait(self) -> None:
        """Wait until all writes have ended, with or without an error."""
        for segment in [*self.current.values(), *self._to_delete]:
            for future in (segment.writing, segment.syncing):
                if future is not None:
                    future.exception()

    def wait_synced(self, segment: Segment) -> None:
        """Wait until the bytes of a written segment are durable. Raises the error of a failed fsync."""
        if segment.syncing is not None:
            segment.syncing.result()
            segment.syncing = None

    def sums(self, segment: Segment) -> npt.NDArray[np.uint32]:
        """Return the block checksums of a written segment: those of the keys, then those of the rows."""
        if segment.sums is None:
            name = chunk_names(segment.number)[2]
            sums = np.empty(self._shape.blocks, np.uint32)
            self._files.read_into(name, 0, [sums])
            if crc32c(sums) != segment.checksum:
                raise CorruptionError(
                    f"{self._files.url}/{name} (array checksums): the checksums of segment {segment.number} do not "
                    "match the manifest; restore the file from a copy"
                )
            segment.sums = sums
        return segment.sums

    def keys(self, segment: Segment, memory: BufferPool | None = None) -> Keys:
        """Return all keys of a segment, after checking them."""
        with self._lock:  # a copy, because the buffer is reused after the segment is written
            if segment.keys is not None:
                return segment.keys[: segment.count].copy()
        return self._read(segment, 0, (self._shape.file_rows,), np.uint64, memory)

    def rows(self, segment: Segment, memory: BufferPool | None = None) -> Floats:
        """Return all rows of a segment, after checking them."""
        with self._lock:
            if segment.rows is not None:
                return segment.rows[: segment.count].copy()
        return self._read(segment, 1, (self._shape.file_rows, self._shape.layout.width), np.float32, memory)

    def scan(self, contents: Iterable[tuple[Segment, Bytes]]) -> Iterator[tuple[Keys, Floats]]:
        """Yield the live keys and rows of segments, which are given with their live bits; read some segments ahead."""

        def read(item: tuple[Segment, Bytes]) -> tuple[Keys, Floats]:
            segment, bits = item
            live = int(np.bitwise_count(bits).sum())
            if not live:
                return np.empty(0, np.uint64), np.empty((0, self._shape.layout.width), np.float32)
            # With new pages for every segment, reading a store from the page cache took twice as long.
            keys, rows = self.keys(segment, self._pool.buffers), self.rows(segment, self._pool.buffers)
            if live == segment.count:
                return keys, rows
            positions = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            return keys[positions], rows[positions]

        for _, found in read_ahead(self._io, read, contents):
            if len(found[0]):
                yield found

    def read_rows(self, requests: Requests, wanted: list[tuple[Segment, Floats | None, int, int]], out: Floats) -> int:
        """Copy the requested rows to `out` and return the bytes read from disk.

        An item of `wanted` is (segment, its rows if they are in memory, first request, end of requests).
        """
        tasks: list[_Task] = []
        for segment, buffer, first, last in wanted:
            read = self._segment_read(requests, segment, None, out)
            if buffer is not None:
                library().ssd_copy_rows(read=read, first=first, last=last, rows=buffer)
            else:
                tasks += self._plan(read, segment, first, last)
        futures = [
            self._io.submit(self.trace.call, "read segment", "io", self._run, requests, task, out) for task in tasks
        ]
        for future in futures:
            future.exception()  # wait for all, also after an error: none may write to `out` afterwards
        return sum(future.result() for future in futures)

    def _segment_read(
        self, requests: Requests, segment: Segment, sums: npt.NDArray[np.uint32] | None, out: Floats
    ) -> npt.NDArray[np.uint64]:
        """Return the struct SegmentRead of read.cpp. It has addresses: the caller keeps the arrays."""
        shape, sums_address = self._shape, 0 if sums is None else sums.ctypes.data
        base = segment.number * shape.file_rows
        words = requests.ctypes.data, base, shape.row_bytes, shape.block_bytes, sums_address, out.ctypes.data
        return np.array(words, np.uint64)

    def _plan(self, read: npt.NDArray[np.uint64], segment: Segment, first: int, last: int) -> list[_Task]:
        """Return tasks that read the rows of requests [first, last), all of one segment."""
        shape = self._shape
        # Each range begins with a block that no other range has, or where a range of RANGE_BYTES was cut.
        most = shape.row_blocks + shape.rows_bytes // RANGE_BYTES + 1
        ranges = np.empty((min(last - first, most), 4), np.int64)
        count = library().ssd_plan(
            read=read,
            first=first,
            last=last,
            gap_bytes=self._files.gap_bytes,
            most_bytes=RANGE_BYTES,
            file_bytes=shape.rows_bytes,
            ranges=ranges,
        )
        ranges = ranges[:count]
        weight = np.cumsum(ranges[:, 1] * (TASK_RANGES / TASK_BYTES) + 1) // TASK_RANGES
        cuts = [0, *(np.flatnonzero(np.diff(weight)) + 1).tolist(), count]
        return [_Task(segment, ranges, a, b) for a, b in pairwise(cuts)]

    def _run(self, requests: Requests, task: _Task, out: Floats) -> int:
        """Read the ranges of a task, check them and copy their rows to `out`; return the bytes read."""
        sums = self.sums(task.segment)[self._shape.key_blocks :]
        name = chunk_names(task.segment.number)[1]
        read, ranges = self._segment_read(requests, task.segment, sums, out), task.ranges
        size = int(ranges[task.first : task.last, 1].max())
        buffer = getattr(_scratch, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = _scratch.buffer = np.empty(min(2 * size, max(size, 2 * RANGE_BYTES)), np.uint8)
        fd = self._files.descriptor(name)
        if fd is None:
            for number in range(task.first, task.last):
                part = buffer[: ranges[number, 1]]
                self._files.read_into(name, int(ranges[number, 0]), [part])
                block = library().ssd_take_range(read=read, range=ranges[number], bytes=part)
                if block >= 0:
                    raise self.wrong(task.segment, 1, block)
        else:
            what = np.zeros(2, np.int64)
            try:
                failed = library().ssd_read_ranges(
                    read=read,
                    fd=fd,
                    ranges=ranges,
                    first=task.first,
                    last=task.last,
                    ahead=AHEAD,
                    buffer=buffer,
                    what=what,
                )
            finally:
                os.close(fd)
            if failed >= 0:
                kind, value = what.tolist()
                raise self.wrong(task.segment, 1, value) if kind == 3 else read_error(self._files, name, kind, value)
        return int(ranges[task.first : task.last, 1].sum())

    def wrong(self, segment: Segment, array: int, block: int) -> CorruptionError:
        """Return the error for a block that does not match its checksum."""
        name, size = chunk_names(segment.number)[array], self._shape.block_bytes
        return CorruptionError(
            f"{self._files.url}/{name} (array {_NAMES[array]}): bytes {block * size} to {(block + 1) * size} do not "
            "match their checksum; restore the file from a copy, or open an older snapshot"
        )

    def _read(
        self, segment: Segment, array: int, shape: tuple[int, ...], dtype: npt.DTypeLike, memory: BufferPool | None
    ) -> npt.NDArray[Any]:
        """Return the used part of a segment's chunk of keys (`array` 0) or rows (1), after checking it."""
        sums = self.sums(segment)
        sums = sums[: self._shape.key_blocks] if array == 0 else sums[self._shape.key_blocks :]
        data = np.empty(shape, dtype) if memory is None else memory.empty(shape, dtype)
        # Blocks behind the last row are zeros, on disk too. Only `verify` reads and checks them.
        size = -(-segment.count * data[:1].nbytes // self._shape.block_bytes) * self._shape.block_bytes
        part = data.reshape(-1).view(np.uint8)[:size]
        found = read_sums(self._files, chunk_names(segment.number)[array], 0, part, self._shape.block_bytes)
        with self._lock:
            self._counters.read_bytes += part.nbytes
        block = first_difference(found, sums)
        if block is not None:
            raise self.wrong(segment, array, block)
        return data[: segment.count]

    def check(self, segment: Segment) -> int:
        """Check every byte of a written segment, including the zeros of a short one; return the bytes checked."""
        shape, total = self._shape, 0
        sums = self.sums(segment)
        parts = (sums[: shape.key_blocks], sums[shape.key_blocks :], None)
        sizes = (shape.keys_bytes, shape.rows_bytes, 4 * shape.blocks)
        for array, (name, expected, size) in enumerate(zip(chunk_names(segment.number), parts, sizes, strict=True)):
            actual = self._files.size(name)
            if actual != size:
                what = "is missing" if actual < 0 else f"has {actual} bytes instead of {size}"
                raise CorruptionError(f"{self._files.url}/{name} (array {_NAMES[array]}): the file {what}")
            total += size
            if expected is not None:
                found = read_sums(self._files, name, 0, np.empty(size, np.uint8), shape.block_bytes)
                block = first_difference(found, expected)
                if block is not None:
                    raise self.wrong(segment, array, block)
        return total

    def _write(self, segment: Segment) -> None:
        shape = self._shape
        assert segment.keys is not None
        assert segment.rows is not None
        keys, rows = segment.keys[: segment.count], segment.rows[: segment.count]
        sums = np.concatenate(
            [
                block_sums(keys, shape.keys_bytes, shape.block_bytes),
                block_sums(rows, shape.rows_bytes, shape.block_bytes),
            ]
        )
        names = chunk_names(segment.number)
        try:
            sent = self._files.write(names[0], [keys], shape.keys_bytes)
            sent += self._files.write(names[1], [rows], shape.rows_bytes)
            sent += self._files.write(names[2], [sums], sums.nbytes)
        except OSError:
            for name in names:
                with contextlib.suppress(OSError):
                    self._files.remove(name)
            raise
        with self._lock:
            self._counters.written_bytes += sent
            segment.sums, segment.checksum = sums, crc32c(sums)
            self._recycle(segment)
        segment.syncing = self._io.submit(self.trace.call, "fsync", "io", self._files.sync_data, names)

    def _recycle(self, segment: Segment) -> None:
        if segment.checksum is not None and not segment.pins:
            self._free_buffers(segment)

    def _free_buffers(self, segment: Segment) -> None:
        if segment.keys is None or segment.rows is None:
            return
        if len(self._spare) < SPARE_BUFFERS and not segment.pins:
            self._spare.append((segment.keys, segment.rows))
        else:
            self._buffers -= 1
        segment.keys = segment.rows = None


def read_ahead(io: Executor, call: Callable[[S], T], items: Iterable[S]) -> Iterator[tuple[S, T]]:
    """Yield each item with the result of `call`, in order; some calls run ahead on the I/O threads."""
    waiting: deque[tuple[S, Future[T]]] = deque()
    for item in items:
        waiting.append((item, io.submit(call, item)))
        if len(waiting) > AHEAD_SEGMENTS:
            first, future = waiting.popleft()
            yield first, future.result()
    while waiting:
        first, future = waiting.popleft()
        yield first, future.result()


def sort_requests(requests: Requests, places: int) -> None:
    """Sort requests in place by their place. All places are below `places`."""
    scratch = np.empty_like(requests)
    library().ssd_sort_requests(requests=requests, scratch=scratch, n=len(requests), bits=places.bit_length())


def by_segment(requests: Requests, file_rows: int) -> list[tuple[int, int, int]]:
    """Return (segment number, first request, end of requests) for each segment in the sorted requests."""
    numbers = (requests >> np.uint64(32)).astype(np.int64) // file_rows
    cuts = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(numbers)]
    return [(int(numbers[first]), first, last) for first, last in pairwise(cuts)]
