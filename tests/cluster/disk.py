"""A disk in memory that forgets what was not synced when it crashes, and can stop its user before any operation."""

from __future__ import annotations

import random
from dataclasses import dataclass


class CrashError(BaseException):
    """The process died here. Not an Exception: nothing may catch it by accident."""


@dataclass
class Inode:
    seen: bytes  # what a living process reads
    safe: bytes | None = None  # what survives a power cut; None: nothing was ever synced


class SimulatedDisk:
    """Files of daskps.cluster. `crash_after` operations that change the disk, the next one raises CrashError."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng or random.Random(0)
        self.seen: dict[str, Inode] = {}  # names as living processes see them
        self.safe: dict[str, Inode] = {}  # names that survive
        self.crash_after: int | None = None
        self.changes = 0

    def _change(self) -> None:
        if self.crash_after is not None and self.changes >= self.crash_after:
            raise CrashError
        self.changes += 1

    def read(self, path: str) -> bytes:
        if path not in self.seen:
            raise FileNotFoundError(path)
        return self.seen[path].seen

    def write(self, path: str, data: bytes) -> None:
        self._change()
        self.seen.setdefault(path, Inode(b"")).seen = data

    def sync(self, path: str) -> None:
        self._change()
        if path in self.seen:
            self.seen[path].safe = self.seen[path].seen
            return
        for names, others in ((self.seen, self.safe), (self.safe, self.seen)):
            for name in [name for name in names if name.rpartition("/")[0] == path]:
                if names is self.seen:
                    self.safe[name] = self.seen[name]
                elif name not in others:
                    del self.safe[name]

    def link(self, source: str, target: str) -> None:
        self._change()
        if target in self.seen:
            raise FileExistsError(target)
        self.seen[target] = self.seen[source]

    def remove(self, path: str) -> None:
        self._change()
        self.seen.pop(path, None)

    def list(self, folder: str) -> list[str]:
        return sorted(
            {name[len(folder) + 1 :].partition("/")[0] for name in self.seen if name.startswith(folder + "/")}
        )

    def make_folder(self, path: str) -> None:
        pass

    def remove_folder(self, path: str) -> None:
        for name in [name for name in self.seen if name.startswith(path + "/")]:
            self.remove(name)

    def power_cut(self) -> None:
        """Every unsynced name is as before or as seen, every unsynced file as before, as seen, or cut somewhere."""
        names = {}
        for name in list(dict.fromkeys([*self.safe, *self.seen])):
            choices = [side.get(name) for side in (self.safe, self.seen)]
            inode = self.rng.choice(choices) if choices[0] is not choices[1] else choices[0]
            if inode is not None:
                names[name] = inode
        for inode in {id(inode): inode for inode in names.values()}.values():
            if inode.safe != inode.seen:
                cut = inode.seen[: self.rng.randrange(len(inode.seen) + 1)]
                inode.seen = self.rng.choice([inode.safe or b"", inode.seen, cut])
            inode.safe = inode.seen
        self.seen, self.safe = names, dict(names)
        self.crash_after = None
