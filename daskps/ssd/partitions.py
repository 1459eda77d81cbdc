"""`Partitions`: several stores of one table that answer as one. A node owns some of a table's virtual partitions.

In and out: the same calls as `Store`. Keys go to their partition's store; the stores work side by side, sharing the
compute pool and one set of I/O threads. Another number of nodes takes over folders; no row is rewritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.errors import ArgumentError, SnapshotError, StoreError
from daskps.ssd import recovery
from daskps.ssd.format import check_sealed, group_text
from daskps.ssd.manifest import State
from daskps.ssd.options import Options
from daskps.ssd.placement import Placement
from daskps.ssd.statistics import Statistics
from daskps.ssd.store import Store
from daskps.ssd.where import child, files_at
from daskps.types import Bools, Floats, Int64s, Keys, RowLayout

FORMAT = "daskps-ssd-partitions"
T = TypeVar("T")


def make_table(path: str | Path, placement: Placement, *, anew: bool = False) -> None:
    """The folder of a table, without partitions. Before several nodes create theirs in it, one makes it.

    What is there already must be as it would be made, unless nothing below it counts any more (`anew`).
    """
    root = files_at(path)
    text = group_text({"format": FORMAT, "partitions": placement.partitions, "hash": placement.hash})
    root.make([])
    if root.size("zarr.json") < 0 or (anew and root.read("zarr.json") != text):
        root.publish("zarr.json", text)
    elif root.read("zarr.json") != text:
        raise StoreError(f"{root.url}: another table is there already; choose another path")
    root.close()


class Partitions:
    """The owned partitions of one table, by number."""

    def __init__(self, placement: Placement, pool: ComputePool, options: Options) -> None:
        self.placement = placement
        self.stores: dict[int, Store] = {}
        self._pool = pool
        self._io = ThreadPoolExecutor(options.io_threads, "daskps-ssd")
        self._waiters = ThreadPoolExecutor(2 * pool.cores, "daskps-partition")  # they only wait for stores

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
        file_rows: int | None = None,
        options: Options | None = None,
    ) -> Partitions:
        """New, empty partitions below `path`, a folder or an fsspec URL; `owned` are this node's, by default all."""
        placement = Placement(partitions, hash)
        make_table(path, placement)
        self = cls(placement, pool, options or Options())
        share = self._share(options, owned)
        self._each_new(
            owned,
            lambda number: Store.create(
                child(path, partition_name(number)), layout, pool=pool, file_rows=file_rows, options=share, io=self._io
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
        read_only: bool = False,
        rebuild_index: bool = False,
        options: Options | None = None,
    ) -> Partitions:
        """Partitions at `snapshot`; by default at the newest one that all have and at least one has confirmed.

        (`commit` confirms only after all have prepared, so such a snapshot is whole; a writer confirms it everywhere.)
        """
        root = files_at(path)
        if root.size("zarr.json") < 0:
            raise StoreError(f"{root.url}: no partitions there; check the path, or make them with Partitions.create")
        attributes = check_sealed(f"{root.url}/zarr.json", root.read("zarr.json"))["attributes"]
        root.close()
        if attributes.get("format") != FORMAT:
            raise StoreError(f"{root.url}: not a table of partitions; open a single partition with Store.open")
        self = cls(Placement(attributes["partitions"], attributes["hash"]), pool, options or Options())
        share = self._share(options, owned)

        def take(number: int) -> Store:
            return Store.open(
                child(path, partition_name(number)),
                pool=pool,
                snapshot=chosen,
                read_only=read_only,
                rebuild_index=rebuild_index,
                options=share,
                io=self._io,
            )

        try:
            chosen = snapshot if snapshot is not None else self._whole(path, owned)
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

    def __enter__(self) -> Partitions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- rows

    def append(self, keys: Keys, rows: Floats) -> None:
        """Put rows; see Store.append."""
        self._any_store()._check_rows(keys, rows)
        order, begins = self._split(keys)
        keys, rows = self._take(keys, order), self._take(rows, order)
        self._each(lambda number, store: store.append(keys[_part(begins, number)], rows[_part(begins, number)]))

    def load(self, keys: Keys, out: Floats | None = None) -> tuple[Floats, Bools]:
        """Rows of the keys, and which were found; see Store.load."""
        store = self._any_store()
        if out is None:
            out = np.zeros((len(keys), store.shape.layout.width), np.float32)
        store._check_rows(keys, out)
        order, begins = self._split(keys)
        found = np.zeros(len(keys), np.bool_)
        grouped = self._take(keys, order)

        def load(number: int, store: Store) -> None:
            part = _part(begins, number)
            rows, there = store.load(grouped[part])
            found[order[part]] = there
            out[order[part] if there.all() else order[part][there]] = rows if there.all() else rows[there]

        self._each(load)
        return out, found

    def reading_order(self, keys: Keys) -> Int64s:
        """Positions of the keys, partition by partition: loads that go by it share few files."""
        return self._split(keys)[0]

    def delete(self, keys: Keys) -> Bools:
        """Take keys out; tells which were there."""
        self._any_store()._check_keys(keys)
        order, begins = self._split(keys)
        grouped, found = self._take(keys, order), np.zeros(len(keys), np.bool_)

        def delete(number: int, store: Store) -> None:
            found[order[_part(begins, number)]] = store.delete(grouped[_part(begins, number)])

        self._each(delete)
        return found

    def scan(self, snapshot: str | None = None) -> Iterator[tuple[Keys, Floats]]:
        """Every live key and row, in no order of keys, a parameter file at a time."""
        for store in self.stores.values():
            yield from store.scan(snapshot)

    def __len__(self) -> int:
        return sum(map(len, self.stores.values()))

    # ---- snapshots

    def snapshots(self) -> dict[str, State]:
        """The snapshots that all partitions have; confirmed where one of them says so."""
        return _common([store.snapshots() for store in self.stores.values()])

    def prepare(self, snapshot_id: str, *, save_index: bool | None = None) -> None:
        """Prepare in all partitions; if one cannot, none has."""
        try:
            self._each(lambda _, store: store.prepare(snapshot_id, save_index=save_index))
        except BaseException:
            for store in self.stores.values():
                with contextlib.suppress(SnapshotError, StoreError):
                    store.discard(snapshot_id)
            raise

    def commit(self, snapshot_id: str, *, save_index: bool | None = None) -> None:
        """Prepare everywhere, then confirm everywhere; the first confirmation decides."""
        self.prepare(snapshot_id, save_index=save_index)
        self.confirm(snapshot_id)

    def confirm(self, snapshot_id: str) -> None:
        """Confirm in all partitions."""
        self._each(lambda _, store: store.confirm(snapshot_id))

    def discard(self, snapshot_id: str) -> None:
        """Give up a prepared snapshot in all partitions."""
        self._each(lambda _, store: store.discard(snapshot_id))

    def drop(self, snapshot_id: str) -> None:
        """Remove a confirmed snapshot from all partitions."""
        self._each(lambda _, store: store.drop(snapshot_id))

    def settle(self, snapshot_id: str | None) -> None:
        """Confirm `snapshot_id`, discard everything else that is only prepared."""
        self._each(lambda _, store: store.settle(snapshot_id))

    def verify(self) -> int:
        """Check every byte of every snapshot; returns the bytes checked."""
        return sum(self._each(lambda _, store: store.verify()))

    def compact(self, above: float = 0.5) -> int:
        """Rewrite files whose stale part is over `above`; returns how many."""
        return sum(self._each(lambda _, store: store.compact(above)))

    # ---- figures

    @property
    def memory_bytes(self) -> int:
        """Bytes of all indexes, live bits, checksums and staging."""
        return sum(store.memory_bytes for store in self.stores.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of one parameter file of each partition; it was fixed when the table was made."""
        return sum(store.shape.keys_bytes + store.shape.rows_bytes for store in self.stores.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of staging, which is made when it is needed."""
        return sum(store.buffer_bytes for store in self.stores.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk of all owned partitions."""
        return sum(store.disk_bytes for store in self.stores.values())

    def stats(self) -> Statistics:
        """The sum over the owned partitions."""
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
            np.take(array, order[part], axis=0, out=out[part], mode="clip")  # "raise" would buffer; order is in range

        self._pool.shares(share)
        return out

    def _each(self, call: Callable[[int, Store], T]) -> list[T]:
        """`call` for every store, side by side; all are awaited before the first error is raised."""
        futures = [self._waiters.submit(call, number, store) for number, store in self.stores.items()]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

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
        """The options of one store: an equal share of the disk budget."""
        options = options or Options()
        if options.disk_bytes is None:
            return options
        return replace(options, disk_bytes=options.disk_bytes // len(self._owned(owned)))

    def _whole(self, path: str | Path, owned: Iterable[int] | None) -> str | None:
        """The newest snapshot that all owned partitions have and that was decided on."""
        lists = [_read_snapshots(path, number) for number in self._owned(owned)]
        decided = [name for name, state in _common(lists).items() if state == "confirmed"]
        return decided[-1] if decided else None

    def _any_store(self) -> Store:
        return next(iter(self.stores.values()))


def partition_name(number: int) -> str:
    return f"partition-{number:05d}"


def _part(begins: Int64s, number: int) -> slice:
    return slice(int(begins[number]), int(begins[number + 1]))


def _read_snapshots(path: str | Path, number: int) -> list[Any]:
    files = files_at(child(path, partition_name(number)))
    try:
        return list(recovery.read_manifest(files).snapshots)
    finally:
        files.close()


def _common(lists: list[list[Any]]) -> dict[str, State]:
    """Snapshots in every list, oldest first by the first list."""
    states: list[dict[str, State]] = [{snapshot.id: snapshot.state for snapshot in part} for part in lists]
    return {
        name: "confirmed" if any(part[name] == "confirmed" for part in states) else "prepared"
        for name in states[0]
        if all(name in part for part in states)
    }
