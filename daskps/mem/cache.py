"""Cache of rows in memory with a fixed capacity.

Input: arrays of distinct keys and the number of the batch that pulls or pushes them. Output: entry numbers, rows, rows
to evict. An entry number (`ids` in names, type `EntryIds`) is the index of a cached row in `Cache.entries` and
`Cache.rows`. Which rows are evicted first is decided by a policy (eviction.py).

This module owns the arrays and calls the native code in the right order: the hash index is in cache.cpp, copying of
rows in rows.cpp, the search for rows to evict in eviction.cpp. It knows nothing of disk or nodes, and a batch is only a
number here.
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
from daskps.device.native import library, struct_of_words
from daskps.device.pool import ComputePool
from daskps.mem.eviction import DEFAULT_POLICY, SCORE_LEVELS, Eviction
from daskps.types import Floats, Int64s, Keys

Positions: TypeAlias = npt.NDArray[np.uint32]

NOWHERE: Positions = np.empty(0, np.uint32)  # no positions
NOWHERE.flags.writeable = False
NOBODY: Keys = np.empty(0, np.uint64)  # holders of no keys
NOBODY.flags.writeable = False


@dataclass(frozen=True, slots=True)
class PullReply:
    """A reply of an owner to one node's pull of one batch. A position is an index into the keys of that pull.

    The first reply to a pull describes all its rows: which are in this reply, which the node forwards from its own
    table of the previous batch, which the owner sends later, and which other nodes hold the same keys. Further replies
    only bring deferred rows.
    """

    node: int
    batch: int
    first: bool
    positions: Positions | None  # the keys whose rows are in this reply; None: all keys, in order
    rows: Floats  # rows[i] belongs to key positions[i]; if the pull gave `out`: `out`, where rows[positions[i]] does
    in_place: bool  # the pull gave `out`
    forwarded: Positions  # not sent: the node copies them from its table of batch - 1, which it keeps until then
    deferred: Positions  # sent when the last earlier batch that holds them has pushed
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
    evicted: int  # rows evicted from the cache
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


EntryIds: TypeAlias = npt.NDArray[np.uint32]

NONE = np.uint32(0xFFFFFFFF)  # stands for an entry number where the key is not cached
BATCHES_IN_FLIGHT = 16  # most batches in flight: `holds` of an entry has one bit for each
BATCH_NUMBERS = 1 << 16  # entries store batch numbers modulo this
ENTRY = np.dtype(  # struct Entry of entry.cuh
    [("key", "<u8"), ("last_batch", "<u2"), ("next_use", "<u2"), ("holds", "<u2"), ("visits", "u1"), ("flags", "u1")]
)
OCCUPIED, DIRTY, PENDING = 1, 2, 4  # bits of `flags`; PENDING: the snapshot being written still needs this value

SMALL = 8192  # items; for fewer, waking the threads of the pool costs more than it saves
VISIT_ITEMS = 1 << 20  # keys visited at once: bounds the memory of masks and positions
SAMPLE = 16  # entries that are examined for each row to evict
LEAST_SAMPLE = 1 << 16  # entries that are examined at least


@dataclass(frozen=True, slots=True)
class Visit:
    """The result of looking up a batch: the entry of each key, which keys are missing, which rows are deferred."""

    ids: EntryIds  # NONE where the key was missing; filled in by `Cache.insert`
    missing: Positions
    deferred: Positions  # rows that an earlier batch in flight pins
    distances: npt.NDArray[np.uint8]  # for each deferred row: this batch minus the latest earlier batch that pins it
    found: int  # keys that were cached


class Cache:
    """The cached rows of one `MemPS`, with their entries (key, batches, pins, visits, flags) and a hash index."""

    def __init__(self, budget: CacheBudget, pool: ComputePool, eviction: str = DEFAULT_POLICY) -> None:
        """Allocate the cache. `eviction` is the name of a policy in eviction.py."""
        self.cache_rows = budget.cache_rows
        self.width = budget.row_bytes // 4
        self.pool = pool
        self.rows: Floats = anonymous((budget.cache_rows, self.width), np.float32)
        self.entries = anonymous((budget.cache_rows,), ENTRY)
        self.buckets: Keys = anonymous((budget.bucket_count,), np.uint64)
        self.cached_rows = 0
        self.pinned_rows = 0
        self.flushing = False  # a snapshot is being written: rows pushed after it began must not be evicted
        self.eviction = Eviction(eviction)
        self._fields, self._state = struct_of_words(  # struct CacheState of entry.cuh
            buckets=self.buckets,
            bucket_count=len(self.buckets),
            entries=self.entries,
            rows=self.rows,
            width=self.width,
            free_entry=0,
            used_entries=0,
            scores=self.eviction.scores,
            decay=self.eviction.decay,
            overdue=0,
        )
        self._batch = 0  # the batch visited last
        self._hand = 0  # entry at which the next search for rows to evict starts

    @property
    def _used(self) -> int:
        """Return the number of entries that have ever been used: later ones are free."""
        return int(self._fields["used_entries"][0])

    def _shares(self, n: int, call: Callable[[int, int], Any]) -> list[Any]:
        """Run ``call(first, last)`` over [0, n), one part per thread of the pool; in one call if n is small."""
        if n < SMALL or self.pool.cores == 1:
            return [call(0, n)]
        return self.pool.shares(lambda index, count: call(n * index // count, n * (index + 1) // count))

    def find(self, keys: Keys, out: Floats | None = None) -> EntryIds:
        """Return the entry of each key, NONE where it is missing, and copy the rows found to `out`. Changes nothing."""
        ids = np.empty(len(keys), np.uint32)
        find = library().mem_find
        self._shares(
            len(keys),
            lambda first, last: find(state=self._state, keys=keys, first=first, last=last, ids=ids, out=out),
        )
        return ids

    def count_pinned(self, keys: Keys) -> int:
        """Return how many of the keys are pinned now."""
        count = library().mem_count_pinned
        return sum(
            self._shares(len(keys), lambda first, last: count(state=self._state, keys=keys, first=first, last=last))
        )

    def visit(self, keys: Keys, batch: int, out: Floats | None) -> Visit | None:
        """Pin the cached rows for `batch` and copy those that no earlier batch pins to `out`.

        If a key occurs twice, nothing stays pinned and None is returned.
        """
        ids = np.empty(len(keys), np.uint32)
        missing, deferred, distances = [NOWHERE], [NOWHERE], [np.empty(0, np.uint8)]
        counts = np.zeros(6, np.int64)
        for start in range(0, len(keys), VISIT_ITEMS):
            stop = min(start + VISIT_ITEMS, len(keys))
            piece_out = None if out is None else out[start:stop]
            waits = self._visit_piece(keys[start:stop], batch, ids[start:stop], piece_out, counts)
            missing.append((start + np.flatnonzero(ids[start:stop] == NONE)).astype(np.uint32))
            deferred.append((start + np.flatnonzero(waits)).astype(np.uint32))
            distances.append(waits[waits != 0])
        found, _, pinned, overdue, overdue_visits, repeated = (int(count) for count in counts)
        self.pinned_rows += pinned
        if repeated:
            self.unpin(ids, batch)
            return None
        self._batch = batch % BATCH_NUMBERS
        self.eviction.visited(len(keys), self.cache_rows, overdue, overdue_visits)
        self._fields["overdue"] = self.eviction.overdue
        return Visit(ids, np.concatenate(missing), np.concatenate(deferred), np.concatenate(distances), found)

    def _visit_piece(
        self, keys: Keys, batch: int, ids: EntryIds, out: Floats | None, counts: Int64s
    ) -> npt.NDArray[np.uint8]:
        """Visit some keys of a batch and return the distances of their rows (0: not deferred)."""
        distances = np.empty(len(keys), np.uint8)

        def share(first: int, last: int) -> Int64s:
            mine = np.zeros(6, np.int64)
            library().mem_visit(
                state=self._state,
                keys=keys,
                first=first,
                last=last,
                batch=batch % BATCH_NUMBERS,
                ids=ids,
                distances=distances,
                out=out,
                counts=mine,
            )
            return mine

        counts += sum(self._shares(len(keys), share))
        return distances

    def unpin(self, ids: EntryIds, batch: int) -> None:
        """Remove the pins of `batch`, which did not change the rows."""
        self.pinned_rows -= library().mem_unpin(state=self._state, ids=ids, n=len(ids), batch=batch % BATCHES_IN_FLIGHT)

    def insert(self, keys: Keys, positions: Positions, ids: EntryIds, batch: int) -> int:
        """Add entries for keys[positions], pinned by `batch`, and write their numbers to `ids`.

        The caller has made room. Returns the number of entries added, which is smaller than asked for if a key occurs
        twice.
        """
        inserted = library().mem_insert(
            state=self._state,
            keys=keys,
            positions=positions,
            n=len(positions),
            batch=batch % BATCH_NUMBERS,
            ids=ids,
        )
        self.cached_rows += inserted
        self.pinned_rows += inserted
        return int(inserted)

    def fill(self, ids: EntryIds, positions: Positions, rows: Floats, out: Floats | None) -> None:
        """Copy rows[i] into the cache, to entry ids[positions[i]], and to out[positions[i]] if `out` is given."""
        self._shares(
            len(positions),
            lambda first, last: library().mem_fill(
                state=self._state,
                ids=ids,
                positions=positions,
                first=first,
                last=last,
                source=rows,
                out=out,
            ),
        )

    def gather(self, ids: EntryIds, out: Floats, keys: Keys | None = None, positions: Positions | None = None) -> None:
        """Copy the rows of entries to `out`, one after the other or at `positions`, and their keys to `keys`."""
        self._shares(
            len(ids),
            lambda first, last: library().mem_gather(
                state=self._state,
                ids=ids,
                first=first,
                last=last,
                out=out,
                positions=positions,
                keys=keys,
            ),
        )

    def victims(self, wanted: int) -> EntryIds:
        """Return up to `wanted` rows to evict: those with the smallest scores that may be evicted.

        Only a window of the entries is searched, SAMPLE for each wanted row, and the next call goes on behind it. That
        comes close to a search of all entries, whose cost would grow with the cache.
        """
        used = self._used
        window = min(used, max(SAMPLE * wanted, LEAST_SAMPLE))
        while True:
            ranges = self._ranges(window)
            counts = self.pool.map(self._count_scores, ranges)
            there = sum(int(histogram.sum()) for histogram, _ in counts)
            if there >= wanted or window == used:
                break
            window = min(used, 4 * window)
        self._hand = ranges[-1][1]
        victims = self._choose(ranges, [histogram for histogram, _ in counts], min(wanted, there))
        self.eviction.searched(sum(overdue_visits for _, overdue_visits in counts) * used / max(1, window))
        self._fields["overdue"] = self.eviction.overdue
        return victims

    def _ranges(self, window: int) -> list[tuple[int, int]]:
        """Return `window` entries from `_hand` on, wrapping around, as ranges: one or more per thread of the pool."""
        used = self._used
        start = self._hand if self._hand < used else 0
        shares = self.pool.cores if window >= SMALL else 1
        cuts = {start, start + window, *(start + window * share // shares for share in range(shares))}
        if start < used < start + window:
            cuts.add(used)
        ordered = sorted(cuts)
        return [(first - used, last - used) if first >= used else (first, last) for first, last in pairwise(ordered)]

    def _count_scores(self, ids: tuple[int, int]) -> tuple[Int64s, int]:
        """Return a histogram of the scores of evictable rows in a range of entries, and visits of the overdue ones."""
        histogram = np.zeros(SCORE_LEVELS, np.int64)
        overdue_visits = library().mem_count_scores(
            state=self._state,
            first=ids[0],
            last=ids[1],
            batch=self._batch,
            flushing=self.flushing,
            histogram=histogram,
        )
        return histogram, overdue_visits

    def _choose(self, ranges: list[tuple[int, int]], histograms: list[Int64s], wanted: int) -> EntryIds:
        """Return the `wanted` rows with the smallest scores; of equal ones, the first in order of the ranges."""
        sums = np.cumsum(sum(histograms))
        limit = int(np.searchsorted(sums, wanted))
        allowed = wanted - int(sums[limit - 1] if limit else 0)
        victims = np.empty(wanted, np.uint32)
        work, start = [], 0
        for ids, histogram in zip(ranges, histograms, strict=True):
            ties = min(allowed, int(histogram[limit]))
            count = int(histogram[:limit].sum()) + ties
            work.append((ids, ties, victims[start : start + count]))
            allowed -= ties
            start += count

        def choose(one: tuple[tuple[int, int], int, EntryIds]) -> None:
            (first, last), ties, chosen = one
            library().mem_choose(
                state=self._state,
                first=first,
                last=last,
                batch=self._batch,
                flushing=self.flushing,
                limit=limit,
                ties=ties,
                chosen=chosen,
            )

        self.pool.map(choose, work)
        return victims

    def select(self, ids: EntryIds, flags: int) -> EntryIds:
        """Return those of the entries that have all of `flags` set."""
        selected = np.empty(len(ids), np.uint32)
        count = library().mem_select(state=self._state, ids=ids, n=len(ids), wanted=flags, selected=selected)
        return selected[:count]

    def remove(self, ids: EntryIds) -> None:
        """Remove rows, which must not be pinned. The caller has written the dirty ones to the store."""
        library().mem_remove(state=self._state, ids=ids, n=len(ids))
        self.cached_rows -= len(ids)

    def shrink(self, rows: int) -> EntryIds:
        """Reduce the capacity to `rows`, which must be enough for all cached rows, and release the memory behind it.

        Returns where rows have moved: item i is the new number of entry ``rows + i``, or NONE if that was free.
        """
        used = self._used
        occupied = self.entries["flags"][:used] & OCCUPIED != 0
        above = rows + np.flatnonzero(occupied[rows:]).astype(np.uint32)
        below = np.flatnonzero(~occupied[:rows]).astype(np.uint32)
        to = np.concatenate([below, np.arange(used, rows, dtype=np.uint32)])[: len(above)]
        library().mem_move(state=self._state, **{"from": above, "to": to, "n": len(above)})
        moved = np.full(max(0, used - rows), NONE)
        moved[above - np.uint32(rows)] = to
        self._fields["used_entries"] = min(rows, max(used, int(to.max(initial=0)) + 1))
        library().mem_list_free(state=self._state)
        release(self.rows, rows)
        release(self.entries, rows)
        self.cache_rows = rows
        return moved

    def check(self, keys: Keys, ids: EntryIds, batch: int, claims: bool) -> int:
        """Return the position of the first row that `batch` may not push, or -1 if it may push all.

        Only with `claims` are the entries marked as claimed, so that a key that occurs twice is noticed.
        """
        found = self._shares(
            len(keys),
            lambda first, last: library().mem_check(
                state=self._state,
                keys=keys,
                ids=ids,
                first=first,
                last=last,
                batch=batch % BATCHES_IN_FLIGHT,
                claims=claims,
            ),
        )
        wrong = min((i for i in found if i >= 0), default=-1)
        if wrong >= 0 and claims:
            library().mem_release(state=self._state, ids=ids, n=len(ids))
        return int(wrong)

    def push(self, ids: EntryIds, rows: Floats, batch: int) -> None:
        """Store rows that `batch` has trained in their entries and remove its pins. Call `check` before."""
        freed = self._shares(
            len(ids),
            lambda first, last: library().mem_push(
                state=self._state,
                ids=ids,
                source=rows,
                first=first,
                last=last,
                batch=batch % BATCHES_IN_FLIGHT,
            ),
        )
        self.pinned_rows -= sum(freed)

    def ready(self, ids: EntryIds, batch: int) -> npt.NDArray[np.bool_]:
        """Return, for each entry, True if `batch` does not hold it any more."""
        ready = np.empty(len(ids), np.uint8)
        library().mem_ready(state=self._state, ids=ids, n=len(ids), batch=batch % BATCHES_IN_FLIGHT, ready=ready)
        return ready.view(np.bool_)

    def mark_pending(self) -> int:
        """Mark every dirty row as pending for the snapshot that begins now; return their number."""
        mark = library().mem_mark_pending
        used = self._used
        return sum(self._shares(used, lambda first, last: mark(state=self._state, first=first, last=last)))

    def list_pending(self, start: int, limit: int) -> EntryIds:
        """Return the first `limit` pending entries from entry `start` on."""
        ids = np.empty(limit, np.uint32)
        count = library().mem_list_pending(state=self._state, first=start, last=self._used, limit=limit, ids=ids)
        return ids[:count]

    def mark_stored(self, ids: EntryIds) -> None:
        """Mark rows that are still pending as equal to what the store has: neither dirty nor pending."""
        library().mem_mark_stored(state=self._state, ids=ids, n=len(ids))
