"""The parameter files of a store: staged in memory, being written behind the caller's back, on disk, or on the way out.

In: filled files. Out: their keys and rows, checked. Writing runs on the store's own I/O threads, which may wait; the
compute pool may not. A file can be read in every state, and it outlives its readers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from daskps.backend.recycle import Recycler
from daskps.errors import CapacityError, CorruptionError
from daskps.ssd.checked import first_difference, read_sums
from daskps.ssd.checksum import block_sums, crc32c
from daskps.ssd.files import Files, aligned_empty
from daskps.ssd.format import Shape, chunk_names
from daskps.ssd.index import Bytes
from daskps.ssd.manifest import FileEntry
from daskps.ssd.statistics import Counters
from daskps.types import Floats, Keys

# Buffers kept for the next files; a fresh one costs its page faults (3 ms for 12 MB).
SPARE_BUFFERS = 2
# Files read ahead of the one in work.
AHEAD_FILES = 4
# What scans of all stores read into: with fresh pages for every scan, reading a cached store took twice as long. The
# process keeps so much of it afterwards.
SCANNED = Recycler(most_bytes=64 << 20)
S = TypeVar("S")
T = TypeVar("T")
_NAMES = ("keys", "rows", "checksums")


@dataclass(slots=True, eq=False)
class ParameterFile:
    """One file. `keys` and `rows` are its buffers until it is written; then `checksum` names its sums."""

    number: int
    count: int = 0
    keys: Keys | None = None  # (R,)
    rows: Floats | None = None  # (R, width)
    checksum: int | None = None
    sums: npt.NDArray[np.uint32] | None = None
    pins: int = 0
    writing: Future[None] | None = None
    syncing: Future[None] | None = field(default=None)

    @property
    def entry(self) -> FileEntry:
        """What a snapshot records of a written file."""
        assert self.checksum is not None
        return FileEntry(self.number, self.count, self.checksum)


class Shelf:
    """Owns numbers, buffers and the files on disk. `lock` guards what readers and writers share."""

    def __init__(self, files: Files, shape: Shape, io: Executor, lock: RLock, counters: Counters) -> None:
        self.current: dict[int, ParameterFile] = {}
        self._files, self._shape, self._io, self._lock, self._counters = files, shape, io, lock, counters
        self._reserved: set[int] = set()  # numbers that snapshots use
        self._leaving: list[ParameterFile] = []
        self._spare: list[tuple[Keys, Floats]] = []
        self._buffers = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of staging buffers and block checksums."""
        return self.buffer_bytes + sum(file.sums.nbytes for file in self.current.values() if file.sums is not None)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of staging buffers."""
        return self._buffers * (self._shape.keys_bytes + self._shape.rows_bytes)

    def reserve(self, numbers: set[int]) -> None:
        """Snapshots need these files: their numbers are not given out."""
        self._reserved = numbers

    def stage(self) -> ParameterFile:
        """A new, empty file in memory."""
        with self._lock:
            taken = self._reserved | self.current.keys() | {file.number for file in self._leaving}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            if number >= self._shape.most_files:
                raise CapacityError(
                    f"{self._files.url}: {number} parameter files of {self._shape.file_rows} rows are in use, all that "
                    "32-bit places can name; drop snapshots, or spread the table over more partitions"
                )
            keys, rows = self.buffers()
            file = self.current[number] = ParameterFile(number, keys=keys, rows=rows)
            return file

    def buffers(self) -> tuple[Keys, Floats]:
        """A spare pair of buffers, or a new one."""
        if self._spare:
            return self._spare.pop()
        self._buffers += 1
        shape = self._shape
        keys = aligned_empty((shape.file_rows,), np.uint64)
        return keys, aligned_empty((shape.file_rows, shape.layout.width), np.float32)

    def adopt(self, entry: FileEntry) -> None:
        """Take up a file that a snapshot recorded."""
        self.current[entry.number] = ParameterFile(entry.number, entry.rows, checksum=entry.crc32c)

    def write(self, file: ParameterFile) -> None:
        """Start writing a full (or last) file; `file.writing` tells when it is done."""
        file.writing = self._io.submit(self._write, file)

    def pin(self, file: ParameterFile) -> Floats | None:
        """Keep a file for a reader; returns its rows if they are still in memory. Hold the lock."""
        file.pins += 1
        return file.rows

    def unpin(self, file: ParameterFile) -> None:
        """The reader is done."""
        with self._lock:
            file.pins -= 1
            self._recycle(file)

    def exchange(self, file: ParameterFile, keys: Keys, rows: Floats) -> None:
        """Give a staged file other buffers; a reader of the old ones keeps them."""
        with self._lock:
            self._free_buffers(file)
            file.keys, file.rows = keys, rows

    def drop(self, file: ParameterFile, *, kept: bool) -> None:
        """Take a file off the current state; unless a snapshot keeps it, `sweep` removes it from disk."""
        with self._lock:
            del self.current[file.number]
            if not kept:
                self._leaving.append(file)

    def discard(self, entries: list[FileEntry]) -> None:
        """Files that no snapshot needs any more and that are not current."""
        with self._lock:
            self._leaving += [ParameterFile(entry.number, entry.rows, checksum=entry.crc32c) for entry in entries]

    def sweep(self) -> None:
        """Remove the files on the way out that have no reader; one that is still being written is waited for."""
        with self._lock:
            unread = [file for file in self._leaving if not file.pins]
        for file in unread:
            for future in (file.writing, file.syncing):
                if future is not None:
                    future.exception()
        with self._lock:
            ready = [file for file in unread if file in self._leaving and not file.pins]
        for file in ready:
            for name in chunk_names(file.number):
                self._files.remove(name)
            with self._lock:
                self._leaving.remove(file)
                self._free_buffers(file)

    @property
    def leaving_bytes(self) -> int:
        """Disk bytes of files that wait for their last reader."""
        return sum(self._shape.data_bytes(file.count) for file in self._leaving)

    def wait(self) -> None:
        """Wait for all writing, whatever comes of it."""
        for file in [*self.current.values(), *self._leaving]:
            for future in (file.writing, file.syncing):
                if future is not None:
                    future.exception()

    def wait_synced(self, file: ParameterFile) -> None:
        """Wait until the bytes of a written file are durable."""
        if file.syncing is not None:
            file.syncing.result()
            file.syncing = None

    def sums(self, file: ParameterFile) -> npt.NDArray[np.uint32]:
        """Block checksums of a written file: the keys' blocks, then the rows'."""
        if file.sums is None:
            name = chunk_names(file.number)[2]
            sums = np.empty(self._shape.blocks, np.uint32)
            self._files.read_into(name, 0, [sums])
            if crc32c(sums) != file.checksum:
                raise CorruptionError(
                    f"{self._files.url}/{name} (array checksums): the checksums of parameter file {file.number} do not "
                    "match the manifest; restore the file from a copy"
                )
            file.sums = sums
        return file.sums

    def keys(self, file: ParameterFile, memory: Recycler | None = None) -> Keys:
        """All keys of a file, checked."""
        with self._lock:  # a copy, because a buffer is used again once the file is written
            if file.keys is not None:
                return file.keys[: file.count].copy()
        return self._read(file, 0, (self._shape.file_rows,), np.uint64, memory)

    def rows(self, file: ParameterFile, memory: Recycler | None = None) -> Floats:
        """All rows of a file, checked."""
        with self._lock:
            if file.rows is not None:
                return file.rows[: file.count].copy()
        return self._read(file, 1, (self._shape.file_rows, self._shape.layout.width), np.float32, memory)

    def scan(self, contents: Iterable[tuple[ParameterFile, Bytes]]) -> Iterator[tuple[Keys, Floats]]:
        """The live keys and rows of files, given with their live bits; a few files are read ahead."""

        def read(item: tuple[ParameterFile, Bytes]) -> tuple[Keys, Floats]:
            file, bits = item
            live = int(np.bitwise_count(bits).sum())
            if not live:
                return np.empty(0, np.uint64), np.empty((0, self._shape.layout.width), np.float32)
            keys, rows = self.keys(file, SCANNED), self.rows(file, SCANNED)
            if live == file.count:
                return keys, rows
            positions = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            return keys[positions], rows[positions]

        for _, found in read_ahead(self._io, read, contents):
            if len(found[0]):
                yield found

    def wrong(self, file: ParameterFile, array: int, block: int) -> CorruptionError:
        """The error for a block that does not match its checksum."""
        name, size = chunk_names(file.number)[array], self._shape.block_bytes
        return CorruptionError(
            f"{self._files.url}/{name} (array {_NAMES[array]}): bytes {block * size} to {(block + 1) * size} do not "
            "match their checksum; restore the file from a copy, or open an older snapshot"
        )

    def _read(
        self, file: ParameterFile, array: int, shape: tuple[int, ...], dtype: npt.DTypeLike, memory: Recycler | None
    ) -> npt.NDArray[Any]:
        """What is filled of a file's chunk of keys (0) or rows (1)."""
        sums = self.sums(file)
        sums = sums[: self._shape.key_blocks] if array == 0 else sums[self._shape.key_blocks :]
        data = np.empty(shape, dtype) if memory is None else memory.empty(shape, dtype)
        # Blocks past the last row are zeros on disk too; `verify` checks them, reading has no use for them.
        size = -(-file.count * data[:1].nbytes // self._shape.block_bytes) * self._shape.block_bytes
        part = data.reshape(-1).view(np.uint8)[:size]
        found = read_sums(self._files, chunk_names(file.number)[array], 0, part, self._shape.block_bytes)
        with self._lock:
            self._counters.read_bytes += part.nbytes
        block = first_difference(found, sums)
        if block is not None:
            raise self.wrong(file, array, block)
        return data[: file.count]

    def check(self, file: ParameterFile) -> int:
        """Check every byte of a written file, also the zeros behind a short one; returns the bytes checked."""
        shape, total = self._shape, 0
        sums = self.sums(file)
        parts = (sums[: shape.key_blocks], sums[shape.key_blocks :], None)
        sizes = (shape.keys_bytes, shape.rows_bytes, 4 * shape.blocks)
        for array, (name, expected, size) in enumerate(zip(chunk_names(file.number), parts, sizes, strict=True)):
            actual = self._files.size(name)
            if actual != size:
                what = "is missing" if actual < 0 else f"has {actual} bytes instead of {size}"
                raise CorruptionError(f"{self._files.url}/{name} (array {_NAMES[array]}): the file {what}")
            total += size
            if expected is not None:
                found = read_sums(self._files, name, 0, np.empty(size, np.uint8), shape.block_bytes)
                block = first_difference(found, expected)
                if block is not None:
                    raise self.wrong(file, array, block)
        return total

    def _write(self, file: ParameterFile) -> None:
        shape = self._shape
        assert file.keys is not None
        assert file.rows is not None
        keys, rows = file.keys[: file.count], file.rows[: file.count]
        sums = np.concatenate(
            [
                block_sums(keys, shape.keys_bytes, shape.block_bytes),
                block_sums(rows, shape.rows_bytes, shape.block_bytes),
            ]
        )
        names = chunk_names(file.number)
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
            file.sums, file.checksum = sums, crc32c(sums)
            self._recycle(file)
        file.syncing = self._io.submit(self._files.sync_data, names)

    def _recycle(self, file: ParameterFile) -> None:
        if file.checksum is not None and not file.pins:
            self._free_buffers(file)

    def _free_buffers(self, file: ParameterFile) -> None:
        if file.keys is None or file.rows is None:
            return
        if len(self._spare) < SPARE_BUFFERS and not file.pins:
            self._spare.append((file.keys, file.rows))
        else:
            self._buffers -= 1
        file.keys = file.rows = None


def read_ahead(io: Executor, call: Callable[[S], T], items: Iterable[S]) -> Iterator[tuple[S, T]]:
    """`call` of every item, a few at once on the I/O threads, in order."""
    waiting: deque[tuple[S, Future[T]]] = deque()
    for item in items:
        waiting.append((item, io.submit(call, item)))
        if len(waiting) > AHEAD_FILES:
            first, future = waiting.popleft()
            yield first, future.result()
    while waiting:
        first, future = waiting.popleft()
        yield first, future.result()
