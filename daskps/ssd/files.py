"""The files of one partition, in a local folder (with O_DIRECT and fsync) or in an object store; checksummed reads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore

from daskps.device.native import library
from daskps.errors import ArgumentError, CapacityError, CorruptionError, DaskpsError, LockedError, StoreError
from daskps.ssd.format import LOCK, block_sums

ALIGNMENT = 4096  # bytes; O_DIRECT needs buffers that start at a multiple of this
DIRECT_BYTES = 1 << 20  # smallest file that is written with O_DIRECT


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised array whose address is a multiple of ALIGNMENT."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _aligned(pieces: Sequence[Any], total_bytes: int) -> bool:
    (piece,) = pieces if len(pieces) == 1 else (None,)
    return (
        isinstance(piece, np.ndarray)
        and piece.nbytes == total_bytes
        and piece.ctypes.data % ALIGNMENT == 0
        and total_bytes % ALIGNMENT == 0
    )


class Files(Protocol):
    """The file operations that a store needs. `url` names the place in messages."""

    url: str
    gap_bytes: int  # two ranges of a file that are closer than this are read in one call

    def make(self, folders: Iterable[str]) -> None:
        """Create the partition's folder and `folders` in it."""

    def write(self, name: str, pieces: Sequence[Any], total_bytes: int) -> int:
        """Write a new file: the pieces, then zeros up to `total_bytes`. Returns the bytes sent to the disk."""

    def sync(self, names: Iterable[str]) -> None:
        """Make files and the folders that contain them durable."""

    def sync_data(self, names: Iterable[str]) -> None:
        """Make only the bytes of files durable; a snapshot later syncs their folders."""

    def publish(self, name: str, text: bytes) -> None:
        """Create or replace a small file atomically and durably."""

    def read(self, name: str) -> bytes:
        """Return a small file as a whole."""

    def read_into(self, name: str, offset: int, pieces: Sequence[npt.NDArray[Any]]) -> None:
        """Fill the pieces, one after the other, with the bytes of a file from `offset` on."""

    def size(self, name: str) -> int:
        """Return the length of a file in bytes, -1 if there is none."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def names(self) -> list[str]:
        """Return the names of all files of the partition."""

    def free_bytes(self) -> int | None:
        """Return the free space in bytes, None if it is not known."""

    def descriptor(self, name: str) -> int | None:
        """Return an open file descriptor for native reads; the caller closes it. None for an object store."""

    def lock(self) -> None:
        """Take the writer's lock, or raise LockedError."""

    def close(self) -> None:
        """Release the lock."""


def disk_error(files: Files, error: OSError, wanted_bytes: int, used_bytes: int) -> DaskpsError:
    """Return the error to raise for a write that failed: CapacityError if the disk is full, else StoreError."""
    if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return StoreError(f"{files.url}: the disk refused a write: {error}")
    free = files.free_bytes()
    return CapacityError(
        f"{files.url}: the disk is full: {wanted_bytes:,} bytes to write, {'unknown' if free is None else f'{free:,}'} "
        f"free, {used_bytes:,} in use here; free space and call again: what was not written is still in memory"
    )


