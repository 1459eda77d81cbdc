"""`Files`, the contract of the places where a model is kept: the files below one root.

Input: names below the root ("log/00000001.json") and bytes. Output: bytes and names. Implementations: `LocalFiles` (a
folder of a local or network file system), `ObjectFiles` (any Zarr store, so S3 and others), and a simulated disk in the
tests. All of them pass the tests in tests/contracts/test_files.py.

What is durable: a file that `write` has written is durable after `sync`; until then a crash may lose any part of it.
`replace` and `create_exclusive` are durable when they return; after a crash their file is complete or absent. A lock
ends with its process, however that ends.

Example: a commit. Of all processes that try to create one entry of the log, one succeeds.

    files = files_at("runs/model")
    files.make(["log"])
    files.write("snapshots/7/rows", [keys, rows], keys.nbytes + rows.nbytes)
    files.sync(["snapshots/7/rows"])
    files.create_exclusive("log/00000007.json", entry)      # FileExistsError: somebody else was first
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from zarr.abc.store import RangeByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, ObjectStore

from daskps.budget import Term, capacity_error, total_bytes
from daskps.errors import ArgumentError, CorruptionError, DaskpsError, LockedError, StoreError

LOCK = "lock"  # file with the writer's lock; it has the writer's process id and no data
NEW = ".new"  # `replace` writes to the name with this ending, then renames
TEMPORARY = ".tmp"  # `create_exclusive` writes to a name with this ending first; a killed process leaves it behind
ALIGNMENT = 4096  # bytes; O_DIRECT needs buffers that start at a multiple of this
DIRECT_BYTES = 1 << 20  # smallest file that is written with O_DIRECT

Release = Callable[[], None]  # call it to release a lock


class Files(Protocol):
    """The files below one root. Names have "/" between folders; `url` names the root in messages.

    A file that is read must exist: CorruptionError, which names it, if it is missing.
    """

    url: str
    gap_bytes: int  # two ranges of a file that are closer than this are read in one call

    def make(self, folders: Iterable[str] = ()) -> None:
        """Create the root and `folders` in it, as far as they are missing. Their names are durable."""

    def write(self, name: str, pieces: Sequence[Any], total_bytes: int) -> int:
        """Create a file: the pieces, then zeros up to `total_bytes`. Returns the bytes sent to the disk.

        A file that exists is overwritten. Missing folders are created.
        """

    def sync(self, names: Iterable[str]) -> None:
        """Make files durable, with the names of all folders from them up to the root."""

    def sync_data(self, names: Iterable[str]) -> None:
        """Make only the bytes of files durable; a later `sync` of other files makes their folders durable."""

    def replace(self, name: str, data: bytes) -> None:
        """Create or replace a small file, atomically and durably."""

    def create_exclusive(self, name: str, data: bytes) -> None:
        """Create a small file, atomically and durably. Raises FileExistsError if the name is taken, by any process.

        Raises FileNotFoundError if another process has removed the temporary file that some stores need on the way, and
        StoreError if the store cannot create files exclusively.
        """

    def read(self, name: str) -> bytes:
        """Return a small file as a whole."""

    def read_into(self, name: str, offset: int, pieces: Sequence[npt.NDArray[Any]]) -> None:
        """Fill the pieces, one after the other, with the bytes of a file from `offset` on."""

    def size(self, name: str) -> int:
        """Return the length of a file in bytes, -1 if there is none."""

    def list_folder(self, folder: str) -> list[str]:
        """Return the names of files and folders in a folder, sorted; an empty list if there is no such folder."""

    def names(self) -> list[str]:
        """Return the names of all files below the root."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and everything in it, if it exists."""

    def free_bytes(self) -> int | None:
        """Return the free space in bytes, None if it is not known."""

    def descriptor(self, name: str) -> int | None:
        """Return an open file descriptor for native reads; the caller closes it. None if the store has none."""

    def lock(self) -> None:
        """Take the writer's lock of this root until `close`. Raises LockedError if another writer has it.

        Does nothing where there are no locks: then the caller must see to it that there is one writer.
        """

    def share(self, name: str) -> Release:
        """Take a reader's lock on a file, which makes `seize` fail. Raises OSError where locking is not possible."""

    def seize(self, name: str) -> Release | None:
        """Try to take an exclusive lock on a file, without waiting; None if somebody has a reader's lock.

        Where locking is not possible (no file, or a store without locks), no reader can have a lock either, so it
        succeeds.
        """

    def close(self) -> None:
        """Release the writer's lock."""


def disk_error(files: Files, error: OSError, wanted_bytes: int, terms: Sequence[Term]) -> DaskpsError:
    """Return the error to raise for a write that failed: CapacityError if the disk is full, else StoreError.

    `terms` are the bytes that this store has on the disk.
    """
    if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return StoreError(f"{files.url}: the disk refused a write: {error}")
    free = files.free_bytes()
    return capacity_error(
        f"{files.url}: the disk is full: {wanted_bytes:,} bytes to write, {'unknown' if free is None else f'{free:,}'} "
        "free",
        terms,
        {"disk_bytes": None if free is None else total_bytes(terms) + free},
        "free space and call again: what was not written is still in memory",
    )


