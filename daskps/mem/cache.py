"""Cache of rows in memory with a fixed capacity, an LRU list in front of an LFU set.

A pulled row goes to the head of the LRU list (the recent list). The oldest rows of the LRU list move to the LFU set
(the frequent list), and the least visited rows of the LFU set are evicted.

Input: arrays of distinct keys and the number of the batch that pulls or pushes them. Output: entry numbers, rows, rows
to evict. An entry number (`slots` in names, type `Slots`) is the index of a cached row in `Cache.entries` and
`Cache.rows`. The native code is in cache.cpp; this module owns its arrays and calls it in the right order. It knows
nothing of disk or nodes, and a batch is only a number here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from daskps.budget import CacheBudget
from daskps.device.memory import anonymous, release
from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.types import Floats, Int64s, Keys

Positions: TypeAlias = npt.NDArray[np.uint32]

NOWHERE: Positions = np.empty(0, np.uint32)  # no positions
NOWHERE.flags.writeable = False
NOBODY: Keys = np.empty(0, np.uint64)  # holders of no keys
NOBODY.flags.writeable = False


@dataclass(frozen=True, slots=True)
class PullReply:
    """A reply of an owner to one node's pull of one batch. A position is an index into the keys of that pull.

    The first delivery of a pull describes all its rows: which are in this delivery, which the node forwards from its
    own table of the previous batch, which the owner sends later, and which other nodes hold the same keys. Further
    deliveries only bring deferred rows.
    """

    node: int
    batch: int
    first: bool
    positions: Positions | None  # the keys whose rows are in this delivery; None: all keys, in order
    rows: Floats  # rows[i] belongs to key positions[i]; if the pull gave `out`: `out`, where rows[positions[i]] does
    in_place: bool  # the pull gave `out`
    copied: Positions  # forwarded rows, not sent: the node copies them from its table of batch - 1, kept until then
    late: Positions  # deferred rows, sent when the last earlier batch that holds them has pushed
    shared: Positions  # keys that more than one node holds in this batch, in the same order on all these nodes
    holders: Keys  # for each shared key: bit r is set if node r holds it; the node of lowest rank pushes it


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Counters of one batch on this owner, over all nodes. A row that several nodes pull counts once."""

    batch: int
    hits: int  # rows that were in memory, including deferred rows
    misses: int  # rows read from disk
    new_keys: int  # rows initialized from (seed, key)
    late: int  # deferred rows: hits that an earlier batch had not pushed yet
    lru_victims: int  # rows that moved from LRU to LFU
    lfu_victims: int  # rows evicted from the cache
    written_back: int  # evicted rows that were dirty, so they were written to disk
    bytes_read: int  # from disk
    bytes_written: int  # to disk, by write-back
    pinned_rows: int  # most rows that were pinned at once while this batch was in flight
    given_rows: int  # rows by which the cache shrank because the index of the disk tier had grown
    waits: int  # 1: the batch first had to wait for a push, because its rows did not fit beside the pinned ones
    forced_flushes: int  # snapshots that had to be finished at once so that rows could be evicted


def total(statistics: Iterable[BatchStatistics]) -> BatchStatistics:
    """Return the sum of the counters; `batch` and `pinned_rows` are the maximum instead."""
    every = list(statistics)
    highest = {"batch", "pinned_rows"}
    return BatchStatistics(
        **{
            field.name: (max if field.name in highest else sum)([getattr(one, field.name) for one in every] or [0])
            for field in fields(BatchStatistics)
        }
    )


SERIAL_ROWS = 8192  # rows; to move fewer, one thread is used, and it moves exactly the number asked for


class RecentList:
    """The LRU list: a ring buffer of entry numbers, oldest first.

    A row that is pulled again gets a new cell at the head; its old cell is stale. `rows` counts the cells that are not
    stale.
    """

    def __init__(self, entries: Any, limit: int, cells: int, shares: Callable[..., list[Any]]) -> None:
        self.ring: Positions = anonymous((cells,), np.uint32)
        self.limit = limit
        self.rows = 0
        self.demoted = 0  # rows moved to the frequent list since the start
        self._entries = entries
        self._shares = shares
        self._tail = 0  # the oldest cell
        self._used = 0  # cells in use, from `_tail` on

    @property
    def longest_run(self) -> int:
        """Return the largest number of cells that one call of `advance` may ask for."""
        return len(self.ring) // 2

    def advance(self, cells: int) -> int:
        """Reserve the next `cells` cells and return the first one. If too few are free, demote the oldest rows."""
        short = self._used + cells - len(self.ring)
        if short > 0:
            self._advance_tail(short, short)
        head = (self._tail + self._used) % len(self.ring)
        self._used += cells
        return head

    def take_back(self, cells: int) -> None:
        """Release the last `cells` reserved cells, which were not written."""
        self._used -= cells

    def trim(self) -> None:
        """Move the oldest rows to the frequent list until at most `limit` rows are left."""
        while self.rows > self.limit:
            self.demote(self.rows - self.limit)

    def demote(self, rows: int) -> None:
        """Move some of the oldest rows to the frequent list: at least one if there is any, at most `rows`."""
        self._advance_tail(self._used, rows)

    def _advance_tail(self, cells: int, rows: int) -> None:
        """Free up to `cells` cells at the tail, until `rows` rows have moved to the frequent list."""

        def share(first: int, last: int) -> Int64s:
            counts = np.zeros(2, np.int64)
            library().mem_demote(
                entries=self._entries,
                ring=self.ring,
                ring_cells=len(self.ring),
                tail=self._tail,
                first=first,
                last=last,
                wanted=rows,
                counts=counts,
            )
            return counts

        # Threads cannot stop each other, so together they get at most as many cells as there are rows to move.
        counts = share(0, cells) if rows < SERIAL_ROWS else sum(self._shares(min(cells, rows), share))
        self._tail = (self._tail + int(counts[1])) % len(self.ring)
        self._used -= int(counts[1])
        self.rows -= int(counts[0])
        self.demoted += int(counts[0])


