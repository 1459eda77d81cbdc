"""MEM-PS, the memory tier: the rows of one table that one node owns, in a cache in front of the disk tier.

The size of the cache never changes the result of training.

Input: pulls and pushes of whole working sets, by batch and node. Output: the `PullReply` values that have become ready,
and snapshots prepared in the store. This module has no threads, clocks or sockets, so a test can simulate any number of
nodes: the caller uses a `MemPS` from one thread at a time, sends the replies to their nodes, and may write pieces of
a snapshot on another thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from threading import Lock

import numpy as np

from daskps.budget import ORDERED_PIECES, CacheBudget, Term, capacity_error, largest_cache, total_bytes
from daskps.device.memory import anonymous, release
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, ConfigError, ProtocolError, StaleError
from daskps.mem import inflight
from daskps.mem.cache import BATCHES_IN_FLIGHT, DIRTY, NONE, PENDING, BatchStatistics, Cache, EntryIds, PullReply, Visit
from daskps.mem.eviction import DEFAULT_POLICY
from daskps.mem.inflight import PinnedBatch, Pull, Push, UnitedKeys
from daskps.storage.row_store import RowStore
from daskps.types import Floats, Keys, RowLayout


class SnapshotPiece:
    """Work for a snapshot that may run on any thread while MEM-PS serves requests: an append, or the store's `prepare`.

    Only the first call does the work; a second one waits for it. A call that raised may be repeated.
    """

    def __init__(self, work: Callable[[], object], ids: EntryIds | None = None) -> None:
        self.ids = ids  # entries whose rows are appended; None for `prepare`, the last piece
        self._work: Callable[[], object] | None = work
        self._lock = Lock()

    def __call__(self) -> None:
        """Do the work, unless it is done."""
        with self._lock:
            if self._work is not None:
                self._work()
                self._work = None


class SnapshotWriter:
    """The writer of one snapshot, which copies dirty rows to the store in pieces while training goes on.

    `keys` and `rows` are the buffers, part of the memory budget: one half is written to the store while the other one
    is filled. The rows of a piece stay dirty in the cache until it is written. Pieces and evictions may append the same
    row: no row pushed after the snapshot began is appended before the store has prepared it, so both are equal.
    """

    def __init__(self, snapshot_id: str, cache: Cache, store: RowStore, keys: Keys, rows: Floats) -> None:
        self.snapshot_id = snapshot_id
        self.prepared = False
        self._cache, self._store = cache, store
        middle = len(keys) // 2
        self._filling = keys[middle:], rows[middle:]
        self._spare = keys[:middle], rows[:middle]  # being written, or free
        self._count = 0  # rows in `_filling` that were copied before a push replaced them in the cache
        self._cursor = 0  # entries below this one have no pending row, but for those of `piece`
        self.piece: SnapshotPiece | None = None  # returned by `next_piece`, not yet reported as written
        cache.mark_pending()
        cache.flushing = True

    def next_piece(self) -> SnapshotPiece:
        """Return the next piece to write; the same one again until it is reported as written."""
        if self.piece is None:
            if not len(self._filling[0]):  # one row of buffer in all
                self._filling, self._spare = self._spare, self._filling
            ids = self._cache.list_pending(self._cursor, len(self._filling[0]) - self._count)
            stop = self._gather(ids)
            if stop:
                keys, rows = self._filling[0][:stop], self._filling[1][:stop]
                self.piece = SnapshotPiece(lambda: self._store.append(keys, rows), ids)
                self._filling, self._spare = self._spare, self._filling
                self._count = 0
                self._cursor = int(ids[-1]) + 1 if len(ids) else self._cursor
            else:
                self.piece = SnapshotPiece(lambda: self._store.prepare(self.snapshot_id))
        return self.piece

    def written(self, piece: SnapshotPiece) -> None:
        """Take note that a piece is written. Does nothing if that was noted before."""
        if piece is not self.piece:
            return
        self.piece = None
        if piece.ids is not None:
            self._cache.mark_stored(piece.ids)
        else:
            self._cache.flushing, self.prepared = False, True

    def save(self, ids: EntryIds) -> None:
        """Copy those of the rows that the snapshot still needs, before a push overwrites them (copy on write)."""
        pending = self._cache.select(ids, DIRTY | PENDING)
        while len(pending):
            if self._count == len(self._filling[0]):
                self._write_copies()
            run = pending[: len(self._filling[0]) - self._count]
            self._count = self._gather(run)
            pending = pending[len(run) :]

    def look_again(self) -> None:
        """Search from the first entry again, because rows have moved to other entries. No piece may be unfinished."""
        self._cursor = 0

    def _gather(self, ids: EntryIds) -> int:
        """Copy rows behind those in the buffer that is being filled; return how many it has then."""
        keys, rows = self._filling
        stop = self._count + len(ids)
        self._cache.gather(ids, rows[self._count : stop], keys[self._count : stop])
        return stop

    def _write_copies(self) -> None:
        """Empty the buffer that is being filled: append what it has, or take the other one if it has no room at all."""
        keys, rows = self._filling
        if self._count:
            self._store.append(keys[: self._count], rows[: self._count])
            self._count = 0
        else:
            if self.piece is not None:  # it has the other buffer
                self.piece()
                self.written(self.piece)
            self._filling, self._spare = self._spare, self._filling


EVICT_SHIFT = 6  # evict at least 1/64 (2^-6) of the cache at once, so that writes are long


class CachedStore:
    """The cache, the store behind it, and the buffers for rows on their way between the two."""

    def __init__(
        self,
        budget: CacheBudget,
        store: RowStore,
        initial: Callable[[Keys, Floats], None],
        pool: ComputePool,
        eviction: str,
    ) -> None:
        self.budget = budget
        self.left = budget  # what remains of `budget` after the cache has shrunk for the store's index
        self.store = store
        self.cache = Cache(budget, pool, eviction)
        self.snapshot: SnapshotWriter | None = None
        self._initial = initial
        self._row_bytes = budget.row_bytes + 8  # bytes on disk: the row and its key
        width = budget.row_bytes // 4
        self._staging: Floats = anonymous((budget.staging_rows, width), np.float32)
        self._staging_keys: Keys = anonymous((budget.staging_rows,), np.uint64)
        self._copies: Floats = anonymous((budget.copy_rows, width), np.float32)
        self._copy_keys: Keys = anonymous((budget.copy_rows,), np.uint64)

    @property
    def used_bytes(self) -> int:
        """Return an upper bound of the bytes in use: the sum of all terms."""
        return total_bytes(self.terms())

    def terms(self, table: str = "") -> list[Term]:
        """Return the terms of the memory in use: index and write buffers of the store, cache and its buffers."""
        return [*self._store_terms(table), *self.left.cache_terms(table)]

    def terms_for(self, rows: int, table: str = "") -> list[Term]:
        """Return the terms that a batch of `rows` distinct rows would need."""
        needed = self.budget.for_batch(rows, self.store.memory_bytes)
        return [*self._store_terms(table), *needed.cache_terms(table)]

    def _store_terms(self, table: str) -> list[Term]:
        buffers = self.store.buffer_bytes
        sizes = {"index": self.store.memory_bytes - buffers, "write buffers": buffers}
        return [Term(name, size, table=table) for name, size in sizes.items()]

    def take(self, keys: Keys, batch: int, out: Floats | None, counters: Counter[str]) -> Visit:
        """Pin the rows of distinct keys for `batch`; load or initialize those that are not in memory.

        Rows that no earlier batch holds are also copied to `out`. If it raises, nothing is pinned.
        """
        visit = self.cache.visit(keys, batch, out)
        if visit is None:
            raise ArgumentError(f"the pull of batch {batch} names a key twice; pull distinct keys")
        try:
            self._load_missing(keys, visit, batch, out, counters)
        except BaseException:
            self.cache.unpin(visit.ids, batch)
            raise
        counters.update(hits=visit.found, late=len(visit.deferred))
        return visit

    def _load_missing(self, keys: Keys, visit: Visit, batch: int, out: Floats | None, counters: Counter[str]) -> None:
        """Load or initialize the rows that are not cached, in pieces of the size of the staging buffer."""
        if len(visit.missing) > len(self._staging):
            self._sort_for_reading(keys, visit.missing, ORDERED_PIECES * len(self._staging))
        for start in range(0, len(visit.missing), len(self._staging)):
            positions = visit.missing[start : start + len(self._staging)]
            self._make_room(len(positions), counters)
            rows, found = self._load(keys[positions])
            if self.cache.insert(keys, positions, visit.ids, batch) < len(positions):
                raise ArgumentError(f"the pull of batch {batch} names a key twice; pull distinct keys")
            self.cache.fill(visit.ids, positions, rows, out)
            counters.update(misses=found, new_keys=len(positions) - found, bytes_read=found * self._row_bytes)

    def _sort_for_reading(self, keys: Keys, positions: EntryIds, run: int) -> None:
        """Sort the positions, `run` at a time, so that each piece of ``keys[positions]`` reads few files.

        Otherwise every piece of a large batch would read all files.
        """
        for start in range(0, len(positions), run):
            part = positions[start : start + run]
            part[:] = part[self.store.reading_order(keys[part])]

    def _load(self, keys: Keys) -> tuple[Floats, int]:
        """Return the rows of keys that are not cached, in the staging buffer, and how many of them the store had."""
        rows = self._staging[: len(keys)]
        found = self.store.start_load(keys, np.arange(len(keys), dtype=np.uint32), rows).wait()
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
        """Evict rows until `rows` more fit; write dirty ones to the store."""
        while (short := rows - (self.cache.cache_rows - self.cache.cached_rows)) > 0:
            wanted = min(max(short, self.cache.cache_rows >> EVICT_SHIFT), len(self._staging))
            victims = self.cache.victims(wanted)
            if len(victims) == 0:  # every row is pinned, or was pushed after the snapshot being written began
                if self.snapshot is None:
                    raise capacity_error(
                        f"all {self.cache.cached_rows:,} cached rows are pinned, {short:,} more must fit",
                        self.terms_for(self.cache.cached_rows + short),
                        {"memory_bytes": self.budget.memory_bytes},
                        "raise budget.memory_bytes, or use smaller batches",
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
            counters.update(evicted=len(victims), written_back=len(dirty), bytes_written=len(dirty) * self._row_bytes)

    def shrink_for_index(self, counters: Counter[str], least_rows: int) -> EntryIds | None:
        """Shrink the cache and its buffers by as much as the index of the store has grown.

        The cache keeps room for the pinned rows and at least `least_rows`. Returns where rows have moved (item i is the
        new number of entry ``cache_rows + i``), or None if the cache did not shrink.
        """
        over = self.used_bytes - self.budget.memory_bytes
        if over <= 0:
            return None
        before = self.cache.cache_rows
        drop = max(-(-over // self.budget.freed_row_bytes), before >> EVICT_SHIFT)
        floor = max(self.cache.pinned_rows, least_rows, 1)
        rows = max(before - drop, floor)
        while rows > floor and (short := over - self.left.used_bytes + self._shrunk(rows).used_bytes) > 0:
            # Buffer sizes are whole rows, and the copies for a snapshot being written cannot shrink: take off more.
            rows = max(floor, rows - max(1, short // self.budget.freed_row_bytes))
        if rows >= before:
            return None
        self._finish_piece()
        self._make_room(before - rows, counters)
        moved = self.cache.shrink(rows)
        if self.snapshot is not None:
            self.snapshot.look_again()
        self._shrink_buffers(rows)
        return moved

    def _shrunk(self, rows: int) -> CacheBudget:
        return self.budget.shrunk(rows, None if self.snapshot is None else len(self._copies))

    def _shrink_buffers(self, rows: int) -> None:
        """Shrink the staging buffer to a cache of `rows` rows, and the copies too, unless a snapshot uses them."""
        self.left = self._shrunk(rows)
        for buffer in (self._staging, self._staging_keys):
            release(buffer, self.left.staging_rows)
        for buffer in (self._copies, self._copy_keys):
            release(buffer, self.left.copy_rows)
        self._staging = self._staging[: self.left.staging_rows]
        self._staging_keys = self._staging_keys[: self.left.staging_rows]
        self._copies = self._copies[: self.left.copy_rows]
        self._copy_keys = self._copy_keys[: self.left.copy_rows]

    def push(self, ids: EntryIds, rows: Floats, batch: int) -> None:
        """Store trained rows in the cache. A snapshot being written first copies the old values that it needs."""
        if self.snapshot is not None:
            self.snapshot.save(ids)
        self.cache.push(ids, rows, batch)

    def lookup(self, keys: Keys, out: Floats) -> None:
        """Copy rows of distinct keys to `out`: as last pushed, or the initial value of a new key. Changes no state."""
        missing = np.flatnonzero(self.cache.find(keys, out) == NONE)
        for start in range(0, len(missing), len(self._staging)):
            positions = missing[start : start + len(self._staging)]
            out[positions] = self._load(keys[positions])[0]

    def begin_snapshot(self, snapshot_id: str) -> None:
        """Begin to write the rows as they are now as snapshot `snapshot_id`; `next_piece` has the pieces."""
        self.snapshot = SnapshotWriter(snapshot_id, self.cache, self.store, self._copy_keys, self._copies)

    def next_piece(self) -> SnapshotPiece | None:
        """Return the next piece of the snapshot to write, None if there is nothing left to write."""
        return None if self.snapshot is None else self.snapshot.next_piece()

    def piece_written(self, piece: SnapshotPiece) -> None:
        """Take note that a piece of the snapshot is written."""
        if self.snapshot is not None:
            self.snapshot.written(piece)
            if self.snapshot.prepared:
                self.snapshot = None

    def _finish_piece(self) -> None:
        """Write the piece that another thread has, or wait until that thread has written it."""
        if self.snapshot is not None and (piece := self.snapshot.piece) is not None:
            piece()
            self.piece_written(piece)

    def finish_snapshot(self) -> None:
        """Write the rest of the snapshot."""
        while (piece := self.next_piece()) is not None:
            piece()
            self.piece_written(piece)


MAX_NODES = 64  # the holders of a key are the bits of one 64-bit word
KEPT_STATISTICS = 1024  # batches whose statistics are kept


class MemPS:
    """The rows of one table that this node owns: in memory as many as fit, the others in `store`.

    `initial(keys, out)` writes the initial rows of keys that are new.
    """

    def __init__(
        self,
        *,
        layout: RowLayout,
        store: RowStore,
        initial: Callable[[Keys, Floats], None],
        memory_bytes: int,
        pool: ComputePool,
        nodes: int = 1,
        run: str = "",
        incarnation: int = 0,
        first_batch: int = 0,
        eviction: str = DEFAULT_POLICY,
        remedy: Callable[[MemPS, int], str] | None = None,
    ) -> None:
        """Allocate the cache. `remedy(self, rows)` returns what an error tells the user when `rows` rows do not fit."""
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigError(f"a partition serves 1 to {MAX_NODES} nodes, got {nodes}")
        self.budget = largest_cache(
            memory_bytes,
            store_bytes=store.memory_bytes,
            row_bytes=layout.row_bytes,
            nodes=nodes,
        )
        self.layout, self.nodes, self.run, self.incarnation = layout, nodes, run, incarnation
        self.statistics: deque[BatchStatistics] = deque(maxlen=KEPT_STATISTICS)  # of batches that have ended
        self.made_rows = 0  # rows of new keys, in batches that have ended
        self._remedy = remedy
        self._rows = CachedStore(self.budget, store, initial, pool, eviction)
        self._next_pull = [first_batch] * nodes  # for each node: the batch that it must pull next
        self._next_answer = first_batch
        self._newest_push = first_batch - 1  # the newest batch of which pushed rows are in the cache
        self._pulls: dict[int, dict[int, Pull]] = {}  # registered but not answered, by batch and node
        self._united: UnitedKeys | None = None  # of batch `_next_answer`, once all its pulls are in
        self._pinned: dict[int, PinnedBatch] = {}  # answered but not ended, in batch order
        self._planned: tuple[int, str] | None = None  # snapshot that has not begun: its batch and its id
        self._counters: dict[int, Counter[str]] = {}
        self._carried: Counter[str] = Counter()  # counts from writing snapshots, added to those of the next batch
        self._ready: list[PullReply] = []  # replies that the next pull or push returns

    @property
    def cache_rows(self) -> int:
        """Return the capacity of the cache in rows. It shrinks when the index of the store grows."""
        return self._rows.cache.cache_rows

    @property
    def batch_rows(self) -> int:
        """Return the largest number of distinct rows, over all nodes, that one batch may pull."""
        return min(self.cache_rows, self._rows.left.flight_rows)

    @property
    def freed_row_bytes(self) -> int:
        """Return the bytes that the cache releases per row when it shrinks."""
        return self.budget.freed_row_bytes

    @property
    def cached_rows(self) -> int:
        """Return the number of rows in memory now."""
        return self._rows.cache.cached_rows

    @property
    def pinned_rows(self) -> int:
        """Return the number of rows that batches in flight hold now."""
        return self._rows.cache.pinned_rows

    @property
    def used_bytes(self) -> int:
        """Return an upper bound of the memory in use, including the index of the store; at most `memory_bytes`."""
        return self._rows.used_bytes

    def terms_for(self, rows: int, table: str = "") -> list[Term]:
        """Return the memory terms that a batch of `rows` distinct rows would need."""
        return self._rows.terms_for(rows, table)

    # ---------------------------------------------------------------- pull

    def pull(
        self,
        keys: Keys,
        batch: int,
        node: int = 0,
        *,
        out: Floats | None = None,
        run: str | None = None,
        incarnation: int | None = None,
    ) -> list[PullReply]:
        """Register a node's working set (distinct keys) for `batch` and return the replies that have become ready.

        A batch is answered when all nodes have pulled it and all earlier ones, and its rows fit beside the pinned ones.
        If `out` is given, row i is written to out[i]. `keys` and `out` are used until the last delivery of the batch.
        """
        self._check_token(run, incarnation, node)
        if batch != self._next_pull[node]:
            kind = StaleError if batch < self._next_pull[node] else ProtocolError
            raise kind(f"node {node} pulls batch {batch}, but its next one is {self._next_pull[node]}; pull in order")
        if keys.dtype != np.uint64 or keys.ndim != 1 or not keys.flags.c_contiguous:
            raise ArgumentError(f"keys must be one contiguous run of uint64, got {keys.dtype} of shape {keys.shape}")
        if out is not None:
            self._check_rows("out", out, len(keys))
        self._check_size(len(keys), batch)
        self._pulls.setdefault(batch, {})[node] = Pull(node, keys, out)
        self._next_pull[node] += 1
        try:
            self._answer()
        except Exception:
            if batch >= self._next_answer:  # not answered yet: undo the registration
                del self._pulls[batch][node]
                self._next_pull[node] -= 1
                self._united = None
            raise
        return self._take_ready()

    def _check_token(self, run: str | None, incarnation: int | None, node: int) -> None:
        if (run is not None and run != self.run) or (incarnation is not None and incarnation != self.incarnation):
            raise StaleError(
                f"a message of run {run!r}, incarnation {incarnation}, but this is run {self.run!r}, incarnation "
                f"{self.incarnation}; drop it"
            )
        if not 0 <= node < self.nodes:
            raise ProtocolError(f"node {node} is not one of the {self.nodes} nodes of this run")

    def _check_rows(self, name: str, rows: Floats, count: int) -> None:
        shape = (count, self.layout.width)
        if rows.dtype != np.float32 or rows.shape != shape or not rows.flags.c_contiguous:
            raise ArgumentError(f"{name} must be contiguous float32 of shape {shape}, got {rows.dtype} {rows.shape}")

    def _check_size(self, rows: int, batch: int) -> None:
        if rows > self.batch_rows:
            raise capacity_error(
                f"batch {batch} pulls {rows:,} distinct rows, but memory_bytes={self.budget.memory_bytes:,} holds at "
                f"most {self.batch_rows:,} of one batch ({self.budget.row_bytes} bytes each, and their bookkeeping)",
                self._rows.terms_for(rows),
                {"memory_bytes": self.budget.memory_bytes},
                self._remedy(self, rows) if self._remedy else "make the batch smaller, or raise memory_bytes",
            )

    def _answer(self) -> None:
        """Answer batches in order, as long as the next one is pulled by all nodes and fits."""
        while len(self._pulls.get(self._next_answer, ())) == self.nodes:
            batch = self._next_answer
            if self._united is None:
                pulls = self._pulls[batch]
                self._united = UnitedKeys([pulls[node] for node in range(self.nodes)], self._rows.cache.pool.buffers)
                self._counters[batch], self._carried = self._carried, Counter()
            self._shrink_for_index(self._counters[batch])
            self._check_size(len(self._united), batch)
            if not self._fits(self._united, batch):
                self._counters[batch]["waits"] = 1
                return
            self._open(self._united, batch)

    def _shrink_for_index(self, counters: Counter[str]) -> None:
        before = self.cache_rows
        moved = self._rows.shrink_for_index(counters, self._min_cache_rows())
        counters["given_rows"] += before - self.cache_rows
        if moved is not None:
            for pinned in self._pinned.values():
                pinned.move(self.cache_rows, moved)

    def _min_cache_rows(self) -> int:
        """Return the smallest cache size (rows) at which the bookkeeping of the batches in flight still fits."""
        in_flight = sum(len(pinned.ids) for pinned in self._pinned.values())
        shrinks = self.budget.flight_rows >= self.budget.cache_rows
        return -(-in_flight * self.budget.cache_rows // self.budget.flight_rows) if shrinks else 0

    def _fits(self, united: UnitedKeys, batch: int) -> bool:
        if not self._pinned:
            return True
        in_flight = sum(len(pinned.ids) for pinned in self._pinned.values())
        if batch - min(self._pinned) >= BATCHES_IN_FLIGHT or in_flight + len(united) > self._rows.left.flight_rows:
            return False
        cache = self._rows.cache
        pinned = cache.pinned_rows + len(united)
        return pinned <= cache.cache_rows or pinned - cache.count_pinned(united.keys) <= cache.cache_rows

    def _open(self, united: UnitedKeys, batch: int) -> None:
        """Pin the rows of a batch and create its first replies."""
        alone = united.pulls[0] if self.nodes == 1 else None
        out = None if alone is None else alone.out
        if alone is not None and out is None:
            out = np.empty((len(united), self.layout.width), np.float32)
        visit = self._rows.take(united.keys, batch, out, self._counters[batch])
        pinned = PinnedBatch(batch, visit.ids, len(united))
        if alone is not None:
            assert out is not None
            self._ready.append(inflight.first_alone(alone, visit, pinned, out))
        else:
            pinned.united, pinned.pushed = united, np.zeros(len(united), np.uint8)
            previous = self._pinned.get(batch - 1)
            self._ready += inflight.first_shared(united, visit, pinned, previous, self._rows.cache)
            united.forget_pulls()
        self._pinned[batch] = pinned
        self._united = None
        del self._pulls[batch]
        self._next_answer += 1
        for other in self._pinned:
            self._counters[other]["pinned_rows"] = max(self._counters[other]["pinned_rows"], self.pinned_rows)
        self._close_if_ended(pinned)
        self._begin_if_due()

    def _take_ready(self) -> list[PullReply]:
        ready, self._ready = self._ready, []
        return ready

    # ---------------------------------------------------------------- push

    def push(
        self,
        keys: Keys,
        rows: Floats,
        batch: int,
        node: int = 0,
        *,
        run: str | None = None,
        incarnation: int | None = None,
    ) -> list[PullReply]:
        """Store rows that `batch` has trained and return the replies that have become ready.

        `node` pushes the keys of which it is the holder of lowest rank, in any order, in one call or several. A push
        that breaks the protocol raises and changes nothing. Nodes do not run in lockstep: a push that arrives before
        all earlier batches have ended is kept, without a copy of its rows, until they have.
        """
        self._check_token(run, incarnation, node)
        self._check_rows("rows", rows, len(keys))
        pinned = self._pinned.get(batch)
        if pinned is None:
            if batch >= self._next_answer:
                raise ProtocolError(f"node {node} pushes batch {batch}, which has not been pulled yet")
            if len(keys):
                raise StaleError(f"node {node} pushes batch {batch}, whose rows have all been pushed; drop it")
            return self._take_ready()  # a node that has no row to push may come after the batch has ended
        if self.nodes == 1 and batch != min(self._pinned):
            raise ProtocolError(f"batch {batch} is pushed, but {min(self._pinned)} is not over; push in batch order")
        pinned.kept_pushes.append(Push(pinned.claim(keys, node, self._rows.cache), rows))
        self._store_pushes()
        self._answer()
        return self._take_ready()

    def _store_pushes(self) -> None:
        """Store the pushes of the oldest batch; when it has ended, those of the next, and so on."""
        while self._pinned and (oldest := self._pinned[min(self._pinned)]).kept_pushes:
            for push in oldest.kept_pushes:
                self._rows.push(push.ids, push.rows, oldest.batch)
                oldest.remaining -= len(push.ids)
            oldest.kept_pushes = []
            self._newest_push = oldest.batch
            for later in self._pinned.values():
                self._ready += inflight.deferred_rows(later, oldest.batch, self._rows.cache)
            self._close_if_ended(oldest)
            self._begin_if_due()

    def _close_if_ended(self, pinned: PinnedBatch) -> None:
        if pinned.remaining:
            return
        del self._pinned[pinned.batch]
        counters = self._counters.pop(pinned.batch)
        self.made_rows += counters["new_keys"]
        names = BatchStatistics.__dataclass_fields__
        self.statistics.append(
            BatchStatistics(batch=pinned.batch, **{name: counters[name] for name in names if name != "batch"})
        )

    # ------------------------------------------------------------- evaluation

    def lookup(self, keys: Keys, out: Floats | None = None) -> Floats:
        """Return rows of distinct keys as last pushed, or the initial value of a new key. Changes no state."""
        if out is None:
            out = np.empty((len(keys), self.layout.width), np.float32)
        self._check_rows("out", out, len(keys))
        self._rows.lookup(keys, out)
        return out

    # --------------------------------------------------------------- snapshots

    @property
    def flushing(self) -> bool:
        """Return True if a snapshot is being written, or will be when its batch has ended."""
        return self._planned is not None or self._rows.snapshot is not None

    def flush(self, batch: int, snapshot_id: str) -> None:
        """Prepare a snapshot in the store that holds every push up to `batch` and none after it."""
        self.flush_begin(batch, snapshot_id)
        if self._planned is not None:
            self._planned = None
            raise ProtocolError(
                f"flush({batch}), but its rows are not all pushed: in flight are {list(self._pinned)}, the next to be "
                f"answered is {self._next_answer}; call it later, or flush_begin now"
            )
        self.flush_finish()

    def flush_begin(self, batch: int, snapshot_id: str) -> None:
        """Begin a snapshot after `batch` as soon as `batch` has ended, which may be now; `flush_step` writes it."""
        if self.flushing:
            raise ProtocolError(f"flush({batch}), but an earlier snapshot is not finished; call flush_finish first")
        if self._newest_push > batch:
            raise ProtocolError(
                f"flush({batch}) comes too late: rows of batch {self._newest_push} have been pushed; call it before"
            )
        self._planned = (batch, snapshot_id)
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self._planned is None:
            return
        batch, snapshot_id = self._planned
        if batch < min(self._pinned, default=self._next_answer):
            self._rows.begin_snapshot(snapshot_id)
            self._planned = None

    def next_piece(self) -> SnapshotPiece | None:
        """Return the next piece of the snapshot to write, None if no snapshot has begun or nothing of it is left.

        Call it on any thread, meanwhile serve requests, then report it with `piece_written`.
        """
        return self._rows.next_piece()

    def piece_written(self, piece: SnapshotPiece) -> None:
        """Take note that a piece is written. The store's index may have grown, so the cache may shrink."""
        self._rows.piece_written(piece)
        self._shrink_for_index(self._carried)

    def flush_step(self) -> bool:
        """Write one piece of the snapshot, if it has begun.

        Returns True when the store has prepared it, or if there is none.
        """
        piece = self.next_piece()
        if piece is not None:
            piece()
            self.piece_written(piece)
        else:
            self._shrink_for_index(self._carried)
        return not self.flushing

    def flush_finish(self) -> None:
        """Write the rest of the snapshot, which must have begun already."""
        if self._planned is not None:
            raise ProtocolError(f"the snapshot of batch {self._planned[0]} has not begun: its rows are not all pushed")
        while not self.flush_step():
            pass

    def close(self) -> None:
        """Release the memory. Rows pushed after the last snapshot are lost: the incarnation ends here."""
        self.__dict__.pop("_rows", None)
        self._pinned = {}