def fsync_path(path: str | os.PathLike[str]) -> None:
    """Make the bytes of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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

    def sync(self, path: str) -> None:
        fsync_path(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)


class LocalFiles:
    """A folder of a local or network file system: O_DIRECT for long files, fsync, hard links, flock."""

    # A disk with 2.5 GB/s and 76,000 small reads per second: one more read costs as much as reading 33 KB more.
    gap_bytes = 32 << 10

    def __init__(self, path: str | os.PathLike[str], system: SystemCalls | None = None) -> None:
        self.url = os.path.abspath(path)
        self._system = system or SystemCalls()
        self._direct = getattr(os, "O_DIRECT", 0)  # set to 0 once the file system refuses O_DIRECT
        self._lock_fd: int | None = None

    def make(self, folders: Iterable[str] = ()) -> None:
        above = [self.url, *map(str, Path(self.url).parents)]
        there = next(number for number, path in enumerate(above) if os.path.isdir(path))
        for folder in ("", *folders):
            self._system.make_folder(self._path(folder))
        # Also one level that exists: a process may have died between creating a folder and syncing its name.
        for path in above[: there + 2]:
            self._system.sync(path)

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
        if self._direct and total_bytes >= DIRECT_BYTES and _is_aligned(pieces, total_bytes):
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
            self._system.sync(self._path(name))
            folders.update(Path(name).parents)
        for folder in sorted(folders, key=lambda path: -len(path.parts)):
            self._system.sync(self._path(str(folder)))

    def sync_data(self, names: Iterable[str]) -> None:
        for name in names:
            self._system.sync(self._path(name))

    def replace(self, name: str, data: bytes) -> None:
        partial = f"{name}{NEW}"
        self.write(partial, [data], len(data))
        self._system.sync(self._path(partial))
        self._system.rename(self._path(partial), self._path(name))
        try:
            self._system.sync(os.path.dirname(self._path(name)))
        except OSError as error:
            raise StoreError(
                f"{self.url}/{name}: replaced, but the folder could not be synced ({error}), so a power cut may bring "
                "back the old one; close the store and open it again"
            ) from error

    def create_exclusive(self, name: str, data: bytes) -> None:
        path = self._path(name)
        folder = name.rpartition("/")[0]
        temporary = f"{folder}/.{uuid.uuid4().hex}{TEMPORARY}".lstrip("/")
        self.write(temporary, [data], len(data))
        try:
            self._system.sync(self._path(temporary))
            self._system.link(self._path(temporary), path)
        finally:
            self.remove(temporary)
        self._system.sync(os.path.dirname(path))

    def read(self, name: str) -> bytes:
        try:
            return Path(self._path(name)).read_bytes()
        except FileNotFoundError:
            raise _missing(self, name) from None

    def read_into(self, name: str, offset: int, pieces: Sequence[npt.NDArray[Any]]) -> None:
        views = [memoryview(piece.data).cast("B") for piece in pieces if piece.nbytes]
        fd = self.descriptor(name)
        try:
            while views:
                count = os.preadv(fd, views[:512], offset)
                if not count:
                    raise _too_short(self, name, offset)
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

    def list_folder(self, folder: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self._path(folder)))
        return []

    def names(self) -> list[str]:
        found = []
        for folder, _, names in os.walk(self.url):
            relative = os.path.relpath(folder, self.url)
            found += [name if relative == "." else f"{relative}/{name}" for name in names]
        return found

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.unlink(self._path(name))

    def remove_folder(self, folder: str) -> None:
        for path, folders, names in os.walk(self._path(folder), topdown=False):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._system.unlink(os.path.join(path, name))
            for name in folders:
                with contextlib.suppress(FileNotFoundError):
                    self._system.remove_folder(os.path.join(path, name))
        with contextlib.suppress(FileNotFoundError):
            self._system.remove_folder(self._path(folder))

    def free_bytes(self) -> int | None:
        space = os.statvfs(self.url if os.path.isdir(self.url) else os.path.dirname(self.url))
        return space.f_bavail * space.f_frsize

    def descriptor(self, name: str) -> int:
        try:
            return os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _missing(self, name) from None

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

    def share(self, name: str) -> Release:
        descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except BaseException:
            os.close(descriptor)
            raise
        return lambda: os.close(descriptor)

    def seize(self, name: str) -> Release | None:
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS needs a writable file for an exclusive lock
        except PermissionError:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return lambda: None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            pass  # the file system has no locks
        return lambda: os.close(descriptor)

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _path(self, name: str) -> str:
        return os.path.join(self.url, name) if name not in {"", "."} else self.url


class ObjectFiles:
    """Any Zarr store: an object store through fsspec or obstore. A put is atomic, and durable when it returns."""

    # A request to an object store takes about 10 ms; in that time 1 MB could be transferred.
    gap_bytes = 1 << 20

    def __init__(self, store: ZarrStore, url: str) -> None:
        self.url = url
        self._store = store
        self._prototype = default_buffer_prototype()

    @classmethod
    def from_url(cls, url: str) -> ObjectFiles:
        """Open an fsspec URL; fsspec finds the credentials."""
        return cls(FsspecStore.from_url(url), url.rstrip("/"))

    def make(self, folders: Iterable[str] = ()) -> None:
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

    def replace(self, name: str, data: bytes) -> None:
        self.write(name, [data], len(data))

    def create_exclusive(self, name: str, data: bytes) -> None:
        # Zarr's set_if_not_exists is no use: it does not tell who has won, and by default it looks before it writes.
        if isinstance(self._store, ObjectStore):
            import obstore

            try:
                obstore.put(self._store.store, name, data, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.url}/{name}") from None
        elif isinstance(self._store, FsspecStore) and "s3" in self._store.fs.protocol:  # a conditional put
            sync(self._store.fs._pipe_file(f"{self._store.path}/{name}", data, mode="create"))
        else:
            raise StoreError(
                f"{self.url}: this store cannot create a file exclusively, so two writers could overwrite each other's "
                "commits; use a local path, s3:// or a store of obstore"
            )

    def read(self, name: str) -> bytes:
        found = sync(self._store.get(name, self._prototype))
        if found is None:
            raise _missing(self, name)
        return found.to_bytes()

    def read_into(self, name: str, offset: int, pieces: Sequence[npt.NDArray[Any]]) -> None:
        size = sum(piece.nbytes for piece in pieces)
        if not size:
            return
        found = sync(self._store.get(name, self._prototype, RangeByteRequest(offset, offset + size)))
        if found is None:
            raise _missing(self, name)
        data = np.frombuffer(found.to_bytes(), np.uint8)
        if len(data) != size:
            raise _too_short(self, name, offset + len(data))
        for piece in pieces:
            piece.reshape(-1).view(np.uint8)[:], data = data[: piece.nbytes], data[piece.nbytes :]

    def size(self, name: str) -> int:
        try:
            return sync(self._store.getsize(name))
        except FileNotFoundError:
            return -1

    def list_folder(self, folder: str) -> list[str]:
        async def collect() -> set[str]:
            return {name async for name in self._store.list_dir(folder)}

        return sorted(sync(collect()))

    def names(self) -> list[str]:
        async def collect() -> list[str]:
            return [name async for name in self._store.list()]

        return sync(collect())

    def remove(self, name: str) -> None:
        sync(self._store.delete(name))

    def remove_folder(self, folder: str) -> None:
        sync(self._store.delete_dir(folder))

    def free_bytes(self) -> int | None:
        return None

    def descriptor(self, name: str) -> int | None:
        return None

    def lock(self) -> None:
        """Do nothing: object stores have no locks."""

    def share(self, name: str) -> Release:
        raise OSError(errno.ENOLCK, "object stores have no locks", f"{self.url}/{name}")

    def seize(self, name: str) -> Release | None:
        return lambda: None

    def close(self) -> None:
        self._store.close()


def files_at(path: Any) -> Files:
    """Return the files at a path, URL or Zarr store; `Files` are returned as they are.

    Local paths and file:// URLs use system calls; other URLs and Zarr stores go through Zarr's store interface.
    """
    if isinstance(path, os.PathLike):
        return LocalFiles(path)
    if isinstance(path, str):
        if path.startswith("file://"):
            return LocalFiles(path.removeprefix("file://"))
        return ObjectFiles.from_url(path) if "://" in path else LocalFiles(path)
    if isinstance(path, ZarrStore):
        return ObjectFiles(path, str(path))
    if hasattr(path, "create_exclusive"):
        return path  # type: ignore[no-any-return]
    raise ArgumentError(f"a store's path is a folder, a URL or a Zarr store, got {type(path).__name__}")


def _is_aligned(pieces: Sequence[Any], total_bytes: int) -> bool:
    (piece,) = pieces if len(pieces) == 1 else (None,)
    return (
        isinstance(piece, np.ndarray)
        and piece.nbytes == total_bytes
        and piece.ctypes.data % ALIGNMENT == 0
        and total_bytes % ALIGNMENT == 0
    )


def _missing(files: Files, name: str) -> CorruptionError:
    return CorruptionError(f"{files.url}/{name}: the file is missing; restore it from a copy")


def _too_short(files: Files, name: str, end: int) -> CorruptionError:
    return CorruptionError(f"{files.url}/{name}: the file ends at byte {end}, before its data does")
