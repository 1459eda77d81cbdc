"""The few file operations that commits need, as one object, so that a simulated disk can lose what was not synced.

In: paths and bytes. Out: bytes, names. `write` is not durable before `sync` of the file and of its folder; `link` gives
a file a name that must not exist yet, which is what makes a log entry exclusive. Folders are durable once made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import Protocol


class Files(Protocol):
    """What a model directory asks of a disk. Missing paths raise FileNotFoundError, taken names FileExistsError."""

    def read(self, path: str) -> bytes: ...
    def write(self, path: str, data: bytes) -> None: ...
    def sync(self, path: str) -> None: ...
    def link(self, source: str, target: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def list(self, folder: str) -> list[str]: ...
    def make_folder(self, path: str) -> None: ...
    def remove_folder(self, path: str) -> None: ...


class LocalFiles:
    """A local or network file system with hard links."""

    def read(self, path: str) -> bytes:
        """The whole file."""
        with open(path, "rb") as file:
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file; a crash may lose any part of it."""
        with open(path, "wb") as file:
            file.write(data)

    def sync(self, path: str) -> None:
        """Make a file's bytes, or a folder's names, survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def link(self, source: str, target: str) -> None:
        """A second name for a file; FileExistsError if the name is taken, by whichever process."""
        os.link(source, target)

    def remove(self, path: str) -> None:
        """Remove a file; one that is gone already is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; a missing folder has none."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(folder))
        return []

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents; their names are durable when this returns."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path) or "."
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
            self.sync(os.path.dirname(folder) or ".")

    def remove_folder(self, path: str) -> None:
        """Remove a folder and all in it; one that is gone already is fine."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
