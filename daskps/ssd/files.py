"""The files of one partition on a local disk, and the system calls they are made with.

In: names relative to the partition. Out: bytes that are durable when `sync` or `publish` has returned. The system calls
are an object of their own, so that tests can put a disk in their place that is full or forgets what was not synced.
`remote.RemoteFiles` has the same methods for object stores; `Files` names them.
"""

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

from daskps.errors import CapacityError, CorruptionError, DaskpsError, LockedError, StoreError
from daskps.ssd.format import LOCK

# Buffers that start at a multiple of this can be written past the page cache.
ALIGNMENT = 4096
DIRECT_BYTES = 1 << 20


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array at a multiple of ALIGNMENT."""
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
    """What a store asks of the place where its files are."""

    url: str
    gap_bytes: int  # parts of a file closer than this are read together

    def make(self, folders: Iterable[str]) -> None:
        """Make the partition's folder and `folders` in it."""

    def write(self, name: str, pieces: Sequence[Any], total_bytes: int) -> int:
        """Write a new file: the pieces, then zeros up to `total_bytes`. Returns the bytes that were sent."""

    def sync(self, names: Iterable[str]) -> None:
        """Make files, and the folders that name them, durable."""

    def sync_data(self, names: Iterable[str]) -> None:
        """Only the files' bytes; their folders follow with the snapshot."""

    def publish(self, name: str, text: bytes) -> None:
        """Replace a small file in one atomic, durable step."""

    def read(self, name: str) -> bytes:
        """A whole small file."""

    def read_into(self, name: str, offset: int, pieces: Sequence[npt.NDArray[Any]]) -> None:
        """Fill the pieces, one after the other, from `offset` on."""

    def size(self, name: str) -> int:
        """Length of a file, -1 where there is none."""

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""

    def names(self) -> list[str]:
        """Every file of the partition."""

    def free_bytes(self) -> int | None:
        """Free space, where that is known."""

    def descriptor(self, name: str) -> int | None:
        """An open file descriptor for native reads, None where there is none; the caller closes it."""

    def lock(self) -> None:
        """Become the only writer, or raise LockedError."""

    def close(self) -> None:
        """Give up the lock."""


def disk_error(files: Files, error: OSError, wanted_bytes: int, used_bytes: int) -> DaskpsError:
    """What to raise for a write that failed."""
    if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return StoreError(f"{files.url}: the disk refused a write: {error}")
    free = files.free_bytes()
    return CapacityError(
        f"{files.url}: the disk is full: {wanted_bytes:,} bytes to write, {'unknown' if free is None else f'{free:,}'} "
        f"free, {used_bytes:,} in use here; free space and call again: what was not written is still in memory"
    )


class SystemCalls:
    """The calls that change a disk, as they are."""

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

    # At 2.5 GB/s and 76 thousand small reads a second, one read costs as much as 33 KB of a long one.
    gap_bytes = 32 << 10

    def __init__(self, path: str | os.PathLike[str], system: SystemCalls | None = None) -> None:
        self.url = os.path.abspath(path)
        self._system = system or SystemCalls()
        self._direct = getattr(os, "O_DIRECT", 0)  # 0 from the first file system that has no such thing
        self._lock_fd: int | None = None

    def make(self, folders: Iterable[str]) -> None:
        for folder in ("", *folders):
            self._system.make_folder(self._path(folder))
        for path in [self.url, *Path(self.url).parents][:3]:  # the folders that may be new themselves
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
        """A new file, past the page cache where a long, aligned piece is all of it.

        Copying into the cache takes a quarter of the time of an append, and what is evicted is not wanted back soon.
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
        if name.count("/") == 2:  # live/<number>/ and index/<number>/ go with their last file
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
