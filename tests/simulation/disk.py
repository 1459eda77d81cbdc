"""A disk in memory that loses unsynced writes in a crash, and can stop its user before any operation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.errors import CorruptionError, LockedError
from daskps.storage.files import NEW, TEMPORARY


class CrashError(BaseException):
    """The process died here. Not an Exception: nothing may catch it by accident."""


@dataclass
class Inode:
    seen: bytes  # what a living process reads
    safe: bytes | None = None  # what survives a power cut; None: nothing was ever synced
    readers: int = 0  # that share a lock on it


class Names:
    """Files by path, and the contents of each folder, because folders are listed very often."""

    def __init__(self, inodes: dict[str, Inode] | None = None) -> None:
        self.inodes: dict[str, Inode] = {}
        self._folders: dict[str, dict[str, int]] = {}  # by path: how many files each name in it stands for
        for path, inode in (inodes or {}).items():
            self.put(path, inode)

    def put(self, path: str, inode: Inode) -> None:
        if path not in self.inodes:
            self._count(path, 1)
        self.inodes[path] = inode

    def remove(self, path: str) -> None:
        if self.inodes.pop(path, None) is not None:
            self._count(path, -1)

    def _count(self, path: str, change: int) -> None:
        folder, _, name = path.rpartition("/")
        while name:
            names = self._folders.setdefault(folder, {})
            names[name] = names.get(name, 0) + change
            if not names[name]:
                del names[name]
            folder, _, name = folder.rpartition("/")

    def in_folder(self, folder: str) -> Iterable[str]:
        return self._folders.get(folder, ())


class SimulatedDisk:
    """One machine's disk, by full path. After `crash_after` operations that change it, the next raises CrashError."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng or random.Random(0)
        self.seen = Names()  # as living processes see them
        self.safe = Names()  # that survive
        self.crash_after: int | None = None
        self.changes = 0
        self.temporaries = 0  # names given so far
        self.writers: dict[str, SimulatedFiles] = {}  # who has the writer's lock, by root

    def _change(self) -> None:
        if self.crash_after is not None and self.changes >= self.crash_after:
            raise CrashError
        self.changes += 1

    def read(self, path: str) -> bytes:
        if path not in self.seen.inodes:
            raise FileNotFoundError(path)
        return self.seen.inodes[path].seen

    def write(self, path: str, data: bytes) -> None:
        self._change()
        if path not in self.seen.inodes:
            self.seen.put(path, Inode(b""))
        self.seen.inodes[path].seen = data

    def sync(self, path: str) -> None:
        self._change()
        if path in self.seen.inodes:
            self.seen.inodes[path].safe = self.seen.inodes[path].seen
            return
        for name in self.seen.in_folder(path):
            if (file := f"{path}/{name}") in self.seen.inodes:
                self.safe.put(file, self.seen.inodes[file])
        for name in [*self.safe.in_folder(path)]:
            if (file := f"{path}/{name}") not in self.seen.inodes:
                self.safe.remove(file)

    def link(self, source: str, target: str) -> None:
        self._change()
        if target in self.seen.inodes:
            raise FileExistsError(target)
        if source not in self.seen.inodes:
            raise FileNotFoundError(source)
        self.seen.put(target, self.seen.inodes[source])

    def remove(self, path: str) -> None:
        self._change()
        self.seen.remove(path)

    def list(self, folder: str) -> list[str]:
        return sorted(self.seen.in_folder(folder))

    def rename(self, source: str, target: str) -> None:
        self._change()
        self.seen.put(target, self.seen.inodes[source])
        self.seen.remove(source)

    def remove_folder(self, path: str) -> None:
        for name in [name for name in self.seen.inodes if name.startswith(path + "/")]:
            self.remove(name)

    def share(self, path: str) -> Callable[[], None]:
        if path not in self.seen.inodes:
            raise FileNotFoundError(path)
        inode = self.seen.inodes[path]
        inode.readers += 1

        def release() -> None:
            inode.readers -= 1

        return release

    def seize(self, path: str) -> Callable[[], None] | None:
        inode = self.seen.inodes.get(path)
        return None if inode is not None and inode.readers else lambda: None

    def copy(self) -> SimulatedDisk:
        """Return the same files on another machine."""
        other = SimulatedDisk()
        other.seen = Names({path: Inode(inode.seen, inode.seen) for path, inode in self.seen.inodes.items()})
        return other

    def contents(self, folder: str) -> dict[str, bytes]:
        """Return all files below a folder, as living processes see them."""
        return {path: inode.seen for path, inode in self.seen.inodes.items() if path.startswith(f"{folder}/")}

    def power_cut(self) -> None:
        """Lose unsynced writes: a name is old or new; a file is old, new, or cut at any byte."""
        names = {}
        for name in dict.fromkeys([*self.safe.inodes, *self.seen.inodes]):
            choices = [side.inodes.get(name) for side in (self.safe, self.seen)]
            inode = self.rng.choice(choices) if choices[0] is not choices[1] else choices[0]
            if inode is not None:
                names[name] = inode
        for inode in {id(inode): inode for inode in names.values()}.values():
            if inode.safe != inode.seen:
                cut = inode.seen[: self.rng.randrange(len(inode.seen) + 1)]
                inode.seen = self.rng.choice([inode.safe or b"", inode.seen, cut])
            inode.safe = inode.seen
        self.seen, self.safe = Names(names), Names(names)
        self.crash_after = None


