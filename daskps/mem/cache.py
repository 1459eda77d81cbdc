"""A bounded cache of rows in memory: found by key, visited rows in LRU, LRU's victims in LFU, LFU's victims leave.

In: distinct keys as whole arrays, the batch that asks. Out: slots, rows, victims. The work is in cache.cpp; here are
its arrays and the order of its calls. Nothing here knows the disk, nodes, or what a batch is beyond a number.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.backend.pool import ComputePool
from daskps.mem.budget import Budget
from daskps.mem.delivery import Positions
from daskps.types import Floats, Int64s, Keys

Slots: TypeAlias = npt.NDArray[np.uint32]

NONE = np.uint32(0xFFFFFFFF)  # in place of a slot: not cached
BATCHES_IN_FLIGHT = 16  # an entry has one bit for each
ENTRY = np.dtype([("key", "<u8"), ("place", "<u4"), ("holds", "<u2"), ("visits", "u1"), ("flags", "u1")])
DIRTY, PENDING = 2, 4

SMALL = 8192  # items; below, waking the pool costs more than it saves
VISIT_ITEMS = 1 << 20  # keys visited between two trims of the recent list
SAMPLE = 16  # LFU looks at this many rows for each one it evicts
LEAST_SAMPLE = 1 << 16
EVICT_SHIFT = 6  # at least 1/64 of the cache leaves at once, so that write-backs are long
AGE_VISITS = 10  # visits are halved after this many visits per cached row, as in TinyLFU


@dataclass(frozen=True, slots=True)
class Visit:
    """What a batch found: slots of its keys (NONE where missing) and which rows earlier batches are out with."""

    slots: Slots
    missing: Positions
    late: Positions
    distances: npt.NDArray[np.uint8]  # of each late row: this batch minus the one that is out with it
    found: int


def anonymous(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeroed private memory that the system hands out page by page when touched, in huge pages if it can."""
    count = int(np.prod(shape))
    size = max(1, count * np.dtype(dtype).itemsize)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)


