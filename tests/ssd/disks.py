"""Disks for fault tests: one that loses unsynced writes, one that is full, one that is observed."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from daskps.storage.files import SystemCalls


class ForgetfulDisk(SystemCalls):
    """A disk that knows what a power cut would leave of it.

    Of a file, the bytes at its last fsync; of a folder, the names at its last fsync. What came later may be there,
    half there, or not at all: `power_cut` decides by chance.
    """

    def __init__(self, root: Path, at_operation: Callable[["ForgetfulDisk"], None] = lambda disk: None) -> None:
        self.root = root
        self._contents: dict[int, bytes] = {}  # by inode
        self._names: dict[str, dict[str, int]] = {}  # of a folder, the inode of each name
        self._lock = threading.RLock()
        self._at_operation = at_operation

    def _step(self) -> None:
        with self._lock:
            self._at_operation(self)

    def create(self, path: str, flags: int = 0) -> int:
        self._step()
        fd = super().create(path, flags)
        self._contents.pop(os.fstat(fd).st_ino, None)
        return fd

    def write(self, fd: int, piece: memoryview) -> int:
        self._step()
        return super().write(fd, piece)

    def sync(self, path: str) -> None:
        self._step()
        if os.path.isdir(path):
            names = {entry.name: entry.inode() for entry in os.scandir(path)}
            with self._lock:
                self._names[path] = names
        else:
            content, inode = Path(path).read_bytes(), os.stat(path).st_ino
            if "/rows/c." in path:
                time.sleep(0.1)  # longer than all else of a commit: who does not wait for it is found out
            with self._lock:
                self._contents[inode] = content

    def rename(self, source: str, target: str) -> None:
        self._step()
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._step()
        super().unlink(path)

    def power_cut(self, target: Path, chance: random.Random) -> None:
        """Write into `target` what the disk might hold after a power cut now."""
        with self._lock:
            self._restore(str(self.root), target, chance)

    def _restore(self, folder: str, target: Path, chance: random.Random) -> None:
        target.mkdir(parents=True)
        now = {entry.name: entry.inode() for entry in os.scandir(folder)}
        synced = self._names.get(folder, {})
        for name in now.keys() | synced.keys():
            inode = chance.choice([now.get(name), synced.get(name)]) if now.get(name) != synced.get(name) else now[name]
            path = os.path.join(folder, name)
            if inode is None:
                continue
            if os.path.isdir(path):
                self._restore(path, target / name, chance)
                continue
            content = self._contents.get(inode)
            if content is None:  # never synced: any part of it, or noise
                current = Path(path).read_bytes() if now.get(name) == inode else b"\0" * 100
                content = chance.choice([b"", current[: len(current) // 2], chance.randbytes(len(current)), current])
            (target / name).write_bytes(content)


class FullDisk(SystemCalls):
    """A disk on which every call that needs space fails from operation `full_from` on, while that is set."""

    def __init__(self, full_from: int | None = None) -> None:
        self.operations = 0
        self.full_from = full_from
        self._lock = threading.Lock()

    def _need_room(self) -> None:
        with self._lock:
            self.operations += 1
            if self.full_from is not None and self.operations > self.full_from:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def make_folder(self, path: str) -> None:
        if not os.path.isdir(path):
            self._need_room()
        super().make_folder(path)

    def create(self, path: str, flags: int = 0) -> int:
        self._need_room()
        return super().create(path, flags)

    def write(self, fd: int, piece: memoryview) -> int:
        try:
            self._need_room()
        except OSError:
            super().write(fd, piece[: len(piece) // 2])  # half of it fitted
            raise
        return super().write(fd, piece)

    def truncate(self, fd: int, length: int) -> None:
        self._need_room()
        super().truncate(fd, length)

    def rename(self, source: str, target: str) -> None:
        self._need_room()
        super().rename(source, target)


class WatchedDisk(SystemCalls):
    """A disk that calls `look` after every written file. It syncs nothing, which its tests do not need."""

    def __init__(self) -> None:
        self.look: Callable[[], None] = lambda: None

    def close(self, fd: int) -> None:
        super().close(fd)
        self.look()

    def sync(self, path: str) -> None:
        pass


def allocated_bytes(path: Path) -> int:
    """Return the disk space of all files below `path`, without holes."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # removed meanwhile
    return total