Slots: TypeAlias = npt.NDArray[np.uint32]

NONE = np.uint32(0xFFFFFFFF)  # stands for an entry number where the key is not cached
BATCHES_IN_FLIGHT = 16  # most batches in flight: `holds` of an entry has one bit for each
ENTRY = np.dtype([("key", "<u8"), ("place", "<u4"), ("holds", "<u2"), ("visits", "u1"), ("flags", "u1")])
OCCUPIED, DIRTY, PENDING = 1, 2, 4  # bits of `flags`; PENDING: the snapshot being written still needs this value

SMALL = 8192  # items; for fewer, waking the threads of the pool costs more than it saves
VISIT_ITEMS = 1 << 20  # keys visited between two trims of the recent list
SAMPLE = 16  # entries that LFU examines for each row that it evicts
LEAST_SAMPLE = 1 << 16  # entries that LFU examines at least
AGE_VISITS = 10  # visit counts are halved after this many visits per row of capacity, as in TinyLFU


@dataclass(frozen=True, slots=True)
class Visit:
    """The result of looking up a batch: the entry of each key, which keys are missing, which rows are deferred."""

    slots: Slots  # NONE where the key was missing; filled in by `Cache.insert`
    missing: Positions
    late: Positions  # deferred rows: an earlier batch in flight holds them
    distances: npt.NDArray[np.uint8]  # for each deferred row: this batch minus the latest earlier batch that holds it
    found: int  # keys that were cached


