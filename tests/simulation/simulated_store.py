"""Where the rows of a simulated cluster are: dictionaries over the simulated disk, or the real disk tier.

The first is cheap to open and loses unsynced writes; the second (`RealRowFolders`) is what nodes use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from daskps.device.pool import ComputePool
from daskps.errors import LockedError, SnapshotError, StoreError
from daskps.node.tables import open_rows
from daskps.ssd import Options, TableStore, recovery
from daskps.ssd.format import MANIFEST
from daskps.ssd.table_store import partition_name
from daskps.storage.files import NEW, Files, LocalFiles
from daskps.storage.model_directory import Snapshot, apply_live
from daskps.storage.partition import Placement
from daskps.storage.sealed import checksum
from daskps.types import RowLayout

POOL = ComputePool(1)


class SimulatedPartition:
    """A partition's folder on the simulated disk. A snapshot is a file: the model's id in a line, then the rows."""

    def __init__(self, files: Files, model: str | None = None) -> None:
        self._files, self.url, self.model = files, files.url, model
        self.rows: dict[int, bytes] = {}
        self._digests: dict[str, str] = {}

    def _ids(self, ending: str) -> list[str]:
        return [name.removesuffix(ending) for name in self._files.list_folder("") if name.endswith(ending)]

    def prepared(self) -> Iterable[str]:
        confirmed = set(self.confirmed())
        return [name for name in self._ids(".prepared") if name not in confirmed]

    def confirmed(self) -> Iterable[str]:
        return self._ids(".confirmed")

    def check_clearable(self) -> None:
        """Raise StoreError if a file belongs to another model; `daskps.node.tables` does so before it removes files."""
        for name in self._files.list_folder(""):
            content = self._files.read(name)
            if b"\n" in content and (found := _model_of(content)) != self.model:  # without: torn by a power cut
                raise StoreError(f"{self.url} belongs to model {found}, but the log is that of {self.model}")

    def open(self, snapshot: str, digest: str = "") -> None:
        """Load the rows of a snapshot; it may be prepared only, if its writer died before it was confirmed."""
        state = "confirmed" if snapshot in self.confirmed() else "prepared"
        if state == "prepared" and snapshot not in self.prepared():
            raise SnapshotError(f"{self.url} has no snapshot {snapshot}")
        part: Any = SimulatedPart(snapshot, self._files.read(f"{snapshot}.{state}"))
        files: Any = self
        if self.model is not None:
            recovery.check_model(files, part, self.model)
        if digest:
            recovery.check_digest(files, part, part, digest)
        self.rows = {int(key): bytes.fromhex(row) for key, row in json.loads(part.rows).items()}

    def prepare(self, snapshot: str) -> None:
        rows = json.dumps({str(key): row.hex() for key, row in self.rows.items()})
        content = f"{self.model}\n{rows}".encode()
        self._digests[snapshot] = SimulatedPart(snapshot, content).digest()
        self._files.write(f"{snapshot}.prepared", [content], len(content))
        self._files.sync([f"{snapshot}.prepared"])

    def digest(self, snapshot: str) -> str:
        return self._digests[snapshot]

    def confirm(self, snapshot: str) -> None:
        if snapshot not in self.confirmed():
            self._files.replace(f"{snapshot}.confirmed", self._files.read(f"{snapshot}.prepared"))
        self._files.remove(f"{snapshot}.prepared")

    def clean(self) -> None:
        """Remove what a writer left behind that died while it confirmed a snapshot."""
        for name in self._files.list_folder(""):
            if name.endswith(NEW):
                self._files.remove(name)

    def discard(self, snapshot: str) -> None:
        self._files.remove(f"{snapshot}.prepared")

    def drop(self, snapshot: str) -> None:
        self._files.remove(f"{snapshot}.prepared")  # left there if the process died while it confirmed
        self._files.remove(f"{snapshot}.confirmed")


class SimulatedPart:
    """What a partition has of a snapshot, for the checks of the real disk tier: both its manifest and its snapshot."""

    def __init__(self, snapshot: str, content: bytes) -> None:
        self.id, self.model, self.rows = snapshot, _model_of(content), content.partition(b"\n")[2]

    def digest(self, snapshot: SimulatedPart | None = None) -> str:
        return checksum(self.rows)


def _model_of(content: bytes) -> str:
    return content.partition(b"\n")[0].decode()


class SimulatedLoading:
    """A load that copies nothing before `wait`: who reads `out` earlier gets other rows."""

    def __init__(self, parts: list[dict[int, bytes]], keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        self._parts, self._keys, self._positions, self._out = parts, keys, positions, out

    def wait(self) -> np.ndarray:
        found = np.zeros(len(self._keys), np.bool_)
        for i, (key, part) in enumerate(zip(self._keys.tolist(), self._parts, strict=True)):
            if key in part:
                self._out[self._positions[i]] = np.frombuffer(part[key], np.float32)
                found[i] = True
        return found


class SimulatedStore:
    """Several partitions as one row store, as MEM-PS sees it. Its memory and disk do not count."""

    memory_bytes = buffer_bytes = disk_bytes = file_bytes = 0

    def __init__(self, stores: dict[int, SimulatedPartition], placement: Placement) -> None:
        self.stores = stores
        self._placement = placement

    def _parts(self, keys: np.ndarray) -> list[dict[int, bytes]]:
        return [self.stores[part].rows for part in self._placement.of(keys, POOL).tolist()]

    def append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        for key, part, row in zip(keys.tolist(), self._parts(keys), rows, strict=True):
            part[key] = row.tobytes()

    def start_load(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> SimulatedLoading:
        return SimulatedLoading(self._parts(keys), keys, positions, out)

    def delete(self, keys: np.ndarray) -> np.ndarray:
        parts = zip(keys.tolist(), self._parts(keys), strict=True)
        return np.array([part.pop(key, None) is not None for key, part in parts], np.bool_)

    def reading_order(self, keys: np.ndarray) -> np.ndarray:
        return self._placement.split(keys, POOL)[0]

    def prepare(self, snapshot_id: str) -> None:
        for partition in self.stores.values():
            partition.prepare(snapshot_id)

    def digests(self, snapshot_id: str) -> dict[str, str]:
        return {partition_name(part): partition.digest(snapshot_id) for part, partition in self.stores.items()}

    def close(self) -> None:
        pass  # its locks go with the process


class RealStore:
    """A `TableStore` whose memory does not count: the schedule says how many rows the cache has."""

    memory_bytes = 0

    def __init__(self, table: TableStore) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


Rows = Callable[[], dict[int, bytes]]  # reads all rows of a table


@dataclass(frozen=True)
class TableParts:
    """The partitions of one table that a node opens: where they are, and what they must hold. As in `open_rows`."""

    path: str
    placement: Placement
    owned: range
    snapshot: str | None
    live: tuple[str, ...]
    model: str
    digests: Mapping[str, str]


class RowFolders(Protocol):
    """Where the rows of all tables are. Opens one table's rows for a node or a reader; looks at them for the checks."""

    def open(self, process: Any, parts: TableParts) -> Any: ...

    def reader(self, process: Any, path: str, placement: Placement, snapshot: Snapshot) -> Rows: ...
    def snapshots(self, process: Any, path: str, placement: Placement) -> Iterable[tuple[set[str], set[str]]]: ...
    def release(self, process: Any) -> None: ...
    def check_outlived(self) -> None: ...
    def misplace(self, process: Any, path: str, part: int, snapshot: str | None, kind: str) -> Callable[[], None]: ...