class Cache:
    """The rows of one partition that are in memory."""

    def __init__(self, budget: Budget, pool: ComputePool) -> None:
        self.cache_rows = budget.cache_rows
        self.recent_limit = budget.recent_rows
        self.width = budget.row_bytes // 4
        self.pool = pool
        self.rows: Floats = anonymous((budget.cache_rows, self.width), np.float32)
        self.entries = anonymous((budget.cache_rows,), ENTRY)
        self.buckets: Keys = anonymous((budget.bucket_count,), np.uint64)
        self.ring: Slots = anonymous((budget.ring_cells,), np.uint32)
        self.cached_rows = 0
        self.pinned_rows = 0
        self.recent_rows = 0
        self.flushing = False  # rows pushed after the snapshot being written must stay
        self.demoted = 0  # rows moved from LRU to LFU, ever
        self._heads: Int64s = np.zeros(2, np.int64)  # free list (slot + 1), first slot never used
        self._tail = 0  # of the ring; `_cells` are in use from there on
        self._cells = 0
        self._hand = 0
        self._visits = 0
        self._index = {"buckets": self.buckets, "bucket_count": len(self.buckets), "entries": self.entries}

    def _shares(self, n: int, call: Callable[[int, int], Any]) -> list[Any]:
        """``call(first, last)`` over [0, n) in shares of the pool, or at once if there is little to do."""
        if n < SMALL or self.pool.cores == 1:
            return [call(0, n)]
        return self.pool.shares(lambda index, count: call(n * index // count, n * (index + 1) // count))

    def find(self, keys: Keys, out: Floats | None = None) -> Slots:
        """Slots of the keys, NONE where missing; rows of those found go to `out`. Changes nothing."""
        slots = np.empty(len(keys), np.uint32)
        self._shares(
            len(keys),
            lambda first, last: library().mem_find(
                **self._index, rows=self.rows, width=self.width, keys=keys, first=first, last=last, slots=slots, out=out
            ),
        )
        return slots

    def count_pinned(self, keys: Keys) -> int:
        """How many of the keys are pinned now."""
        count = library().mem_count_pinned
        return sum(self._shares(len(keys), lambda first, last: count(**self._index, keys=keys, first=first, last=last)))

    def visit(self, keys: Keys, batch: int, out: Floats | None) -> Visit | None:
        """Pin what is cached for `batch` and copy its free rows to `out`; None, and no pin, if a key repeats."""
        slots = np.empty(len(keys), np.uint32)
        missing, late, distances = [], [], []
        counts = np.zeros(5, np.int64)
        for start in range(0, len(keys), step := min(VISIT_ITEMS, len(self.ring) // 2)):
            stop = min(start + step, len(keys))
            lateness = self._visit_run(keys, start, stop, batch, slots, out, counts)
            missing.append((start + np.flatnonzero(slots[start:stop] == NONE)).astype(np.uint32))
            late.append((start + np.flatnonzero(lateness)).astype(np.uint32))
            distances.append(lateness[lateness != 0])
            self._trim()
        if counts[4]:
            self.unpin(slots, batch)
            return None
        empty = np.empty(0, np.uint32)
        return Visit(
            slots,
            np.concatenate([empty, *missing]),
            np.concatenate([empty, *late]),
            np.concatenate([empty.astype(np.uint8), *distances]),
            int(counts[0]),
        )

    def _visit_run(
        self, keys: Keys, start: int, stop: int, batch: int, slots: Slots, out: Floats | None, counts: Int64s
    ) -> npt.NDArray[np.uint8]:
        head = self._advance(stop - start)
        lateness = np.empty(stop - start, np.uint8)

        def share(first: int, last: int) -> Int64s:
            mine = np.zeros(5, np.int64)
            library().mem_visit(
                **self._index,
                rows=self.rows,
                width=self.width,
                keys=keys,
                first=start + first,
                last=start + last,
                batch=batch % BATCHES_IN_FLIGHT,
                ring=self.ring,
                ring_cells=len(self.ring),
                ring_head=head,
                base=start,
                slots=slots,
                late=lateness,
                out=out,
                counts=mine,
            )
            return mine

        run = sum(self._shares(stop - start, share))
        self.pinned_rows += int(run[2])
        self.recent_rows += int(run[3])
        counts += run
        return lateness

    def _advance(self, cells: int) -> int:
        """Give out the ring's next cells; its oldest rows go to LFU where cells are short."""
        short = self._cells + cells - len(self.ring)
        if short > 0:
            self._demote(short, short)
        head = (self._tail + self._cells) % len(self.ring)
        self._cells += cells
        return head

    def _demote(self, cells: int, rows: int) -> int:
        """Pass up to `cells` cells at the ring's tail until `rows` rows have moved to LFU; returns how many did."""

        def share(first: int, last: int) -> Int64s:
            counts = np.zeros(2, np.int64)
            library().mem_demote(
                entries=self.entries,
                ring=self.ring,
                ring_cells=len(self.ring),
                tail=self._tail,
                first=first,
                last=last,
                wanted=rows,
                counts=counts,
            )
            return counts

        # Shares cannot stop each other, so they get no more cells than there are rows to move.
        counts = share(0, cells) if rows < SMALL else sum(self._shares(min(cells, rows), share))
        moved, passed = int(counts[0]), int(counts[1])
        self._tail = (self._tail + passed) % len(self.ring)
        self._cells -= passed
        self.recent_rows -= moved
        self.demoted += moved
        return moved

    def _trim(self) -> None:
        while self.recent_rows > self.recent_limit:
            self._demote(self._cells, self.recent_rows - self.recent_limit)

    def unpin(self, slots: Slots, batch: int) -> None:
        """`batch` gives the rows back unchanged."""
        self.pinned_rows -= library().mem_unpin(
            entries=self.entries, slots=slots, n=len(slots), batch=batch % BATCHES_IN_FLIGHT
        )

    def insert(self, keys: Keys, positions: Positions, slots: Slots, batch: int) -> int:
        """Slots for keys[positions], pinned by `batch`; there must be room. Returns how many: fewer if one repeats."""
        done = 0
        for start in range(0, len(positions), step := min(VISIT_ITEMS, len(self.ring) // 2)):
            run = positions[start : start + step]
            inserted = library().mem_insert(
                **self._index,
                keys=keys,
                positions=run,
                n=len(run),
                batch=batch % BATCHES_IN_FLIGHT,
                ring=self.ring,
                ring_cells=len(self.ring),
                ring_head=self._advance(len(run)),
                slots=slots,
                heads=self._heads,
            )
            self.ring_forget(len(run) - inserted)
            done += inserted
            self.cached_rows += inserted
            self.pinned_rows += inserted
            self.recent_rows += inserted
            self._trim()
            if inserted < len(run):
                break
        return done

    def ring_forget(self, cells: int) -> None:
        """Take back the ring's last cells, which were given out but not written."""
        self._cells -= cells

    def fill(self, slots: Slots, positions: Positions, rows: Floats, out: Floats | None) -> None:
        """rows[i] into the cache at slots[positions[i]], and into out[positions[i]]."""
        self._shares(
            len(positions),
            lambda first, last: library().mem_fill(
                rows=self.rows,
                width=self.width,
                slots=slots,
                positions=positions,
                first=first,
                last=last,
                source=rows,
                out=out,
            ),
        )

    def gather(self, slots: Slots, out: Floats, keys: Keys | None = None) -> None:
        """Rows of the slots to `out`, their keys to `keys`."""
        self._shares(
            len(slots),
            lambda first, last: library().mem_gather(
                entries=self.entries,
                rows=self.rows,
                width=self.width,
                slots=slots,
                first=first,
                last=last,
                out=out,
                keys=keys,
            ),
        )

    def victims(self, wanted: int) -> Slots:
        """Up to `wanted` of LFU's least visited rows that may leave; LRU's oldest follow where LFU has too few."""
        used = int(self._heads[1])
        window = min(used, max(SAMPLE * wanted, LEAST_SAMPLE))
        while True:
            histogram = self._census(window)
            if histogram.sum() >= wanted or (window == used and self.recent_rows == 0):
                return self._choose(window, wanted, histogram)
            if window < used:
                window = min(used, 4 * window)
            else:
                self._demote(self._cells, wanted - int(histogram.sum()))

    def _ranges(self, window: int) -> list[tuple[int, int]]:
        """The slots of a window that starts at the hand and wraps around."""
        used = int(self._heads[1])
        start = self._hand if self._hand < used else 0
        return [(start, min(start + window, used)), (0, max(0, start + window - used))]

    def _census(self, window: int) -> Int64s:
        def share(start: int, first: int, last: int) -> Int64s:
            histogram = np.zeros(256, np.int64)
            library().mem_census(
                entries=self.entries,
                first=start + first,
                last=start + last,
                flushing=self.flushing,
                histogram=histogram,
            )
            return histogram

        total = np.zeros(256, np.int64)
        for start, stop in self._ranges(window):
            total += sum(self._shares(stop - start, partial(share, start)))
        return total

    def _choose(self, window: int, wanted: int, histogram: Int64s) -> Slots:
        sums = np.cumsum(histogram)
        wanted = min(wanted, int(sums[-1]))
        visits = int(np.searchsorted(sums, wanted))
        allowed = wanted - int(sums[visits - 1] if visits else 0)
        victims = np.empty(wanted, np.uint32)
        count = 0
        for start, stop in self._ranges(window):
            chosen = library().mem_choose(
                entries=self.entries,
                first=start,
                last=stop,
                flushing=self.flushing,
                visits=visits,
                allowed=allowed,
                victims=victims[count:],
            )
            of_chosen = self.entries["visits"][victims[count : count + chosen]]
            allowed -= int(np.count_nonzero(of_chosen == visits))
            count += chosen
        self._hand = self._ranges(window)[1][1] or self._ranges(window)[0][1]
        return victims[:count]

    def select(self, slots: Slots, flags: int) -> Slots:
        """Those of the slots that have all of `flags`."""
        selected = np.empty(len(slots), np.uint32)
        count = library().mem_select(entries=self.entries, slots=slots, n=len(slots), wanted=flags, selected=selected)
        return selected[:count]

    def remove(self, slots: Slots) -> None:
        """Forget these rows: they must not be pinned, and what is dirty is lost unless it was written."""
        library().mem_remove(**self._index, slots=slots, n=len(slots), heads=self._heads)
        self.cached_rows -= len(slots)

    def age(self, visits: int) -> None:
        """Count visits; halve those of all rows when they are old enough."""
        self._visits += visits
        if self._visits >= AGE_VISITS * self.cache_rows:
            self._visits = 0
            age = library().mem_age
            self._shares(int(self._heads[1]), lambda first, last: age(entries=self.entries, first=first, last=last))

    def check(self, keys: Keys, slots: Slots, batch: int, earlier: int, claims: bool) -> int:
        """The first row that `batch` may not push, or -1; `earlier` has the bits of batches that must have pushed."""
        found = self._shares(
            len(keys),
            lambda first, last: library().mem_check(
                entries=self.entries,
                keys=keys,
                slots=slots,
                first=first,
                last=last,
                batch=batch % BATCHES_IN_FLIGHT,
                earlier=earlier,
                claims=claims,
            ),
        )
        wrong = min((i for i in found if i >= 0), default=-1)
        if wrong >= 0 and claims:
            library().mem_release(entries=self.entries, slots=slots, n=len(slots))
        return int(wrong)

    def push(self, slots: Slots, rows: Floats, batch: int) -> None:
        """Rows trained in `batch` into their slots; `check` has said that they may."""
        freed = self._shares(
            len(slots),
            lambda first, last: library().mem_push(
                entries=self.entries,
                rows=self.rows,
                width=self.width,
                slots=slots,
                source=rows,
                first=first,
                last=last,
                batch=batch % BATCHES_IN_FLIGHT,
            ),
        )
        self.pinned_rows -= sum(freed)

    def ready(self, slots: Slots, batch: int) -> npt.NDArray[np.bool_]:
        """Which of the slots `batch` is no longer out with."""
        ready = np.empty(len(slots), np.uint8)
        library().mem_ready(
            entries=self.entries, slots=slots, n=len(slots), batch=batch % BATCHES_IN_FLIGHT, ready=ready
        )
        return ready.view(np.bool_)

    def mark_pending(self) -> int:
        """A snapshot begins: every dirty row is pending for it. Returns how many."""
        mark = library().mem_mark_pending
        used = int(self._heads[1])
        return sum(self._shares(used, lambda first, last: mark(entries=self.entries, first=first, last=last)))

    def list_pending(self, start: int, limit: int) -> Slots:
        """The first `limit` pending slots from slot `start` on."""
        slots = np.empty(limit, np.uint32)
        count = library().mem_list_pending(
            entries=self.entries, first=start, last=int(self._heads[1]), limit=limit, slots=slots
        )
        return slots[:count]

    def mark_stored(self, slots: Slots) -> None:
        """The store has these rows as they are here."""
        library().mem_mark_stored(entries=self.entries, slots=slots, n=len(slots))
