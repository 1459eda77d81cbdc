"""The few file operations that a commit needs, behind one interface, so that tests can simulate a disk.

A simulated disk can lose everything that was not synced.

Input: paths and bytes. Output: bytes and names. A written file is durable only after `sync` of the file and of its
folder. `link` gives a file a second name and fails if that name exists: this makes the creation of a log entry
exclusive. A folder is durable once made. A lock is released when its process ends, for any reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable
from typing import Protocol

Release = Callable[[], None]  # call it to release a lock


class Files(Protocol):
    """The file operations of a model directory, as a Protocol.

    A missing path raises FileNotFoundError, a name that is taken FileExistsError.
    """

    def read(self, path: str) -> bytes: ...
    def write(self, path: str, data: bytes) -> None: ...
    def sync(self, path: str) -> None: ...
    def link(self, source: str, target: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def list(self, folder: str) -> list[str]: ...
    def make_folder(self, path: str) -> None: ...
    def remove_folder(self, path: str) -> None: ...
    def share(self, path: str) -> Release: ...
    def seize(self, path: str) -> Release | None: ...


class LocalFiles:
    """A local or network file system with hard links."""

    def read(self, path: str) -> bytes:
        """Return the whole file."""
        with open(path, "rb") as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file. Until `sync`, a crash may lose any part of it."""
        with open(path, "wb") as file:
            file.write(data)

    def sync(self, path: str) -> None:
        """Make the bytes of a file, or the names in a folder, durable (fsync)."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name. Raises FileExistsError if the name is taken, by any process."""
        os.link(source, target)

    def remove(self, path: str) -> None:
        """Remove a file. Does nothing if there is none."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)

    def list(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; an empty list if the folder is missing."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(folder))
        return []

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents. Their names are durable when this returns."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path) or "."
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            self.sync(os.path.dirname(folder) or ".")

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all its contents. Does nothing if there is none."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def share(self, path: str) -> Release:
        """Take a shared lock on a file, which makes `seize` fail. Raises OSError where locking is not possible."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except BaseException:
            os.close(descriptor)
            raise
        return lambda: os.close(descriptor)

    def seize(self, path: str) -> Release | None:
        """Try to take an exclusive lock on a file, without waiting. Returns None if somebody has a shared lock.

        Where locking is not possible (no file, or a file system without locks), no reader can have a lock either, so it
        succeeds.
        """
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