class SimulatedRowFolders:
    """Rows in dictionaries over the simulated disk. `locks` has the process that holds each (disk, path)."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self.locks: dict[tuple[int, str], Any] = {}

    def _locked(self, process: Any, path: str, part: int, model: str) -> SimulatedPartition:
        place = id(process.disk), f"{path}/{part}"
        holder = self.locks.get(place)
        if holder is not None and holder is not process:
            raise LockedError(f"{path}/{part} is held by {holder.name}")
        self.locks[place] = process
        return SimulatedPartition(process.files(f"{path}/{part}"), model)

    def open(self, process: Any, parts: TableParts) -> SimulatedStore:
        opened = {part: self._locked(process, parts.path, part, parts.model) for part in parts.owned}
        for part, partition in opened.items():
            if parts.snapshot is None:
                partition.check_clearable()
            else:
                partition.open(parts.snapshot, parts.digests[partition_name(part)])
            partition.clean()
            apply_live(partition, parts.live, discard_unpublished=True)
        return SimulatedStore(opened, parts.placement)

    def release(self, process: Any) -> None:
        for place in [place for place, holder in self.locks.items() if holder is process]:
            del self.locks[place]

    def check_outlived(self) -> None:
        """Raise LockedError if a dead process still holds a lock; `daskps.node.begin` asks so before a run begins."""
        for (_, path), holder in self.locks.items():
            if not holder.alive:
                raise LockedError(f"{path} is held by {holder.name}, which is dead")

    def reader(self, process: Any, path: str, placement: Placement, snapshot: Snapshot) -> Rows:
        digests = snapshot.digests(path.rpartition("/")[2])

        def read() -> dict[int, bytes]:
            rows: dict[int, bytes] = {}
            for part in range(placement.partitions):
                partition = SimulatedPartition(process.files(f"{path}/{part}"), snapshot.model)
                partition.open(snapshot.id, digests[partition_name(part)])
                rows |= partition.rows
            return rows

        return read

    def snapshots(self, process: Any, path: str, placement: Placement) -> Iterable[tuple[set[str], set[str]]]:
        """Yield the prepared and the confirmed snapshot ids of every partition."""
        for part in range(placement.partitions):
            partition = SimulatedPartition(process.files(f"{path}/{part}"))
            yield set(partition.prepared()), set(partition.confirmed())

    def misplace(self, process: Any, path: str, part: int, snapshot: str | None, kind: str) -> Callable[[], None]:
        """Replace a partition by one of another model or of another time; return a function that undoes it.

        The other model has the same rows, as if it had just started from this one. The run must not change the files.
        """
        disk, folder = process.disk, f"{path}/{part}"
        before = disk.contents(folder)
        ours = (f"{folder}/{snapshot}.prepared", f"{folder}/{snapshot}.confirmed")
        mine = [content for name, content in before.items() if name in ours]
        model, _, rows = (*mine, b"\n{}")[0].partition(b"\n")
        content = b"another\n" + rows if kind == "model" else model + b"\n{ }"
        for name in before:
            disk.remove(name)
        disk.write(f"{folder}/{snapshot or '000001-00000000'}.confirmed", content)
        foreign = disk.contents(folder)

        def restore() -> None:
            assert disk.contents(folder) == foreign, f"{folder} is not the run's, and was changed"
            for name in foreign:
                disk.remove(name)
            for name, content in before.items():
                disk.write(name, content)
                disk.sync(name)
            disk.sync(folder)

        return restore


class RealRowFolders:
    """Rows in the real disk tier, in a real folder. A process that dies closes its stores, so no write is lost."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._options = Options(background_compaction=False, io_threads=2)

    def open(self, process: Any, parts: TableParts) -> RealStore:
        rows = open_rows(layout=self._layout, pool=POOL, options=self._options, **vars(parts))
        process.stores.append(rows)
        return RealStore(rows)

    def release(self, process: Any) -> None:
        while process.stores:
            process.stores.pop().close()

    def check_outlived(self) -> None:
        """Do nothing: locks of real files end with their process."""

    def reader(self, process: Any, path: str, placement: Placement, snapshot: Snapshot) -> Rows:
        rows = TableStore.open(
            path,
            pool=POOL,
            snapshot=snapshot.id,
            model=snapshot.model,
            digests=snapshot.digests(path.rpartition("/")[2]),
            read_only=True,
            options=self._options,
        )
        process.stores.append(rows)
        return lambda: {
            key: row.tobytes() for keys, part in rows.scan() for key, row in zip(keys.tolist(), part, strict=True)
        }

    def snapshots(self, process: Any, path: str, placement: Placement) -> Iterable[tuple[set[str], set[str]]]:
        """Yield the prepared and the confirmed snapshot ids of every partition."""
        with TableStore.open(path, pool=POOL, read_only=True, options=self._options) as rows:
            for partition in rows.stores.values():
                yield set(partition.prepared()), set(partition.confirmed())

    def misplace(self, process: Any, path: str, part: int, snapshot: str | None, kind: str) -> Callable[[], None]:
        """Give a partition the manifest of another model or of another time; return a function that undoes it."""
        files = LocalFiles(f"{path}/{partition_name(part)}")
        before = recovery.read_manifest(files)
        if kind == "model":
            foreign = replace(before, model="another")
        else:
            foreign = replace(before, snapshots=tuple(replace(s, live_rows=s.live_rows + 1) for s in before.snapshots))
        files.replace(MANIFEST, foreign.text())

        def restore() -> None:
            assert files.read(MANIFEST) == foreign.text(), f"{files.url} is not the run's, and was changed"
            files.replace(MANIFEST, before.text())

        return restore
