"""The index of one partition: from key to place, in memory, exact, at most 12 bytes a key.

In: whole arrays of keys and places (a place is the row's number in the partition's Zarr arrays). Out: places, or the
places that were replaced. The tables are NumPy arrays that the native side fills (index.cpp says how); groups grow by
themselves in small steps, a megabyte at a time, so growing never holds the index twice.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.backend.pool import ComputePool
from daskps.types import Bools, Int64s, Keys

Places: TypeAlias = npt.NDArray[np.uint32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

ABSENT = 0xFFFFFFFF  # in answers: no such key
PLACES = 0xFFFFFFFE  # places are below this

GROUPS = 256
SLOT_BYTES = 10
# Bits of the hash in a slot, and the places that fit beside them; two more mean a free slot and a removed key.
NARROW, WIDE = 56, 48
NARROW_PLACES = (1 << 24) - 2
# A group is full at 90%: a new key then moves 50 others on average, at 94% it would move 140. It grows to 1.19 slots a
# key, or to 1.124 for keys that are known to come; what was foreseen and did not come is given back from 1.197 on.
FULL = 0.90
GROWN = 1.19
PACKED = 1.124
LOOSE = 1.197
LEAST_SLOTS = 4
# Slots behind the capacity, for what the end pushes over it; more where that is not enough.
TAIL_SLOTS = 64
# From here on slots are mapped by themselves and go back to the system: the heap would keep the holes that growing
# groups leave, 9 bytes for each of 60 million keys. (A group of this size loses 1% to its last page.)
MAPPED_BYTES = 256 << 10
HUGE_BYTES = 2 << 20
# Groups that are moved at once: their old and new slots are in memory together.
MOVED_BYTES = 1 << 20
# Keys handled at once: bounds the scratch of one insert to 16 bytes x this, and keeps it in the cache.
BATCH_KEYS = 1 << 20
# A hand-over to the pool costs more than this many keys.
FEW_KEYS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IndexImage:
    """An index as it is in memory. Views: save before the next change."""

    bits: int  # of the hash in a slot
    capacities: Int64s  # (256,)
    keys: Int64s  # (256,)
    removed: Int64s  # (256,)
    starts: Places  # (256, buckets + 1)
    slots: list[Bytes]


class KeyIndex:
    """Maps every 64-bit key to a 32-bit place. Not locked: its owner serialises changes against everything else."""

    def __init__(self, pool: ComputePool) -> None:
        self._pool = pool
        self._bits = NARROW
        self._slots = [np.full(LEAST_SLOTS * SLOT_BYTES, 0xFF, np.uint8) for _ in range(GROUPS)]
        self._tables = np.array([slots.ctypes.data for slots in self._slots], np.uint64)
        self._capacities = np.full(GROUPS, LEAST_SLOTS, np.int64)
        self._limits = np.full(GROUPS, LEAST_SLOTS - 1, np.int64)
        self._counts = np.zeros(GROUPS, np.int64)
        self._dead = np.zeros(GROUPS, np.int64)
        self._starts = np.tile(np.array([0, LEAST_SLOTS], np.uint32), (GROUPS, 1))

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def memory_bytes(self) -> int:
        """Bytes that the index holds."""
        return SLOT_BYTES * int(self._starts[:, -1].sum()) + self._starts.nbytes + 5 * 8 * GROUPS

    def find(self, keys: Keys) -> Places:
        """The place of every key, ABSENT where there is none."""
        places = np.empty(len(keys), np.uint32)
        find = library().ssd_index_find

        def share(index: int, count: int) -> None:
            find(
                bits=self._bits,
                tables=self._tables,
                capacities=self._capacities,
                starts=self._starts,
                keys=keys,
                first=len(keys) * index // count,
                last=len(keys) * (index + 1) // count,
                places=places,
            )

        shares = self._shares(keys)
        self._each(lambda index: share(index, shares), shares)
        return places

    def request(self, keys: Keys) -> tuple[npt.NDArray[np.uint64], Bools]:
        """Words place << 32 | position of the keys that are there, in no order, and which keys those are."""
        _, hashes, positions = self._partition(keys, None)
        requests, found = np.empty(len(keys), np.uint64), np.empty(len(keys), np.uint8)
        shares = self._shares(keys)
        cuts = [len(keys) * share // shares for share in range(shares + 1)]
        request = library().ssd_index_request

        def run(share: int) -> int:
            return int(
                request(
                    bits=self._bits,
                    tables=self._tables,
                    capacities=self._capacities,
                    starts=self._starts,
                    hashes=hashes,
                    positions=positions,
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

    def insert(self, keys: Keys, places: Places, coming: int = 0) -> Places:
        """Put or replace keys, the last of equal ones winning; returns the places that were replaced, in no order.

        ABSENT stands for new keys. `coming` more keys follow soon: groups that must grow make room for them as well.
        """
        if self._bits == NARROW and len(places) and int(places.max()) >= NARROW_PLACES:
            self._widen()
        previous = np.empty(len(keys), np.uint32)
        for first in range(0, len(keys), BATCH_KEYS):
            part = slice(first, first + BATCH_KEYS)
            after = max(0, len(keys) - first - BATCH_KEYS) + coming
            self._insert_batch(keys[part], places[part], previous[part], after)
        if not coming:
            self._tighten()
        return previous

    def remove(self, keys: Keys) -> Places:
        """Take keys out; returns the places they had, ABSENT for keys that were not there."""
        previous = np.empty(len(keys), np.uint32)
        library().ssd_index_remove(
            bits=self._bits,
            tables=self._tables,
            capacities=self._capacities,
            starts=self._starts,
            counts=self._counts,
            dead=self._dead,
            keys=keys,
            n=len(keys),
            previous=previous,
        )
        self._tighten()
        return previous

    def reserve(self, keys: int, places: int) -> None:
        """Make room for `keys` keys with places below `places`, so that inserting them moves nothing.

        The last insert, the one after which nothing is coming, gives back what is left.
        """
        if self._bits == NARROW and places > NARROW_PLACES:
            self._widen()
        mean = keys / GROUPS
        slots = int(PACKED * (mean + 4 * mean**0.5)) + LEAST_SLOTS  # 4 standard deviations of a group's size
        small = np.flatnonzero(self._starts[:, -1] < slots)
        self._move(small, np.full(len(small), slots))

    def image(self) -> IndexImage:
        """What a snapshot saves."""
        return IndexImage(self._bits, self._capacities, self._counts, self._dead, self._starts, self._slots)

    @classmethod
    def from_image(cls, pool: ComputePool, image: IndexImage) -> KeyIndex:
        """The index that `image` was taken from; its arrays become the index's own."""
        index = cls(pool)
        index._bits, index._slots, index._starts = image.bits, image.slots, image.starts
        index._capacities, index._counts, index._dead = image.capacities, image.keys, image.removed
        index._tables[:] = [slots.ctypes.data for slots in image.slots]
        index._limits[:] = FULL * image.starts[:, -1]
        return index

    def _insert_batch(self, keys: Keys, places: Places, previous: Places, coming: int) -> None:
        begins, hashes, grouped = self._partition(keys, places)
        cursors, ends = begins[:-1].copy(), begins[1:].copy()
        counts_before = self._counts.copy()
        insert = library().ssd_index_insert

        def run(first: int, last: int) -> None:
            while insert(
                bits=self._bits,
                tables=self._tables,
                capacities=self._capacities,
                limits=self._limits,
                starts=self._starts,
                counts=self._counts,
                dead=self._dead,
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
                self._grow(full, (ends[full] - cursors[full] + coming // GROUPS) * new // (done + 32))

        pieces = 1 if len(keys) < FEW_KEYS else 4 * self._pool.cores  # small ones, because groups that grow take longer
        self._each(lambda piece: run(GROUPS * piece // pieces, GROUPS * (piece + 1) // pieces), pieces)

    def _partition(
        self, keys: Keys, values: Places | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], Places]:
        """Where each group begins, and in group order the hashes of the keys with their values (or positions)."""
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

    def _grow(self, groups: Int64s, coming: Int64s) -> None:
        """Make room in full groups, for about as many keys as are coming."""
        counts = self._counts[groups]
        foreseen = np.minimum(PACKED * (counts + coming), 16 * counts + 512)  # an estimate: not too far at once
        self._move(groups, np.maximum(GROWN * counts, foreseen).astype(np.int64) + LEAST_SLOTS)

    def _tighten(self) -> None:
        """Give back what was foreseen for keys that did not come, and what removed keys have left."""
        loose = np.flatnonzero(self._starts[:, -1] > LOOSE * self._counts + LEAST_SLOTS)
        self._move(loose, (PACKED * self._counts[loose]).astype(np.int64) + LEAST_SLOTS)

    def _widen(self) -> None:
        """Make room for 32-bit places in every slot."""
        starts = np.empty((GROUPS, (1 << (56 - WIDE)) + 1), np.uint32)
        self._move(np.arange(GROUPS), self._starts[:, -1].astype(np.int64), WIDE, starts)
        self._bits, self._starts = WIDE, starts

    def _move(self, groups: Int64s, slots: Int64s, bits: int | None = None, starts: Places | None = None) -> None:
        """Give groups new slots, about a megabyte at a time, leaving removed keys behind."""
        bits = self._bits if bits is None else bits
        starts = self._starts if starts is None else starts
        if len(groups):
            step = max(1, MOVED_BYTES // (SLOT_BYTES * int(slots.max())))
            for first in range(0, len(groups), step):
                part = slice(first, first + step)
                self._move_at_once(groups[part], slots[part], bits, starts)

    def _move_at_once(self, groups: Int64s, slots: Int64s, bits: int, all_starts: Places) -> None:
        capacities = slots - np.minimum(TAIL_SLOTS, slots // 32)
        while len(groups):
            arrays = [_uninitialised(size * SLOT_BYTES) for size in slots.tolist()]
            tables = np.array([array.ctypes.data for array in arrays], np.uint64)
            starts, ends = np.empty((len(groups), all_starts.shape[1]), np.uint32), np.empty(len(groups), np.int64)
            library().ssd_index_rehash(
                groups=groups,
                n=len(groups),
                old_bits=self._bits,
                old_tables=self._tables,
                old_capacities=self._capacities,
                old_starts=self._starts,
                bits=bits,
                tables=tables,
                capacities=capacities,
                slots=slots,
                starts=starts,
                ends=ends,
            )
            fits = ends < slots  # the next key must find a free slot, wherever it belongs
            for group, array in zip(groups[fits].tolist(), itertools.compress(arrays, fits), strict=True):
                old, self._slots[group] = self._slots[group], array
                if isinstance(old.base, np.ndarray):  # a part of what was opened: other groups keep the rest of it
                    library().ssd_give_back(memory=old, n=old.nbytes)
            done = groups[fits]
            self._tables[done], self._capacities[done] = tables[fits], capacities[fits]
            self._limits[done], self._dead[done] = FULL * slots[fits], 0
            all_starts[done] = starts[fits]
            # Keys that crowd at the end of a group: the slots behind the capacity are too few for them.
            groups, capacities = groups[~fits], capacities[~fits]
            slots = ends[~fits] + np.minimum(TAIL_SLOTS, capacities // 32) + LEAST_SLOTS


def _uninitialised(size: int) -> Bytes:
    if size < MAPPED_BYTES:
        return np.empty(size, np.uint8)
    # Small pages are all made at once, which takes half the time of faults; huge ones are few.
    populate = getattr(mmap, "MAP_POPULATE", 0) if size < HUGE_BYTES else 0
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate)
    if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