class Cache:
    """The cached rows of one `MemPS`, with their entries (key, pins, visits, flags) and a hash index over the keys."""

    def __init__(self, budget: CacheBudget, pool: ComputePool) -> None:
        self.cache_rows = budget.cache_rows
        self.width = budget.row_bytes // 4
        self.pool = pool
        self.rows: Floats = anonymous((budget.cache_rows, self.width), np.float32)
        self.entries = anonymous((budget.cache_rows,), ENTRY)
        self.buckets: Keys = anonymous((budget.bucket_count,), np.uint64)
        self.recent = RecentList(self.entries, budget.recent_rows, budget.ring_cells, self._shares)
        self.cached_rows = 0
        self.pinned_rows = 0
        self.flushing = False  # a snapshot is being written: rows pushed after it began must not be evicted
        self._heads: Int64s = np.zeros(2, np.int64)  # head of the free list (entry + 1), first entry never used so far
        self._hand = 0  # entry at which the next search for rows to evict starts
        self._visits = 0  # since visit counts were halved last
        self._index = {"buckets": self.buckets, "bucket_count": len(self.buckets), "entries": self.entries}

    def _shares(self, n: int, call: Callable[[int, int], Any]) -> list[Any]:
        """Run ``call(first, last)`` over [0, n), one part per thread of the pool; in one call if n is small."""
        if n < SMALL or self.pool.cores == 1:
            return [call(0, n)]
        return self.pool.shares(lambda index, count: call(n * index // count, n * (index + 1) // count))

    def find(self, keys: Keys, out: Floats | None = None) -> Slots:
        """Return the entry of each key, NONE where it is missing, and copy the rows found to `out`. Changes nothing."""
        slots = np.empty(len(keys), np.uint32)
        self._shares(
            len(keys),
            lambda first, last: library().mem_find(
                **self._index, rows=self.rows, width=self.width, keys=keys, first=first, last=last, slots=slots, out=out
            ),
        )
        return slots

    def count_pinned(self, keys: Keys) -> int:
        """Return how many of the keys are pinned now."""
        count = library().mem_count_pinned
        return sum(self._shares(len(keys), lambda first, last: count(**self._index, keys=keys, first=first, last=last)))

    def visit(self, keys: Keys, batch: int, out: Floats | None) -> Visit | None:
        """Pin the cached rows for `batch` and copy those that no earlier batch holds to `out`.

        If a key occurs twice, nothing stays pinned and None is returned.
        """
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
        """Remove the pins of `batch`, which did not change the rows."""
        self.pinned_rows -= library().mem_unpin(
            entries=self.entries, slots=slots, n=len(slots), batch=batch % BATCHES_IN_FLIGHT
        )

    def insert(self, keys: Keys, positions: Positions, slots: Slots, batch: int) -> int:
        """Add entries for keys[positions], pinned by `batch`, and write their numbers to `slots`.

        The caller has made room. Returns the number of entries added, which is smaller than asked for if a key occurs
        twice.
        """
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
        """Copy rows[i] into the cache, to entry slots[positions[i]], and to out[positions[i]] if `out` is given."""
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
        """Copy the rows of entries to `out`, one after the other or at `positions`, and their keys to `keys`."""
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
        """Return up to `wanted` rows to evict: the least visited of the LFU set that may be evicted.

        If the LFU set has too few, the oldest rows of the LRU list are demoted to it first.
        """
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
        """Return `window` entries from `_hand` on, wrapping around, as ranges: one or more per thread of the pool."""
        used = int(self._heads[1])
        start = self._hand if self._hand < used else 0
        shares = self.pool.cores if window >= SMALL else 1
        cuts = {start, start + window, *(start + window * share // shares for share in range(shares))}
        if start < used < start + window:
            cuts.add(used)
        ordered = sorted(cuts)
        return [(first - used, last - used) if first >= used else (first, last) for first, last in pairwise(ordered)]

    def _census(self, slots: tuple[int, int]) -> Int64s:
        """Return a histogram over visits of the rows that may be evicted from a range of entries."""
        histogram = np.zeros(256, np.int64)
        library().mem_census(
            entries=self.entries, first=slots[0], last=slots[1], flushing=self.flushing, histogram=histogram
        )
        return histogram

    def _choose(self, ranges: list[tuple[int, int]], censuses: list[Int64s], wanted: int) -> Slots:
        """Return the `wanted` least visited rows of the ranges; of equals, the first in order of the ranges."""
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
        """Return those of the entries that have all of `flags` set."""
        selected = np.empty(len(slots), np.uint32)
        count = library().mem_select(entries=self.entries, slots=slots, n=len(slots), wanted=flags, selected=selected)
        return selected[:count]

    def remove(self, slots: Slots) -> None:
        """Remove rows, which must not be pinned. The caller has written the dirty ones to the store."""
        library().mem_remove(**self._index, slots=slots, n=len(slots), heads=self._heads)
        self.cached_rows -= len(slots)

    def shrink(self, rows: int) -> Slots:
        """Reduce the capacity to `rows`, which must be enough for all cached rows, and release the memory behind it.

        Returns where rows have moved: item i is the new number of entry ``rows + i``, or NONE if that was free.
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
        """Add to the number of visits. After AGE_VISITS per row of capacity, halve the visit counts of all rows."""
        self._visits += visits
        if self._visits >= AGE_VISITS * self.cache_rows:
            self._visits = 0
            age = library().mem_age
            self._shares(int(self._heads[1]), lambda first, last: age(entries=self.entries, first=first, last=last))

    def check(self, keys: Keys, slots: Slots, batch: int, claims: bool) -> int:
        """Return the position of the first row that `batch` may not push, or -1 if it may push all.

        Only with `claims` are the entries marked as claimed, so that a key that occurs twice is noticed.
        """
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
        """Store rows that `batch` has trained in their entries and remove its pins. Call `check` before."""
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
        """Return, for each entry, True if `batch` does not hold it any more."""
        ready = np.empty(len(slots), np.uint8)
        library().mem_ready(
            entries=self.entries, slots=slots, n=len(slots), batch=batch % BATCHES_IN_FLIGHT, ready=ready
        )
        return ready.view(np.bool_)

    def mark_pending(self) -> int:
        """Mark every dirty row as pending for the snapshot that begins now; return their number."""
        mark = library().mem_mark_pending
        used = int(self._heads[1])
        return sum(self._shares(used, lambda first, last: mark(entries=self.entries, first=first, last=last)))

    def list_pending(self, start: int, limit: int) -> Slots:
        """Return the first `limit` pending entries from entry `start` on."""
        slots = np.empty(limit, np.uint32)
        count = library().mem_list_pending(
            entries=self.entries, first=start, last=int(self._heads[1]), limit=limit, slots=slots
        )
        return slots[:count]

    def mark_stored(self, slots: Slots) -> None:
        """Mark rows that are still pending as equal to what the store has: neither dirty nor pending."""
        library().mem_mark_stored(entries=self.entries, slots=slots, n=len(slots))
