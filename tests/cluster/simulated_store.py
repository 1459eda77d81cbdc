"""Where the rows of a simulated cluster are: dictionaries over the simulated disk, or the real disk tier.

The first is cheap to open and loses unsynced writes; the second (`RealShelf`) is what nodes use.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.cluster.commit import follow, settle
from daskps.cluster.files import Files
from daskps.cluster.rows import open_rows
from daskps.errors import LockedError
from daskps.ssd import Options, Partitions
from daskps.ssd.placement import Placement
from daskps.types import RowLayout

POOL = ComputePool(1)


class SimulatedPartition:
    """One partition's folder. `locks` is the machine's table of locks: path to process."""

    def __init__(self, files: Files, path: str, process: object, locks: dict[str, object]) -> None:
        holder = locks.get(path)
        if holder is not None and holder is not process:
            raise LockedError(f"{path} is held by {holder}")
        locks[path] = process
        self._files, self._path = files, path
        self.rows: dict[int, bytes] = {}

    def _ids(self, ending: str) -> list[str]:
        return [name.removesuffix(ending) for name in self._files.list(self._path) if name.endswith(ending)]

    def prepared(self) -> Iterable[str]:
        confirmed = set(self.confirmed())
        return [name for name in self._ids(".prepared") if name not in confirmed]

    def confirmed(self) -> Iterable[str]:
        return self._ids(".confirmed")

    def open(self, snapshot: str) -> None:
        text = self._files.read(f"{self._path}/{snapshot}.confirmed").decode()
        self.rows = {int(key): bytes.fromhex(row) for key, row in json.loads(text).items()}

    def prepare(self, snapshot: str) -> None:
        path = f"{self._path}/{snapshot}.prepared"
        self._files.write(path, json.dumps({str(key): row.hex() for key, row in self.rows.items()}).encode())
        self._files.sync(path)
        self._files.sync(self._path)

    def confirm(self, snapshot: str) -> None:
        if snapshot not in self.confirmed():
            self._files.link(f"{self._path}/{snapshot}.prepared", f"{self._path}/{snapshot}.confirmed")
        self._files.sync(self._path)
        self._files.remove(f"{self._path}/{snapshot}.prepared")

    def discard(self, snapshot: str) -> None:
        self._files.remove(f"{self._path}/{snapshot}.prepared")

    def drop(self, snapshot: str) -> None:
        self._files.remove(f"{self._path}/{snapshot}.prepared")  # left there if the process died while it confirmed
        self._files.remove(f"{self._path}/{snapshot}.confirmed")


class SimulatedStore:
    """Several partitions as one row store, as MEM-PS sees it."""

    def __init__(self, partitions: dict[int, SimulatedPartition], placement: Placement, width: int) -> None:
        self.partitions = partitions
        self._placement = placement
        self._width = width

    def _parts(self, keys: np.ndarray) -> list[dict[int, bytes]]:
        return [self.partitions[part].rows for part in self._placement.of(keys, POOL).tolist()]

    def append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        for key, part, row in zip(keys.tolist(), self._parts(keys), rows, strict=True):
            part[key] = row.tobytes()

    def load(self, keys: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((len(keys), self._width), np.float32) if out is None else out
        found = np.zeros(len(keys), np.bool_)
        for place, (key, part) in enumerate(zip(keys.tolist(), self._parts(keys), strict=True)):
            if key in part:
                out[place] = np.frombuffer(part[key], np.float32)
                found[place] = True
        return out, found

    def prepare(self, snapshot_id: str) -> None:
        for partition in self.partitions.values():
            partition.prepare(snapshot_id)

    def follow(self, live: Iterable[str]) -> None:
        for partition in self.partitions.values():
            follow(partition, live)

    def close(self) -> None:
        pass  # its locks go with the process


class RealStore:
    """The same over `daskps.ssd`."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self.append, self.load, self.prepare = partitions.append, partitions.load, partitions.prepare

    def follow(self, live: Iterable[str]) -> None:
        for partition in self._partitions.stores.values():
            follow(partition, live)

    def close(self) -> None:
        self._partitions.close()  # what no snapshot holds is lost, as in a crash


class Shelf(Protocol):
    """Opens one table's rows for a node, and reads them for the checks."""

    def open(
        self, process: Any, path: str, placement: Placement, owned: range, snapshot: str | None, live: tuple[str, ...]
    ) -> Any: ...

    def read(self, process: Any, path: str, placement: Placement, snapshot: str, live: tuple[str, ...]) -> Any: ...
    def snapshots(self, process: Any, path: str, placement: Placement) -> Iterable[tuple[set[str], set[str]]]: ...


class SimulatedShelf:
    """Dictionaries over the simulated disk."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self.locks: dict[str, object] = {}

    def _partition(self, process: Any, path: str, part: int) -> SimulatedPartition:
        return SimulatedPartition(process.files, f"{path}/{part}", process, self.locks)

    def open(
        self, process: Any, path: str, placement: Placement, owned: range, snapshot: str | None, live: tuple[str, ...]
    ) -> SimulatedStore:
        parts = {part: self._partition(process, path, part) for part in owned}
        for partition in parts.values():
            settle(partition, live)
            if snapshot is not None:
                partition.open(snapshot)
        return SimulatedStore(parts, placement, self._layout.width)

    def release(self, process: object) -> None:
        for path in [path for path, holder in self.locks.items() if holder is process]:
            del self.locks[path]

    def read(
        self, process: Any, path: str, placement: Placement, snapshot: str, live: tuple[str, ...]
    ) -> dict[int, bytes]:
        store = self.open(process, path, placement, range(placement.partitions), snapshot, live)
        return {key: row for part in store.partitions.values() for key, row in part.rows.items()}

    def snapshots(self, process: Any, path: str, placement: Placement) -> Iterable[tuple[set[str], set[str]]]:
        """Prepared and confirmed ids of every partition."""
        self.locks.clear()
        for part in range(placement.partitions):
            partition = self._partition(process, path, part)
            yield set(partition.prepared()), set(partition.confirmed())


class RealShelf:
    """The disk tier in a real folder. Dying is closing: nothing unsynced is lost, but nothing is committed either."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._options = Options(background_compaction=False, io_threads=2)

    def open(
        self, process: Any, path: str, placement: Placement, owned: range, snapshot: str | None, live: tuple[str, ...]
    ) -> RealStore:
        rows = open_rows(
            *(path, self._layout),
            placement=placement,
            owned=owned,
            snapshot=snapshot,
            live=live,
            pool=POOL,
            options=self._options,
        )
        process.stores.append(rows)
        return RealStore(rows)

    def release(self, process: Any) -> None:
        while process.stores:
            process.stores.pop().close()

    def read(
        self, process: Any, path: str, placement: Placement, snapshot: str, live: tuple[str, ...]
    ) -> dict[int, bytes]:
        with Partitions.open(path, pool=POOL, snapshot=snapshot, read_only=True, options=self._options) as rows:
            return {
                key: row.tobytes() for keys, part in rows.scan() for key, row in zip(keys.tolist(), part, strict=True)
            }

    def snapshots(self, process: Any, path: str, placement: Placement) -> Iterable[tuple[set[str], set[str]]]:
        """Prepared and confirmed ids of every partition."""
        with Partitions.open(path, pool=POOL, read_only=True, options=self._options) as rows:
            for partition in rows.stores.values():
                yield set(partition.prepared()), set(partition.confirmed())
