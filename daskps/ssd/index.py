"""The index of one partition: from key to place, in memory, exact, at most 12 bytes a key.

In: whole arrays of keys and places (a place is the row's number in the partition's Zarr arrays). Out: places, or the
places that were replaced. The tables are NumPy arrays that the native side fills (index.cpp says how); a group grows
by itself in small steps, so growing never holds the index twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.backend.pool import ComputePool
from daskps.types import Bools, Keys

Places: TypeAlias = npt.NDArray[np.uint32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

ABSENT = 0xFFFFFFFF  # in answers: no such key
PLACES = 0xFFFFFFFE  # places are below this; 0xFFFFFFFE marks a removed slot, 0xFFFFFFFF a free one

GROUPS = 256
STARTS = 257
SLOT_BYTES = 10
TAIL_SLOTS = 64
LEAST_SLOTS = 16
# A group is full at 94% and then grows by 8.5%: 10 bytes / (0.94 / 1.085) = 11.55 bytes a key right after growing.
# Groups under 4 x SMALL keys (half a million in all) grow faster, for speed.
FULL = 0.94
GROWTH = 1.085
# Room made for keys that are known to come: inserting into a group at 94% takes three times as long as at 89%.
PACKED = 0.89
SMALL = 512
# Keys handled at once: bounds the scratch of one insert to 16 bytes x this, and keeps it in the cache.
BATCH_KEYS = 1 << 20
# A hand-over to the pool costs more than this many keys.
FEW_KEYS = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupImage:
    """One group as it is in memory."""

    slots: Bytes
    starts: npt.NDArray[np.uint32]  # (257,)
    keys: int
    removed: int


class KeyIndex:
    """Maps every 64-bit key to a 32-bit place. Not locked: its owner serialises changes against everything else."""

    def __init__(self, pool: ComputePool) -> None:
        self._pool = pool
        self._slots: list[Bytes] = []
        self._tables = np.zeros(GROUPS, np.uint64)  # addresses of the slots
        self._capacities = np.zeros(GROUPS, np.int64)
        self._limits = np.zeros(GROUPS, np.int64)
        self._counts = np.zeros(GROUPS, np.int64)
        self._dead = np.zeros(GROUPS, np.int64)
        self._starts = np.zeros((GROUPS, STARTS), np.uint32)
        for group in range(GROUPS):
            slots = _empty_slots(LEAST_SLOTS)
            library().ssd_index_clear(slots=slots, capacity=LEAST_SLOTS, starts=self._starts[group])
            self._slots.append(slots)
            self._install(group, slots, LEAST_SLOTS)

    def __len__(self) -> int:
        return int(self._counts.sum())

    @property
    def memory_bytes(self) -> int:
        """Bytes that the index holds."""
        return sum(slots.nbytes for slots in self._slots) + self._starts.nbytes + 5 * 8 * GROUPS

    def find(self, keys: Keys) -> Places:
        """The place of every key, ABSENT where there is none."""
        places = np.empty(len(keys), np.uint32)
        find = library().ssd_index_find

        def share(index: int, count: int) -> None:
            find(
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
        previous = np.empty(len(keys), np.uint32)
        for first in range(0, len(keys), BATCH_KEYS):
            part = slice(first, first + BATCH_KEYS)
            after = max(0, len(keys) - first - BATCH_KEYS) + coming
            self._insert_batch(keys[part], places[part], previous[part], after)
        return previous

    def remove(self, keys: Keys) -> Places:
        """Take keys out; returns the places they had, ABSENT for keys that were not there."""
        previous = np.empty(len(keys), np.uint32)
        library().ssd_index_remove(
            tables=self._tables,
            capacities=self._capacities,
            starts=self._starts,
            counts=self._counts,
            dead=self._dead,
            keys=keys,
            n=len(keys),
            previous=previous,
        )
        for group in np.flatnonzero(self._dead * 8 > self._capacities):
            self._rehash(int(group), _slots_for(int(self._counts[group])))
        return previous

    def reserve(self, keys: int) -> None:
        """Make room for `keys` keys in all, so that loading them rehashes nothing."""
        slots = _slots_for(keys // GROUPS + int(4 * (keys / GROUPS) ** 0.5))  # 4 standard deviations of a group's size
        for group in range(GROUPS):
            if slots > self._capacities[group]:
                self._rehash(group, slots)

    def image(self) -> list[GroupImage]:
        """What a snapshot saves of every group. Views: save before the next change."""
        counts, removed = self._counts.tolist(), self._dead.tolist()
        return [GroupImage(self._slots[g], self._starts[g], counts[g], removed[g]) for g in range(GROUPS)]

    @classmethod
    def from_image(cls, pool: ComputePool, image: list[GroupImage]) -> KeyIndex:
        """The index that `image` was taken from; the slots become the index's own."""
        index = cls(pool)
        for number, group in enumerate(image):
            index._starts[number] = group.starts
            index._counts[number], index._dead[number] = group.keys, group.removed
            index._install(number, group.slots, len(group.slots) // SLOT_BYTES - TAIL_SLOTS)
        return index

    def _install(self, group: int, slots: Bytes, capacity: int) -> None:
        self._slots[group] = slots
        self._tables[group] = slots.ctypes.data
        self._capacities[group] = capacity
        self._limits[group] = int(FULL * capacity)

    def _insert_batch(self, keys: Keys, places: Places, previous: Places, coming: int) -> None:
        begins, hashes, grouped = self._partition(keys, places)
        cursors, ends = begins[:-1].copy(), begins[1:].copy()
        counts_before = self._counts.copy()
        insert = library().ssd_index_insert

        def run(first: int, last: int) -> None:
            while first < last:
                full = insert(
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
                )
                if full < 0:
                    return
                done = int(cursors[full] - begins[full])
                new = int(self._counts[full] - counts_before[full])
                self._grow(full, (int(ends[full] - cursors[full]) + coming // GROUPS) * new // (done + 32))
                first = full

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

    def _grow(self, group: int, coming: int) -> None:
        count, capacity = int(self._counts[group]), int(self._capacities[group])
        factor = 2.0 if count < SMALL else 1.5 if count < 4 * SMALL else GROWTH
        wanted = _slots_for(count + coming)
        wanted = min(wanted, 16 * capacity + SMALL)  # an estimate: not too far at once
        self._rehash(group, max(int(factor * capacity), wanted, capacity + LEAST_SLOTS))

    def _rehash(self, group: int, capacity: int) -> None:
        """Move a group into new slots of at least `capacity`, leaving removed ones behind."""
        capacity = max(capacity, LEAST_SLOTS)
        while True:
            slots, starts = _empty_slots(capacity), np.empty(STARTS, np.uint32)
            moved = library().ssd_index_rehash(
                old_slots=self._slots[group],
                old_starts=self._starts[group],
                new_slots=slots,
                capacity=capacity,
                new_starts=starts,
            )
            if moved >= 0:
                break
            capacity += capacity // 32 + LEAST_SLOTS  # the run at the end was longer than the tail
        self._starts[group] = starts
        self._dead[group] = 0
        self._install(group, slots, capacity)


def _slots_for(keys: int) -> int:
    """Slots for `keys` keys with little room to spare: 11.24 bytes a key."""
    return int(keys / PACKED) + LEAST_SLOTS


def _empty_slots(capacity: int) -> Bytes:
    return np.empty((capacity + TAIL_SLOTS) * SLOT_BYTES, np.uint8)
