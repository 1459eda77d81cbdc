"""Rows from memory where they are, else from disk, else made: the cache and the store below it as one.

In: working sets to pin, rows to give back, keys to look up. Out: rows; write-backs and snapshots in the store. It knows
batches only as numbers that pin rows; order, nodes and deliveries are the business of `memps`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from daskps.backend.arena import anonymous, release
from daskps.backend.pool import ComputePool
from daskps.errors import ArgumentError, CapacityError
from daskps.mem import budget as budgets
from daskps.mem.cache import DIRTY, NONE, Cache, Slots, Visit
from daskps.mem.snapshot import SnapshotWriter
from daskps.mem.store import RowStore, in_reading_order, store_bytes
from daskps.types import Floats, Keys

EVICT_SHIFT = 6  # at least 1/64 of the cache leaves at once, so that write-backs are long


class CachedStore:
    """`cache` over `store`, with the buffers between them."""

    def __init__(
        self, budget: budgets.Budget, store: RowStore, initial: Callable[[Keys, Floats], None], pool: ComputePool
    ) -> None:
        self.budget = budget
        self.left = budget  # of it, since the cache has given memory to the store's index
        self.store = store
        self.cache = Cache(budget, pool)
        self.snapshot: SnapshotWriter | None = None
        self._initial = initial
        self._row_bytes = budget.row_bytes + 8  # on disk a row has its key with it
        width = budget.row_bytes // 4
        self._staging: Floats = anonymous((budget.staging_rows, width), np.float32)
        self._staging_keys: Keys = anonymous((budget.staging_rows,), np.uint64)
        self._copies: Floats = anonymous((budget.copy_rows, width), np.float32)
        self._copy_keys: Keys = anonymous((budget.copy_rows,), np.uint64)

    @property
    def used_bytes(self) -> int:
        """What is in use now, at most: the parts of the budget less what was given to the store's index, and that."""
        return self.left.used_bytes - self.left.store_bytes + store_bytes(self.store)

    def take(self, keys: Keys, batch: int, out: Floats | None, counters: Counter[str]) -> Visit:
        """Pin the rows of distinct keys for `batch`, all of them in memory afterwards; free ones also go to `out`.

        If it raises, nothing is pinned.
        """
        demoted = self.cache.recent.demoted
        visit = self.cache.visit(keys, batch, out)
        if visit is None:
            raise ArgumentError(f"the pull of batch {batch} names a key twice; pull distinct keys")
        try:
            self._bring_in(keys, visit, batch, out, counters)
        except BaseException:
            self.cache.unpin(visit.slots, batch)
            raise
        self.cache.age(len(keys))
        counters.update(hits=visit.found, late=len(visit.late), lru_victims=self.cache.recent.demoted - demoted)
        return visit

    def _bring_in(self, keys: Keys, visit: Visit, batch: int, out: Floats | None, counters: Counter[str]) -> None:
        """Load or make what is not cached, in pieces of the staging buffer."""
        if len(visit.missing) > len(self._staging):
            in_reading_order(self.store, keys, visit.missing, budgets.ORDERED_PIECES * len(self._staging))
        for start in range(0, len(visit.missing), len(self._staging)):
            positions = visit.missing[start : start + len(self._staging)]
            self._make_room(len(positions), counters)
            rows, found = self._load(keys[positions])
            if self.cache.insert(keys, positions, visit.slots, batch) < len(positions):
                raise ArgumentError(f"the pull of batch {batch} names a key twice; pull distinct keys")
            self.cache.fill(visit.slots, positions, rows, out)
            counters.update(misses=found, new_keys=len(positions) - found, bytes_read=found * self._row_bytes)

    def _load(self, keys: Keys) -> tuple[Floats, int]:
        """Rows of keys that are not cached, in the staging buffer, and how many the store had."""
        rows, found = self.store.load(keys, out=self._staging[: len(keys)])
        known = int(np.count_nonzero(found))
        if known == 0:
            self._initial(keys, rows)
        elif known < len(keys):
            unknown = np.flatnonzero(~found)
            made = np.empty((len(unknown), rows.shape[1]), np.float32)
            self._initial(keys[unknown], made)
            rows[unknown] = made
        return rows, known

    def _make_room(self, rows: int, counters: Counter[str]) -> None:
        """Evict until `rows` more fit: LFU's least visited leave, the dirty ones among them by one append."""
        while (short := rows - (self.cache.cache_rows - self.cache.cached_rows)) > 0:
            wanted = min(max(short, self.cache.cache_rows >> EVICT_SHIFT), len(self._staging))
            victims = self.cache.victims(wanted)
            if len(victims) == 0:  # what is not pinned was pushed after the snapshot that is being written
                if self.snapshot is None:
                    raise CapacityError(
                        f"all {self.cache.cached_rows:,} cached rows are pinned, {short:,} more must fit"
                    )
                counters["forced_flushes"] += 1
                self.finish_snapshot()
                continue
            dirty = self.cache.select(victims, DIRTY)
            if len(dirty):
                keys, copies = self._staging_keys[: len(dirty)], self._staging[: len(dirty)]
                self.cache.gather(dirty, copies, keys)
                self.store.append(keys, copies)
            self.cache.remove(victims)
            counters.update(
                lfu_victims=len(victims), written_back=len(dirty), bytes_written=len(dirty) * self._row_bytes
            )

    def give_way(self, counters: Counter[str], least_rows: int) -> Slots | None:
        """Shrink the cache and its buffers as far as the store's index has grown, if pins and `least_rows` allow it.

        Returns where rows have moved: entry i is the new slot of what was in slot ``cache_rows + i``; None if none did.
        """
        over = self.used_bytes - self.budget.memory_bytes
        if over <= 0:
            return None
        before = self.cache.cache_rows
        drop = max(-(-over // self.budget.freed_row_bytes), before >> EVICT_SHIFT)
        floor = max(self.cache.pinned_rows, least_rows, 1)
        rows = max(before - drop, floor)
        while rows > floor and (short := over - self.left.used_bytes + self._shrunk(rows).used_bytes) > 0:
            # Buffers go down in steps, and copies for a snapshot not at all.
            rows = max(floor, rows - max(1, short // self.budget.freed_row_bytes))
        if rows >= before:
            return None
        self._make_room(before - rows, counters)
        moved = self.cache.shrink(rows)
        if self.snapshot is not None:
            self.snapshot.look_again()
        self._shrink_buffers(rows)
        return moved

    def _shrunk(self, rows: int) -> budgets.Budget:
        return self.budget.shrunk(rows, None if self.snapshot is None else len(self._copies))

    def _shrink_buffers(self, rows: int) -> None:
        """Staging for a cache of so many rows; the copies too, unless a snapshot uses them."""
        self.left = self._shrunk(rows)
        for buffer in (self._staging, self._staging_keys):
            release(buffer, self.left.staging_rows)
        for buffer in (self._copies, self._copy_keys):
            release(buffer, self.left.copy_rows)
        self._staging = self._staging[: self.left.staging_rows]
        self._staging_keys = self._staging_keys[: self.left.staging_rows]
        self._copies = self._copies[: self.left.copy_rows]
        self._copy_keys = self._copy_keys[: self.left.copy_rows]

    def push(self, slots: Slots, rows: Floats, batch: int) -> None:
        """Take trained rows back, after the snapshot has its copies."""
        if self.snapshot is not None:
            self.snapshot.save(slots)
        self.cache.push(slots, rows, batch)

    def lookup(self, keys: Keys, out: Floats) -> None:
        """Rows of distinct keys as last pushed, or as they would begin. Changes nothing in the cache."""
        missing = np.flatnonzero(self.cache.find(keys, out) == NONE)
        for start in range(0, len(missing), len(self._staging)):
            positions = missing[start : start + len(self._staging)]
            out[positions] = self._load(keys[positions])[0]

    def begin_snapshot(self, snapshot_id: str) -> None:
        """Rows as they are now become snapshot `snapshot_id`, piece by piece."""
        self.snapshot = SnapshotWriter(snapshot_id, self.cache, self.store, self._copy_keys, self._copies)

    def step_snapshot(self) -> bool:
        """Write one piece; True when nothing is left to do."""
        if self.snapshot is not None and self.snapshot.step():
            self.snapshot = None
        return self.snapshot is None

    def finish_snapshot(self) -> None:
        """Write the rest."""
        while not self.step_snapshot():
            pass