class SimulatedFiles:
    """`Files` below a root of a simulated disk. `before_change` is called before every operation that changes it."""

    gap_bytes = 0

    def __init__(self, disk: SimulatedDisk, root: str, before_change: Callable[[], None] = lambda: None) -> None:
        self.url, self._disk, self._before_change = root, disk, before_change

    def make(self, folders: Iterable[str] = ()) -> None:
        pass  # folders are there

    def write(self, name: str, pieces: Sequence[Any], total_bytes: int) -> int:
        data = b"".join(bytes(memoryview(piece).cast("B")) for piece in pieces)
        self._before_change()
        self._disk.write(self._path(name), data.ljust(total_bytes, b"\0"))
        return len(data)

    def sync(self, names: Iterable[str]) -> None:
        names = list(names)
        self.sync_data(names)
        for folder in sorted({self._path(name).rpartition("/")[0] for name in names}):
            self._before_change()
            self._disk.sync(folder)  # those above have no files, and the disk forgets no folder

    def sync_data(self, names: Iterable[str]) -> None:
        for name in names:
            self._before_change()
            self._disk.sync(self._path(name))

    def replace(self, name: str, data: bytes) -> None:
        self.write(f"{name}{NEW}", [data], len(data))
        self.sync_data([f"{name}{NEW}"])
        self._before_change()
        self._disk.rename(self._path(f"{name}{NEW}"), self._path(name))
        self._before_change()
        self._disk.sync(self._path(name).rpartition("/")[0])

    def create_exclusive(self, name: str, data: bytes) -> None:
        folder = name.rpartition("/")[0]
        self._disk.temporaries += 1
        temporary = f"{folder}/.{self._disk.temporaries}{TEMPORARY}".lstrip("/")
        self.write(temporary, [data], len(data))
        self.sync_data([temporary])
        try:
            self._before_change()
            self._disk.link(self._path(temporary), self._path(name))
        finally:
            self.remove(temporary)
        self._before_change()
        self._disk.sync(self._path(folder))

    def read(self, name: str) -> bytes:
        try:
            return self._disk.read(self._path(name))
        except FileNotFoundError:
            raise CorruptionError(f"{self._path(name)}: the file is missing") from None

    def read_into(self, name: str, offset: int, pieces: Sequence[np.ndarray]) -> None:
        data = self.read(name)[offset:]
        for piece in pieces:
            if len(data) < piece.nbytes:
                raise CorruptionError(f"{self._path(name)}: the file ends before its data does")
            piece.reshape(-1).view(np.uint8)[:] = np.frombuffer(data[: piece.nbytes], np.uint8)
            data = data[piece.nbytes :]

    def size(self, name: str) -> int:
        inode = self._disk.seen.inodes.get(self._path(name))
        return -1 if inode is None else len(inode.seen)

    def list_folder(self, folder: str) -> list[str]:
        return self._disk.list(self._path(folder))

    def names(self) -> list[str]:
        return [path.removeprefix(f"{self.url}/") for path in self._disk.contents(self.url)]

    def remove(self, name: str) -> None:
        self._before_change()
        self._disk.remove(self._path(name))

    def remove_folder(self, folder: str) -> None:
        self._before_change()
        self._disk.remove_folder(self._path(folder))

    def free_bytes(self) -> int | None:
        return None

    def descriptor(self, name: str) -> int | None:
        return None

    def lock(self) -> None:
        if self._disk.writers.setdefault(self.url, self) is not self:
            raise LockedError(f"{self.url}: another writer has the lock")

    def share(self, name: str) -> Callable[[], None]:
        return self._disk.share(self._path(name))

    def seize(self, name: str) -> Callable[[], None] | None:
        return self._disk.seize(self._path(name))

    def close(self) -> None:
        if self._disk.writers.get(self.url) is self:
            del self._disk.writers[self.url]

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url
