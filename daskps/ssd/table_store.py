"""The partitions of a table that one node owns (class `TableStore`), used like one store.

Input and output: as in `Store`. Keys go to the store of their partition. The stores work in parallel and share the
compute pool and the I/O threads. With another number of nodes, folders get other owners; no row is rewritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np

from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, SnapshotError, StoreError
from daskps.ssd import recovery
from daskps.ssd.format import ZARR_JSON, group_text
from daskps.ssd.manifest import SnapshotState
from daskps.ssd.options import Options, Statistics
from daskps.ssd.store import Store
from daskps.storage.files import files_at
from daskps.storage.partition import Placement
from daskps.storage.row_store import Positions
from daskps.types import Bools, Floats, Int64s, Keys, RowLayout

FORMAT = "daskps-ssd-partitions"
T = TypeVar("T")


def make_table(path: str | Path, placement: Placement, *, anew: bool = False) -> None:
    """Create the folder of a table, without partitions. One node does this before several nodes create theirs in it.

    An existing folder must be of an equal table, unless nothing in it is needed any more (`anew`).
    """
    root = files_at(path)
    text = group_text({"format": FORMAT, "partitions": placement.partitions, "hash": placement.hash})
    root.make()
    if root.size("zarr.json") < 0 or (anew and root.read("zarr.json") != text):
        root.replace("zarr.json", text)
    elif root.read("zarr.json") != text:
        raise StoreError(f"{root.url}: another table is there already; choose another path")
    root.close()


class TableStore:
    """The partitions of one table that this node owns; `stores` has them by number."""

    def __init__(self, placement: Placement, pool: ComputePool, options: Options) -> None:
        self.placement = placement
        self.stores: dict[int, Store] = {}
        self._pool = pool
        self._io = ThreadPoolExecutor(options.io_threads, "daskps-ssd")
        self._waiters = ThreadPoolExecutor(2 * pool.cores, "daskps-partition")  # they only wait

    @classmethod
    def create(
        cls,
        path: str | Path,
        layout: RowLayout,
        *,
        pool: ComputePool,
        partitions: int = 8,
        hash: Literal["mixed", "modulo"] = "mixed",
        owned: Iterable[int] | None = None,
        model: str = "",
        file_rows: int | None = None,
        options: Options | None = None,
    ) -> TableStore:
        """Create empty partitions below `path`, a folder or an fsspec URL. `owned` are this node's, by default all."""
        placement = Placement(partitions, hash)
        make_table(path, placement)
        self = cls(placement, pool, options or Options())
        share = self._share(options, owned)
        self._each_new(
            owned,
            lambda number: Store.create(
                _child(path, partition_name(number)),
                layout,
                pool=pool,
                model=model,
                file_rows=file_rows,
                options=share,
                io=self._io,
            ),
        )
        return self

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        pool: ComputePool,
        owned: Iterable[int] | None = None,
        snapshot: str | None = None,
        model: str | None = None,
        digests: Mapping[str, str] | None = None,
        read_only: bool = False,
        rebuild_index: bool = False,
        options: Options | None = None,
    ) -> TableStore:
        """Open partitions at `snapshot`; by default at the newest one that all have and at least one has confirmed.

        Such a snapshot is complete, because `commit` confirms only after all have prepared; a writer confirms it in all
        partitions. `digests` are the digests of the snapshot by name of the partition, where they are known.
        """
        root = files_at(path)
        if root.size("zarr.json") < 0:
            raise StoreError(f"{root.url}: no partitions there; check the path, or make them with Partitions.create")
        attributes = ZARR_JSON.read(root.read("zarr.json"), f"{root.url}/zarr.json")["attributes"]
        root.close()
        if attributes.get("format") != FORMAT:
            raise StoreError(f"{root.url}: not a table of partitions; open a single partition with Store.open")
        self = cls(Placement(attributes["partitions"], attributes["hash"]), pool, options or Options())
        share = self._share(options, owned)

        def take(number: int) -> Store:
            return Store.open(
                _child(path, partition_name(number)),
                pool=pool,
                snapshot=chosen,
                model=model,
                digest=(digests or {}).get(partition_name(number), ""),
                read_only=read_only,
                rebuild_index=rebuild_index,
                options=share,
                io=self._io,
            )

        try:
            chosen = snapshot if snapshot is not None else self._newest_complete(path, owned)
        except BaseException:
            self.close()
            raise
        self._each_new(owned, take)
        if chosen is not None and not read_only and snapshot is None:
            self.confirm(chosen)
        return self

    def close(self) -> None:
        """Close all stores."""
        self._each(lambda _, store: store.close())
        self._waiters.shutdown()
        self._io.shutdown()

    def __enter__(self) -> TableStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- rows

    def append(self, keys: Keys, rows: Floats) -> None:
        """Insert or replace rows; see Store.append."""
        self._any_store().check_rows(keys, rows)
        order, begins = self._split(keys)
        grouped = self._take(keys, order)
        # Each store copies its rows straight into the buffer of its segment.
        self._each(
            lambda number, store: store.append_from(grouped[_part(begins, number)], rows, order[_part(begins, number)])
        )

    def start_load(self, keys: Keys, positions: Positions, out: Floats) -> TableLoading:
        """Begin to copy the row of ``keys[i]`` to ``out[positions[i]]``; see RowStore.start_load."""
        self._check_load(keys, positions, out)
        order, begins = self._split(keys)
        found = np.zeros(len(keys), np.bool_)
        grouped, targets = self._take(keys, order), self._take(positions, order)

        def load(number: int, store: Store) -> None:
            part = _part(begins, number)
            found[order[part]] = store.load_into(grouped[part], targets[part], out)

        return TableLoading(self._start(load), found)

    def load(self, keys: Keys, out: Floats | None = None) -> tuple[Floats, Bools]:
        """Return the rows of the keys, and a mask of the keys that were found; see Store.load."""
        if out is None:
            out = np.zeros((len(keys), self._any_store().shape.layout.width), np.float32)
        return out, self.start_load(keys, np.arange(len(keys), dtype=np.uint32), out).wait()

    def reading_order(self, keys: Keys) -> Int64s:
        """Return the positions of the keys sorted by partition, so that pieces of a load read different files."""
        return self._split(keys)[0]

    def delete(self, keys: Keys) -> Bools:
        """Delete keys; return a mask of those that existed."""
        self._any_store().check_keys(keys)
        order, begins = self._split(keys)
        grouped, found = self._take(keys, order), np.zeros(len(keys), np.bool_)

        def delete(number: int, store: Store) -> None:
            found[order[_part(begins, number)]] = store.delete(grouped[_part(begins, number)])

        self._each(delete)
        return found

    def scan(self, snapshot: str | None = None) -> Iterator[tuple[Keys, Floats]]:
        """Yield all live keys and rows, one segment at a time; keys are not sorted."""
        for store in self.stores.values():
            yield from store.scan(snapshot)

    def __len__(self) -> int:
        return sum(map(len, self.stores.values()))

    # ---- snapshots

    def prepare(self, snapshot_id: str, *, save_index: bool | None = None) -> None:
        """Prepare a snapshot in all partitions. If one fails, it is discarded in the others."""
        try:
            self._each(lambda _, store: store.prepare(snapshot_id, save_index=save_index))
        except BaseException:
            for store in self.stores.values():
                with contextlib.suppress(SnapshotError, StoreError):
                    store.discard(snapshot_id)
            raise

    def commit(self, snapshot_id: str, *, save_index: bool | None = None) -> None:
        """Prepare a snapshot in all partitions, then confirm it in all. With the first confirmation it is committed."""
        self.prepare(snapshot_id, save_index=save_index)
        self.confirm(snapshot_id)

    def confirm(self, snapshot_id: str) -> None:
        """Confirm a prepared snapshot in all partitions."""
        self._each(lambda _, store: store.confirm(snapshot_id))

    def digests(self, snapshot_id: str) -> dict[str, str]:
        """Return the digest of each partition's part of a snapshot, by name of the partition."""
        return {partition_name(number): store.digest(snapshot_id) for number, store in self.stores.items()}

    def verify(self, published: Mapping[str, Mapping[str, str]] | None = None) -> int:
        """Check every byte of every snapshot; return the bytes checked.

        With `published`, only these snapshots are checked: by id, the digests by name of the partition.
        """

        def check(number: int, store: Store) -> int:
            if published is None:
                return store.verify()
            name = partition_name(number)
            return store.verify({snapshot: digests.get(name, "") for snapshot, digests in published.items()})

        return sum(self._each(check))

    # ---- figures

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory of all indexes, live bits, checksums and write buffers."""
        return sum(store.memory_bytes for store in self.stores.values())

    @property
    def file_bytes(self) -> int:
        """Return the bytes of one full segment of each partition, summed. The size is fixed when a table is created."""
        return sum(store.shape.keys_bytes + store.shape.rows_bytes for store in self.stores.values())

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of memory of write buffers. They are allocated when they are needed."""
        return sum(store.buffer_bytes for store in self.stores.values())

    @property
    def disk_bytes(self) -> int:
        """Return the bytes on disk of all owned partitions."""
        return sum(store.disk_bytes for store in self.stores.values())

    def stats(self) -> Statistics:
        """Return the statistics summed over the owned partitions."""
        return reduce(add, (store.stats() for store in self.stores.values()))

    # ---- inside

    def _split(self, keys: Keys) -> tuple[Int64s, Int64s]:
        order, begins = self.placement.split(keys, self._pool)
        foreign = [number for number in np.flatnonzero(np.diff(begins)).tolist() if number not in self.stores]
        if foreign:
            key = int(keys[order[begins[foreign[0]]]])
            raise ArgumentError(
                f"key {key} belongs to partition {foreign[0]} of {self.placement.partitions}, but only "
                f"{list(self.stores)} are owned here; send it to its owner"
            )
        return order, begins

    def _take(self, array: Any, order: Int64s) -> Any:
        out = np.empty_like(array)

        def share(index: int, count: int) -> None:
            part = slice(len(order) * index // count, len(order) * (index + 1) // count)
            np.take(array, order[part], axis=0, out=out[part], mode="clip")  # mode "raise" would copy; all are in range

        self._pool.shares(share)
        return out

    def _each(self, call: Callable[[int, Store], T]) -> list[T]:
        """Run `call` for all stores in parallel, wait for all, then raise the first error if there is one."""
        return _wait(self._start(call))

    def _start(self, call: Callable[[int, Store], T]) -> list[Future[T]]:
        return [self._waiters.submit(call, number, store) for number, store in self.stores.items()]

    def _check_load(self, keys: Keys, positions: Positions, out: Floats) -> None:
        store = self._any_store()
        store.check_keys(keys)
        store.check_rows(np.empty(len(out), np.uint64), out)
        if positions.dtype != np.uint32 or positions.shape != keys.shape:
            raise ArgumentError(f"positions must be {keys.shape} of uint32, got {positions.shape} of {positions.dtype}")
        if len(positions) and int(positions.max()) >= len(out):
            raise ArgumentError(f"position {positions.max()} is outside of `out`, which has {len(out)} rows")

    def _each_new(self, owned: Iterable[int] | None, make: Callable[[int], Store]) -> None:
        futures = {number: self._waiters.submit(make, number) for number in self._owned(owned)}
        self.stores = {number: future.result() for number, future in futures.items() if not future.exception()}
        for future in futures.values():
            if future.exception():
                self.close()
                future.result()

    def _owned(self, owned: Iterable[int] | None) -> list[int]:
        numbers = sorted(range(self.placement.partitions) if owned is None else owned)
        if not numbers or numbers[0] < 0 or numbers[-1] >= self.placement.partitions:
            raise ArgumentError(f"owned partitions must be from 0 to {self.placement.partitions - 1}, got {numbers}")
        return numbers

    def _share(self, options: Options | None, owned: Iterable[int] | None) -> Options:
        """Return the options of one store, with an equal share of the disk budget."""
        options = options or Options()
        if options.disk_bytes is None:
            return options
        return replace(options, disk_bytes=options.disk_bytes // len(self._owned(owned)))

    def _newest_complete(self, path: str | Path, owned: Iterable[int] | None) -> str | None:
        """Return the newest snapshot that all owned partitions have and at least one has confirmed; None if none."""
        lists = [_read_snapshots(path, number) for number in self._owned(owned)]
        decided = [name for name, state in _common(lists).items() if state == "confirmed"]
        return decided[-1] if decided else None

    def _any_store(self) -> Store:
        return next(iter(self.stores.values()))


class TableLoading:
    """A load of rows from all partitions that has begun."""

    def __init__(self, futures: list[Future[None]], found: Bools) -> None:
        self._futures, self._found = futures, found

    def wait(self) -> Bools:
        """Wait until all rows are in `out`; return a mask of the keys that were found."""
        _wait(self._futures)
        return self._found


def _wait(futures: list[Future[T]]) -> list[T]:
    """Wait for all futures; return their results, or raise the first error."""
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


def partition_name(number: int) -> str:
    return f"partition-{number:05d}"


def _child(path: str | Path, name: str) -> str:
    """Return the path of `name` below a folder or URL."""
    return f"{str(path).rstrip('/')}/{name}"


def _part(begins: Int64s, number: int) -> slice:
    return slice(int(begins[number]), int(begins[number + 1]))


def _read_snapshots(path: str | Path, number: int) -> list[Any]:
    files = files_at(_child(path, partition_name(number)))
    try:
        return list(recovery.read_manifest(files).snapshots)
    finally:
        files.close()


def _common(lists: list[list[Any]]) -> dict[str, SnapshotState]:
    """Return the snapshots that are in every list, in the order of the first list, oldest first."""
    states: list[dict[str, SnapshotState]] = [{snapshot.id: snapshot.state for snapshot in part} for part in lists]
    return {
        name: "confirmed" if any(part[name] == "confirmed" for part in states) else "prepared"
        for name in states[0]
        if all(name in part for part in states)
    }