class SystemCalls:
    """The system calls that change a disk. Tests replace them to simulate faults."""

    def make_folder(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def create(self, path: str, flags: int = 0) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, 0o644)

    def write(self, fd: int, piece: memoryview) -> int:
        return os.write(fd, piece)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_file(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_folder(self, path: str) -> None:
        self.sync_file(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)


class LocalFiles:
    """A partition in a folder of a local file system."""

    # A disk with 2.5 GB/s and 76,000 small reads per second: one more read costs as much as reading 33 KB more.
    gap_bytes = 32 << 10

    def __init__(self, path: str | os.PathLike[str], system: SystemCalls | None = None) -> None:
        self.url = os.path.abspath(path)
        self._system = system or SystemCalls()
        self._direct = getattr(os, "O_DIRECT", 0)  # set to 0 once the file system refuses O_DIRECT
        self._lock_fd: int | None = None

    def make(self, folders: Iterable[str]) -> None:
        for folder in ("", *folders):
            self._system.make_folder(self._path(folder))
        for path in [self.url, *Path(self.url).parents][:3]:  # these may have been created now too
            self._system.sync_folder(str(path))

    def write(self, name: str, pieces: Sequence[Any], total_bytes: int) -> int:
        path = self._path(name)
        self._system.make_folder(os.path.dirname(path))
        fd = self._create(path, pieces, total_bytes)
        written = 0
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while len(view):
                    count = self._system.write(fd, view)
                    view = view[count:]
                    written += count
            if written < total_bytes:
                self._system.truncate(fd, total_bytes)
        finally:
            self._system.close(fd)
        return written

    def _create(self, path: str, pieces: Sequence[Any], total_bytes: int) -> int:
        """Create a file and return its descriptor; with O_DIRECT if it is written as one long, aligned piece.

        Copying into the page cache takes a quarter of the time of an append, and evicted rows are not read again soon.
        """
        if self._direct and total_bytes >= DIRECT_BYTES and _aligned(pieces, total_bytes):
            try:
                return self._system.create(path, self._direct)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = 0
        return self._system.create(path)

    def sync(self, names: Iterable[str]) -> None:
        folders: set[Path] = set()
        for name in names:
            self._system.sync_file(self._path(name))
            folders.update(Path(name).parents)
        for folder in sorted(folders, key=lambda path: -len(path.parts)):
            self._system.sync_folder(self._path(str(folder)))

    def sync_data(self, names: Iterable[str]) -> None:
        for name in names:
            self._system.sync_file(self._path(name))

    def publish(self, name: str, text: bytes) -> None:
        partial = f"{name}.new"
        self.write(partial, [text], len(text))
        self._system.sync_file(self._path(partial))
        self._system.rename(self._path(partial), self._path(name))
        try:
            self._system.sync_folder(os.path.dirname(self._path(name)))
        except OSError as error:
            raise StoreError(
                f"{self.url}/{name}: replaced, but the folder could not be synced ({error}), so a power cut may bring "
                "back the old one; close the store and open it again"
            ) from error

    def read(self, name: str) -> bytes:
        try:
            return Path(self._path(name)).read_bytes()
        except FileNotFoundError:
            raise self._missing(name) from None

    def read_into(self, name: str, offset: int, pieces: Sequence[npt.NDArray[Any]]) -> None:
        views = [memoryview(piece.data).cast("B") for piece in pieces if piece.nbytes]
        fd = self.descriptor(name)
        try:
            while views:
                count = os.preadv(fd, views[:512], offset)
                if not count:
                    raise CorruptionError(f"{self.url}/{name}: the file ends at byte {offset}, before its data does")
                offset += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]
        finally:
            os.close(fd)

    def size(self, name: str) -> int:
        try:
            return os.stat(self._path(name)).st_size
        except FileNotFoundError:
            return -1

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.unlink(self._path(name))
        if name.count("/") == 2:  # remove live/<number>/ and index/<number>/ with their last file
            with contextlib.suppress(OSError):
                self._system.remove_folder(os.path.dirname(self._path(name)))

    def names(self) -> list[str]:
        found = []
        for folder, _, names in os.walk(self.url):
            relative = os.path.relpath(folder, self.url)
            found += [name if relative == "." else f"{relative}/{name}" for name in names]
        return found

    def free_bytes(self) -> int | None:
        space = os.statvfs(self.url if os.path.isdir(self.url) else os.path.dirname(self.url))
        return space.f_bavail * space.f_frsize

    def descriptor(self, name: str) -> int:
        try:
            return os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._missing(name) from None

    def lock(self) -> None:
        try:
            fd = os.open(self._path(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            raise StoreError(f"{self.url}: no such folder; make the store with Store.create") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
            os.close(fd)
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise
            raise LockedError(
                f"{self.url}: process {holder or 'unknown'} is writing to this partition; close it there, "
                "or open with read_only=True"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _path(self, name: str) -> str:
        return os.path.join(self.url, name) if name not in {"", "."} else self.url

    def _missing(self, name: str) -> StoreError:
        return CorruptionError(f"{self.url}/{name}: the file is missing; restore it from a copy")


class RemoteFiles:
    """A partition in any Zarr store."""

    # A request to an object store takes about 10 ms; in that time 1 MB could be transferred.
    gap_bytes = 1 << 20

    def __init__(self, store: Store, url: str) -> None:
        self.url = url
        self._store = store
        self._prototype = default_buffer_prototype()

    @classmethod
    def from_url(cls, url: str) -> RemoteFiles:
        """Open an fsspec URL; fsspec finds the credentials."""
        return cls(FsspecStore.from_url(url), url.rstrip("/"))

    def make(self, folders: Iterable[str]) -> None:
        """Do nothing: object stores have no folders."""

    def write(self, name: str, pieces: Sequence[Any], total_bytes: int) -> int:
        data = np.zeros(total_bytes, np.uint8)
        offset = 0
        for piece in pieces:
            part = np.frombuffer(memoryview(piece).cast("B"), np.uint8)
            data[offset : offset + len(part)] = part
            offset += len(part)
        sync(self._store.set(name, self._prototype.buffer.from_bytes(data.tobytes())))
        return total_bytes

    def sync(self, names: Iterable[str]) -> None:
        """Do nothing: a put is durable when it returns."""

    def sync_data(self, names: Iterable[str]) -> None:
        """Do nothing: a put is durable when it returns."""

    def publish(self, name: str, text: bytes) -> None:
        self.write(name, [text], len(text))

    def read(self, name: str) -> bytes:
        found = sync(self._store.get(name, self._prototype))
        if found is None:
            raise self._missing(name)
        return found.to_bytes()

    def read_into(self, name: str, offset: int, pieces: Sequence[npt.NDArray[Any]]) -> None:
        size = sum(piece.nbytes for piece in pieces)
        if not size:
            return
        found = sync(self._store.get(name, self._prototype, RangeByteRequest(offset, offset + size)))
        if found is None:
            raise self._missing(name)
        data = np.frombuffer(found.to_bytes(), np.uint8)
        if len(data) != size:
            raise CorruptionError(f"{self.url}/{name}: the object ends early, at byte {offset + len(data)}")
        for piece in pieces:
            piece.reshape(-1).view(np.uint8)[:], data = data[: piece.nbytes], data[piece.nbytes :]

    def size(self, name: str) -> int:
        try:
            return sync(self._store.getsize(name))
        except FileNotFoundError:
            return -1

    def remove(self, name: str) -> None:
        sync(self._store.delete(name))

    def names(self) -> list[str]:
        async def collect() -> list[str]:
            return [name async for name in self._store.list()]

        return sync(collect())

    def free_bytes(self) -> int | None:
        return None

    def descriptor(self, name: str) -> int | None:
        return None

    def lock(self) -> None:
        """Do nothing: object stores have no lock. The caller must see to it that there is one writer."""

    def close(self) -> None:
        self._store.close()

    def _missing(self, name: str) -> CorruptionError:
        return CorruptionError(f"{self.url}/{name}: the object is missing; restore it from a copy")


def files_at(path: Any) -> Files:
    """Return the files at a path, URL or Zarr store.

    Local paths and file:// URLs use system calls; other URLs and Zarr stores go through Zarr's store interface.
    """
    if isinstance(path, LocalFiles | RemoteFiles):
        return path
    if isinstance(path, os.PathLike):
        return LocalFiles(path)
    if isinstance(path, str):
        if path.startswith("file://"):
            return LocalFiles(path.removeprefix("file://"))
        return RemoteFiles.from_url(path) if "://" in path else LocalFiles(path)
    if hasattr(path, "set") and hasattr(path, "list_prefix"):
        return RemoteFiles(path, str(path))
    raise ArgumentError(f"a store's path is a folder, a URL or a Zarr store, got {type(path).__name__}")


def child(path: Any, name: str) -> Any:
    """Return the path of `name` below a folder or URL."""
    return os.path.join(path, name) if "://" not in str(path) else f"{str(path).rstrip('/')}/{name}"


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
