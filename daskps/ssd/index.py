"""The index of one partition: an exact hash table in memory from key to place, at most 12 bytes per key.

A place is the number of a row along the first axis of the partition's Zarr arrays. Input: arrays of keys and places.
Output: places, or the places that were replaced.

The index consists of 256 groups, chosen by the first byte of the key's hash. A group is an array of 10-byte cells that
native code fills (index.cpp describes the layout). Groups grow one by one, at most about a megabyte at a time, so the
index is never in memory twice.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.storage.row_store import Positions
from daskps.types import Bools, Int64s, Keys

Places: TypeAlias = npt.NDArray[np.uint32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

ABSENT = 0xFFFFFFFF  # returned instead of a place: no such key
PLACES = 0xFFFFFFFE  # every place is below this

GROUPS = 256
CELL_BYTES = 10  # bytes of a cell: 80 bits, hash and place
# Bits of the hash in a cell: 56 while places fit into 24 bits, 48 (with 32-bit places) afterwards.
NARROW, WIDE = 56, 48
NARROW_PLACES = (1 << 24) - 2  # 24-bit places are below this; the two other values mark a free cell and a removed key
# A group is full when 90% of its cells are used: a new key then moves 50 others on average; at 94% it would move 140.
FULL = 0.90  # fraction of the cells
GROWN = 1.19  # cells per key after a full group has grown
PACKED = 1.124  # cells per key where the keys are known in advance: the rest of an append, or `reserve`
LOOSE = 1.197  # cells per key above which `_tighten` shrinks a group: expected keys did not come, or were removed
MIN_CELLS = 4  # cells of an empty group
# Cells behind the capacity of a group, for keys that probing pushes over its end. A group gets more if these are full.
TAIL_CELLS = 64
# From this size on, the cells of a group have a memory mapping of their own, which goes back to the system when the
# group moves. The heap would keep the holes: 9 bytes per key at 60 million keys. (At this size, 1% is lost to the last
# page.)
MAPPED_BYTES = 256 << 10
HUGE_BYTES = 2 << 20  # from this size on, a mapping asks for huge pages
# Bytes of the groups that are moved together: their old and new cells are in memory at the same time.
MOVED_BYTES = 1 << 20
# Keys inserted at once. Bounds the scratch memory of an insert to 16 bytes per key, 16 MB, and keeps it in CPU cache.
BATCH_KEYS = 1 << 20
# Keys; for fewer, waking the threads of the pool costs more than it saves.
FEW_KEYS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IndexImage:
    """The arrays of an index, as a snapshot saves them. They are views: save them before the index changes."""

    bits: int  # bits of the hash in a cell
    capacities: Int64s  # (256,)
    keys: Int64s  # (256,)
    removed: Int64s  # (256,)
    starts: Places  # (256, buckets + 1)
    cells: list[Bytes]


class KeyIndex:
    """A hash table from 64-bit keys to 32-bit places. It has no lock: the caller serialises changes and lookups."""

    def __init__(self, pool: ComputePool) -> None:
        self._pool = pool
        self._bits = NARROW
        self._cells = [np.full(MIN_CELLS * CELL_BYTES, 0xFF, np.uint8) for _ in range(GROUPS)]
        self._tables = np.array([cells.ctypes.data for cells in self._cells], np.uint64)
        self._capacities = np.full(GROUPS, MIN_CELLS, np.int64)
        self._limits = np.full(GROUPS, MIN_CELLS - 1, np.int64)
        self._counts = np.zeros(GROUPS, np.int64)
        self._dead = np.zeros(GROUPS, np.int64)
        self._starts = np.tile(np.array([0, MIN_CELLS], np.uint32), (GROUPS, 1))
        self._bind()

    def _bind(self) -> None:
        """Make the struct that native functions take. To be called again when an array is replaced."""
        self._groups = _struct(
            self._bits, self._tables, self._capacities, self._limits, self._starts, self._counts, self._dead
        )

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory that the index uses."""
        return CELL_BYTES * int(self._starts[:, -1].sum()) + self._starts.nbytes + 5 * 8 * GROUPS

    def find(self, keys: Keys) -> Places:
        """Return the place of every key, ABSENT where there is none."""
        places = np.empty(len(keys), np.uint32)
        find = library().ssd_index_find

        def share(index: int, count: int) -> None:
            find(
                index=self._groups,
                keys=keys,
                first=len(keys) * index // count,
                last=len(keys) * (index + 1) // count,
                places=places,
            )

        shares = self._shares(keys)
        self._each(lambda index: share(index, shares), shares)
        return places

    def request(self, keys: Keys, targets: Positions | None = None) -> tuple[npt.NDArray[np.uint64], Bools]:
        """Return read requests for the keys that exist, and a mask of these keys.

        A request is the word ``place << 32 | targets[i]``: the row of ``keys[i]`` goes to row ``targets[i]`` of the
        result, or to row i if `targets` is None. Requests are not sorted.
        """
        _, hashes, positions = self._partition(keys, None)
        requests, found = np.empty(len(keys), np.uint64), np.empty(len(keys), np.uint8)
        shares = self._shares(keys)
        cuts = [len(keys) * share // shares for share in range(shares + 1)]
        request = library().ssd_index_request

        def run(share: int) -> int:
            return int(
                request(
                    index=self._groups,
                    hashes=hashes,
                    positions=positions,
                    targets=targets,
                    first=cuts[share],
                    last=cuts[share + 1],
                    requests=requests,
                    found=found,
                )
            )

        counts = self._each(run, shares)
        if sum(counts) < len(keys):
            parts = [requests[first : first + count] for first, count in zip(cuts, counts, strict=False)]
            requests = np.concatenate(parts)
        return requests, found.view(np.bool_)

    def insert(self, keys: Keys, places: Places, expected_more: int = 0) -> Places:
        """Insert or replace keys; if a key occurs twice, the last place counts. Returns the places that were replaced.

        They are in no order, with ABSENT for each new key. `expected_more` is the number of keys that will follow soon:
        groups that have to grow make room for them too.
        """
        if self._bits == NARROW and len(places) and int(places.max()) >= NARROW_PLACES:
            self._widen()
        previous = np.empty(len(keys), np.uint32)
        for first in range(0, len(keys), BATCH_KEYS):
            part = slice(first, first + BATCH_KEYS)
            after = max(0, len(keys) - first - BATCH_KEYS) + expected_more
            self._insert_batch(keys[part], places[part], previous[part], after)
        if not expected_more:
            self._tighten()
        return previous

    def remove(self, keys: Keys) -> Places:
        """Remove keys; return the places that they had, ABSENT for keys that did not exist."""
        previous = np.empty(len(keys), np.uint32)
        library().ssd_index_remove(index=self._groups, keys=keys, n=len(keys), previous=previous)
        self._tighten()
        return previous

    def reserve(self, keys: int, places: int) -> None:
        """Make room for `keys` keys with places below `places`, so that inserting them moves no group.

        The last insert, which has ``expected_more=0``, releases what was not needed.
        """
        if self._bits == NARROW and places > NARROW_PLACES:
            self._widen()
        mean = keys / GROUPS
        cells = int(PACKED * (mean + 4 * mean**0.5)) + MIN_CELLS  # mean + 4 standard deviations of a group's size
        small = np.flatnonzero(self._starts[:, -1] < cells)
        self._move(small, np.full(len(small), cells))

    def image(self) -> IndexImage:
        """Return the arrays that a snapshot saves."""
        return IndexImage(self._bits, self._capacities, self._counts, self._dead, self._starts, self._cells)

    @classmethod
    def from_image(cls, pool: ComputePool, image: IndexImage) -> KeyIndex:
        """Return an index that is equal to the saved one. It uses the arrays of `image` without a copy."""
        index = cls(pool)
        index._bits, index._cells, index._starts = image.bits, image.cells, image.starts
        index._capacities, index._counts, index._dead = image.capacities, image.keys, image.removed
        index._tables[:] = [cells.ctypes.data for cells in image.cells]
        index._limits[:] = FULL * image.starts[:, -1]
        index._bind()
        return index

    def _insert_batch(self, keys: Keys, places: Places, previous: Places, expected_more: int) -> None:
        begins, hashes, grouped = self._partition(keys, places)
        cursors, ends = begins[:-1].copy(), begins[1:].copy()
        counts_before = self._counts.copy()
        insert = library().ssd_index_insert

        def run(first: int, last: int) -> None:
            while insert(
                index=self._groups,
                first=first,
                last=last,
                cursors=cursors,
                ends=ends,
                hashes=hashes,
                places=grouped,
                previous=previous,
            ):
                full = first + np.flatnonzero(cursors[first:last] < ends[first:last])
                new, done = self._counts[full] - counts_before[full], cursors[full] - begins[full]
                self._grow(full, (ends[full] - cursors[full] + expected_more // GROUPS) * new // (done + 32))

        pieces = 1 if len(keys) < FEW_KEYS else 4 * self._pool.cores  # 4 per core: groups that grow take longer
        self._each(lambda piece: run(GROUPS * piece // pieces, GROUPS * (piece + 1) // pieces), pieces)

    def _partition(
        self, keys: Keys, values: Places | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], Places]:
        """Return where each group begins, and in group order the hashes of the keys and their values.

        If `values` is None, the values are the positions of the keys.
        """
        shares = self._shares(keys)
        cuts = [len(keys) * share // shares for share in range(shares + 1)]
        counts = np.zeros((shares, GROUPS), np.int64)

        def count(share: int) -> None:
            library().ssd_index_count(keys=keys, first=cuts[share], last=cuts[share + 1], counts=counts[share])

        self._each(count, shares)
        begins = np.concatenate([[0], np.cumsum(counts.sum(axis=0))])
        cursors = begins[:-1] + np.cumsum(counts, axis=0) - counts
        hashes, grouped = np.empty(len(keys), np.uint64), np.empty(len(keys), np.uint32)

        def scatter(share: int) -> None:
            library().ssd_index_scatter(
                keys=keys,
                values=values,
                first=cuts[share],
                last=cuts[share + 1],
                cursors=cursors[share],
                hashes=hashes,
                grouped=grouped,
            )

        self._each(scatter, shares)
        return begins, hashes, grouped

    def _shares(self, keys: Keys) -> int:
        return 1 if len(keys) < FEW_KEYS else self._pool.cores

    def _each(self, call: Callable[[int], T], shares: int) -> list[T]:
        return [call(0)] if shares == 1 else self._pool.map(call, range(shares))

    def _grow(self, groups: Int64s, expected_more: Int64s) -> None:
        """Enlarge full groups; `expected_more` is an estimate of the keys that each of them still gets."""
        counts = self._counts[groups]
        foreseen = np.minimum(
            PACKED * (counts + expected_more), 16 * counts + 512
        )  # limited: `expected_more` is only an estimate
        self._move(groups, np.maximum(GROWN * counts, foreseen).astype(np.int64) + MIN_CELLS)

    def _tighten(self) -> None:
        """Release cells that were reserved for keys that did not come, and cells of removed keys."""
        loose = np.flatnonzero(self._starts[:, -1] > LOOSE * self._counts + MIN_CELLS)
        self._move(loose, (PACKED * self._counts[loose]).astype(np.int64) + MIN_CELLS)

    def _widen(self) -> None:
        """Change all cells from 24-bit to 32-bit places."""
        starts = np.empty((GROUPS, (1 << (56 - WIDE)) + 1), np.uint32)
        self._move(np.arange(GROUPS), self._starts[:, -1].astype(np.int64), WIDE, starts)
        self._bits, self._starts = WIDE, starts
        self._bind()

    def _move(self, groups: Int64s, cells: Int64s, bits: int | None = None, starts: Places | None = None) -> None:
        """Copy groups to new arrays of `cells` cells, about a megabyte at a time, without the removed keys."""
        bits = self._bits if bits is None else bits
        starts = self._starts if starts is None else starts
        if len(groups):
            step = max(1, MOVED_BYTES // (CELL_BYTES * int(cells.max())))
            for first in range(0, len(groups), step):
                part = slice(first, first + step)
                self._move_at_once(groups[part], cells[part], bits, starts)

    def _move_at_once(self, groups: Int64s, cells: Int64s, bits: int, all_starts: Places) -> None:
        capacities = cells - np.minimum(TAIL_CELLS, cells // 32)
        while len(groups):
            arrays = [_uninitialised(size * CELL_BYTES) for size in cells.tolist()]
            tables = np.array([array.ctypes.data for array in arrays], np.uint64)
            starts, ends = np.empty((len(groups), all_starts.shape[1]), np.uint32), np.empty(len(groups), np.int64)
            moved = _struct(bits, tables, capacities, None, starts, None, None)
            library().ssd_index_rehash(
                old=self._groups, groups=groups, n=len(groups), moved=moved, cells=cells, ends=ends
            )
            fits = ends < cells  # a cell stays free at the end, so that the next key fits wherever its home is
            for group, array in zip(groups[fits].tolist(), itertools.compress(arrays, fits), strict=True):
                old, self._cells[group] = self._cells[group], array
                if isinstance(old.base, np.ndarray):  # a view of what `read_index` read; others use the rest
                    library().ssd_release_pages(memory=old, n=old.nbytes)
            done = groups[fits]
            self._tables[done], self._capacities[done] = tables[fits], capacities[fits]
            self._limits[done], self._dead[done] = FULL * cells[fits], 0
            all_starts[done] = starts[fits]
            # Too many keys at the end of these groups for the cells behind the capacity: try again with more cells.
            groups, capacities = groups[~fits], capacities[~fits]
            cells = ends[~fits] + np.minimum(TAIL_CELLS, capacities // 32) + MIN_CELLS


def _struct(bits: int, *arrays: npt.NDArray[Any] | None) -> npt.NDArray[np.uint64]:
    """Return the struct IndexGroups of index.cpp. It has addresses: the caller keeps the arrays."""
    return np.array([bits, *(0 if array is None else array.ctypes.data for array in arrays)], np.uint64)


def _uninitialised(size: int) -> Bytes:
    if size < MAPPED_BYTES:
        return np.empty(size, np.uint8)
    # Create all small pages at once: this takes half the time of page faults. Huge pages are few.
    populate = getattr(mmap, "MAP_POPULATE", 0) if size < HUGE_BYTES else 0
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate)
    if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
