"""A bounded cache of rows in memory: found by key, visited rows in LRU, LRU's victims in LFU, LFU's victims leave.

In: distinct keys as whole arrays, the batch that asks. Out: slots, rows, victims. The work is in cache.cpp; here are
its arrays and the order of its calls. Nothing here knows the disk, nodes, or what a batch is beyond a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from daskps.backend.arena import anonymous, release
from daskps.backend.native import library
from daskps.backend.pool import ComputePool
from daskps.mem.budget import Budget
from daskps.mem.delivery import Positions
from daskps.mem.recent import RecentList
from daskps.types import Floats, Int64s, Keys

Slots: TypeAlias = npt.NDArray[np.uint32]

NONE = np.uint32(0xFFFFFFFF)  # in place of a slot: not cached
BATCHES_IN_FLIGHT = 16  # an entry has one bit for each
ENTRY = np.dtype([("key", "<u8"), ("place", "<u4"), ("holds", "<u2"), ("visits", "u1"), ("flags", "u1")])
OCCUPIED, DIRTY, PENDING = 1, 2, 4

SMALL = 8192  # items; below, waking the pool costs more than it saves
VISIT_ITEMS = 1 << 20  # keys visited between two trims of the recent list
SAMPLE = 16  # LFU looks at this many rows for each one it evicts
LEAST_SAMPLE = 1 << 16
AGE_VISITS = 10  # visits are halved after this many visits per cached row, as in TinyLFU


@dataclass(frozen=True, slots=True)
class Visit:
    """What a batch found: slots of its keys (NONE where missing) and which rows earlier batches are out with."""

    slots: Slots
    missing: Positions
    late: Positions
    distances: npt.NDArray[np.uint8]  # of each late row: this batch minus the one that is out with it
    found: int


class Cache:
    """The rows of one partition that are in memory."""

    def __init__(self, budget: Budget, pool: ComputePool) -> None:
        self.cache_rows = budget.cache_rows
        self.width = budget.row_bytes // 4
        self.pool = pool
        self.rows: Floats = anonymous((budget.cache_rows, self.width), np.float32)
        self.entries = anonymous((budget.cache_rows,), ENTRY)
        self.buckets: Keys = anonymous((budget.bucket_count,), np.uint64)
        self.recent = RecentList(self.entries, budget.recent_rows, budget.ring_cells, self._shares)
        self.cached_rows = 0
        self.pinned_rows = 0
        self.flushing = False  # rows pushed after the snapshot being written must stay
        self._heads: Int64s = np.zeros(2, np.int64)  # free list (slot + 1), first slot never used
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
        for start in range(0, len(keys), step := min(VISIT_ITEMS, self.recent.longest_run)):
            stop = min(start + step, len(keys))
            lateness = self._visit_run(keys, start, stop, batch, slots, out, counts)
            missing.append((start + np.flatnonzero(slots[start:stop] == NONE)).astype(np.uint32))
            late.append((start + np.flatnonzero(lateness)).astype(np.uint32))
            distances.append(lateness[lateness != 0])
            self.recent.trim()
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
        head = self.recent.advance(stop - start)
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
                ring=self.recent.ring,
                ring_cells=len(self.recent.ring),
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
        self.recent.rows += int(run[3])
        counts += run
        return lateness

    def unpin(self, slots: Slots, batch: int) -> None:
        """`batch` gives the rows back unchanged."""
        self.pinned_rows -= library().mem_unpin(
            entries=self.entries, slots=slots, n=len(slots), batch=batch % BATCHES_IN_FLIGHT
        )

    def insert(self, keys: Keys, positions: Positions, slots: Slots, batch: int) -> int:
        """Slots for keys[positions], pinned by `batch`; there must be room. Returns how many: fewer if one repeats."""
        done = 0
        for start in range(0, len(positions), step := min(VISIT_ITEMS, self.recent.longest_run)):
            run = positions[start : start + step]
            inserted = library().mem_insert(
                **self._index,
                keys=keys,
                positions=run,
                n=len(run),
                batch=batch % BATCHES_IN_FLIGHT,
                ring=self.recent.ring,
                ring_cells=len(self.recent.ring),
                ring_head=self.recent.advance(len(run)),
                slots=slots,
                heads=self._heads,
            )
            self.recent.take_back(len(run) - inserted)
            done += inserted
            self.cached_rows += inserted
            self.pinned_rows += inserted
            self.recent.rows += inserted
            self.recent.trim()
            if inserted < len(run):
                break
        return done

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

    def gather(self, slots: Slots, out: Floats, keys: Keys | None = None, positions: Positions | None = None) -> None:
        """Rows of the slots to `out`, one after the other or at their positions; their keys to `keys`."""
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
                positions=positions,
                keys=keys,
            ),
        )

    def victims(self, wanted: int) -> Slots:
        """Up to `wanted` of LFU's least visited rows that may leave; LRU's oldest follow where LFU has too few."""
        used = int(self._heads[1])
        window = min(used, max(SAMPLE * wanted, LEAST_SAMPLE))
        while True:
            ranges = self._ranges(window)
            censuses = self.pool.map(self._census, ranges)
            there = int(sum(census.sum() for census in censuses))
            if there >= wanted or (window == used and self.recent.rows == 0):
                self._hand = ranges[-1][1]
                return self._choose(ranges, censuses, min(wanted, there))
            if window < used:
                window = min(used, 4 * window)
            else:
                self.recent.demote(wanted - there)

    def _ranges(self, window: int) -> list[tuple[int, int]]:
        """The slots of a window that starts at the hand and wraps around, in shares of the pool."""
        used = int(self._heads[1])
        start = self._hand if self._hand < used else 0
        shares = self.pool.cores if window >= SMALL else 1
        cuts = {start, start + window, *(start + window * share // shares for share in range(shares))}
        if start < used < start + window:
            cuts.add(used)
        ordered = sorted(cuts)
        return [(first - used, last - used) if first >= used else (first, last) for first, last in pairwise(ordered)]

    def _census(self, slots: tuple[int, int]) -> Int64s:
        """How many rows of a range of slots may leave, by visits."""
        histogram = np.zeros(256, np.int64)
        library().mem_census(
            entries=self.entries, first=slots[0], last=slots[1], flushing=self.flushing, histogram=histogram
        )
        return histogram

    def _choose(self, ranges: list[tuple[int, int]], censuses: list[Int64s], wanted: int) -> Slots:
        """The `wanted` least visited of them; of those with the highest number of visits, the first ones."""
        sums = np.cumsum(sum(censuses))
        visits = int(np.searchsorted(sums, wanted))
        allowed = wanted - int(sums[visits - 1] if visits else 0)
        victims = np.empty(wanted, np.uint32)
        work, start = [], 0
        for slots, census in zip(ranges, censuses, strict=True):
            ties = min(allowed, int(census[visits]))
            count = int(census[:visits].sum()) + ties
            work.append((slots, ties, victims[start : start + count]))
            allowed -= ties
            start += count

        def choose(one: tuple[tuple[int, int], int, Slots]) -> None:
            (first, last), ties, out = one
            library().mem_choose(
                entries=self.entries,
                first=first,
                last=last,
                flushing=self.flushing,
                visits=visits,
                allowed=ties,
                victims=out,
            )

        self.pool.map(choose, work)
        return victims

    def select(self, slots: Slots, flags: int) -> Slots:
        """Those of the slots that have all of `flags`."""
        selected = np.empty(len(slots), np.uint32)
        count = library().mem_select(entries=self.entries, slots=slots, n=len(slots), wanted=flags, selected=selected)
        return selected[:count]

    def remove(self, slots: Slots) -> None:
        """Forget these rows: they must not be pinned, and what is dirty is lost unless it was written."""
        library().mem_remove(**self._index, slots=slots, n=len(slots), heads=self._heads)
        self.cached_rows -= len(slots)

    def shrink(self, rows: int) -> Slots:
        """Keep only the first `rows` slots, which must have room for what is cached; give the memory of others back.

        Returns the new slots: entry i is that of what was in slot ``rows + i``.
        """
        used = int(self._heads[1])
        occupied = self.entries["flags"][:used] & OCCUPIED != 0
        above = rows + np.flatnonzero(occupied[rows:]).astype(np.uint32)
        below = np.flatnonzero(~occupied[:rows]).astype(np.uint32)
        to = np.concatenate([below, np.arange(used, rows, dtype=np.uint32)])[: len(above)]
        library().mem_move(
            **self._index,
            rows=self.rows,
            width=self.width,
            ring=self.recent.ring,
            **{"from": above, "to": to, "n": len(above)},
        )
        moved = np.full(max(0, used - rows), NONE)
        moved[above - np.uint32(rows)] = to
        self._heads[1] = min(rows, max(used, int(to.max(initial=0)) + 1))
        library().mem_relink(entries=self.entries, heads=self._heads)
        release(self.rows, rows)
        release(self.entries, rows)
        self.recent.limit = max(1, self.recent.limit * rows // self.cache_rows)
        self.cache_rows = rows
        self.recent.trim()
        return moved

    def age(self, visits: int) -> None:
        """Count visits; halve those of all rows when they are old enough."""
        self._visits += visits
        if self._visits >= AGE_VISITS * self.cache_rows:
            self._visits = 0
            age = library().mem_age
            self._shares(int(self._heads[1]), lambda first, last: age(entries=self.entries, first=first, last=last))

    def check(self, keys: Keys, slots: Slots, batch: int, claims: bool) -> int:
        """The first row that `batch` may not push, or -1; repeated keys are seen only with `claims`."""
        found = self._shares(
            len(keys),
            lambda first, last: library().mem_check(
                entries=self.entries,
                keys=keys,
                slots=slots,
                first=first,
                last=last,
                batch=batch % BATCHES_IN_FLIGHT,
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
