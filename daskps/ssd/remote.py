"""The files of one partition in an object store, through Zarr's store interface (fsspec, obstore, memory).

In: names relative to the partition. Out: objects. A put is atomic and durable when it returns, so `sync` has nothing to
do and `publish` is one put; there is no lock: one writer at a time is the caller's duty (FORMAT.md, "Object stores").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore

from daskps.errors import CorruptionError


class RemoteFiles:
    """A partition in any Zarr store."""

    # A request to an object store takes some 10 ms, in which 1 MB would have come.
    gap_bytes = 1 << 20

    def __init__(self, store: Store, url: str) -> None:
        self.url = url
        self._store = store
        self._prototype = default_buffer_prototype()

    @classmethod
    def from_url(cls, url: str) -> RemoteFiles:
        """By fsspec URL, credentials as fsspec finds them."""
        return cls(FsspecStore.from_url(url), url.rstrip("/"))

    def make(self, folders: Iterable[str]) -> None:
        """Object stores have no folders."""

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
        """A put that has returned is durable."""

    def sync_data(self, names: Iterable[str]) -> None:
        """A put that has returned is durable."""

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
        """There is none."""

    def close(self) -> None:
        self._store.close()

    def _missing(self, name: str) -> CorruptionError:
        return CorruptionError(f"{self.url}/{name}: the object is missing; restore it from a copy")
