"""MEM-PS: one node's partition of one table, a bounded cache over the disk tier that never changes a result.

In: pulls and pushes of whole working sets, by batch and node. Out: `Delivery` values that have become ready, and
snapshots prepared in the store. There are no threads, clocks or sockets in here, so a test can play any number of
nodes: the owner of a `MemPS` calls it from one thread at a time and carries the deliveries to their nodes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from daskps.backend.pool import ComputePool
from daskps.errors import ArgumentError, CapacityError, ConfigError, ProtocolError, StaleError
from daskps.mem import budget as budgets
from daskps.mem.cache import BATCHES_IN_FLIGHT, DIRTY, EVICT_SHIFT, NONE, Cache, Slots, Visit, anonymous
from daskps.mem.delivery import NOBODY, NOWHERE, BatchStatistics, Delivery, Positions
from daskps.mem.flight import Flight, Pull, Waiting, WorkingSet
from daskps.mem.snapshot import SnapshotWriter
from daskps.mem.store import RowStore, store_bytes
from daskps.types import Bools, Floats, Keys, RowLayout

MAX_NODES = 64  # holders of a key are bits of one word
KEPT_STATISTICS = 1024  # batches


class MemPS:
    """The rows of one partition: in memory what fits, the rest in `store`; `initial(keys, out)` makes unknown ones."""

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
        epoch: int = 0,
        first_batch: int = 0,
        lru_share: float = 0.1,
    ) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigError(f"a partition serves 1 to {MAX_NODES} nodes, got {nodes}")
        self.budget = budgets.split(
            memory_bytes,
            store_bytes=store_bytes(store),
            row_bytes=layout.row_bytes,
            nodes=nodes,
            lru_share=lru_share,
        )
        self.layout, self.store, self.nodes, self.run, self.epoch = layout, store, nodes, run, epoch
        self.statistics: deque[BatchStatistics] = deque(maxlen=KEPT_STATISTICS)  # of batches that are over
        self._initial = initial
        self._cache = Cache(self.budget, pool)
        self._staging: Floats = anonymous((self.budget.staging_rows, layout.width), np.float32)
        self._staging_keys: Keys = anonymous((self.budget.staging_rows,), np.uint64)
        self._copies: Floats = anonymous((self.budget.copy_rows, layout.width), np.float32)
        self._copy_keys: Keys = anonymous((self.budget.copy_rows,), np.uint64)
        self._next_pull = [first_batch] * nodes  # of each node: the batch it must pull next
        self._next_answer = first_batch
        self._newest_push = first_batch - 1
        self._pulls: dict[int, dict[int, Pull]] = {}  # registered, not answered: batch, node
        self._united: WorkingSet | None = None  # of batch `_next_answer`, once all its pulls are in
        self._flights: dict[int, Flight] = {}  # answered, not over; in batch order
        self._snapshot: SnapshotWriter | None = None
        self._counters: dict[int, Counter[str]] = {}
        self._ready: list[Delivery] = []

    @property
    def cache_rows(self) -> int:
        """Rows that fit in memory."""
        return self.budget.cache_rows

    @property
    def batch_rows(self) -> int:
        """The largest working set, over all nodes, that can be pulled at once."""
        return min(self.budget.cache_rows, self.budget.flight_rows)

    @property
    def cached_rows(self) -> int:
        """Rows that are in memory now."""
        return self._cache.cached_rows

    @property
    def pinned_rows(self) -> int:
        """Rows that batches in flight hold now."""
        return self._cache.pinned_rows

    @property
    def flushing(self) -> bool:
        """A snapshot is being written."""
        return self._snapshot is not None

    # ---------------------------------------------------------------- pull

    def pull(
        self,
        keys: Keys,
        batch: int,
        node: int = 0,
        *,
        out: Floats | None = None,
        run: str | None = None,
        epoch: int | None = None,
    ) -> list[Delivery]:
        """Register a node's working set (distinct keys) for `batch`; returns what has become ready.

        A batch is answered when all nodes have pulled it and all earlier ones, and its rows fit beside the pinned ones.
        `keys` and `out` are kept until then, so leave them alone; rows go to `out`, at their positions, if it is given.
        """
        self._check_token(run, epoch, node)
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
            return self._answer()
        except Exception:
            if batch not in self._flights and batch >= self._next_answer:  # as if it had never been called
                self._pulls[batch].pop(node)
                self._next_pull[node] -= 1
                self._united = None
            raise

    def _check_token(self, run: str | None, epoch: int | None, node: int) -> None:
        if (run is not None and run != self.run) or (epoch is not None and epoch != self.epoch):
            raise StaleError(
                f"a message of run {run!r}, epoch {epoch}, but this is run {self.run!r}, epoch {self.epoch}; drop it"
            )
        if not 0 <= node < self.nodes:
            raise ProtocolError(f"node {node} is not one of the {self.nodes} nodes of this run")

    def _check_rows(self, name: str, rows: Floats, count: int) -> None:
        shape = (count, self.layout.width)
        if rows.dtype != np.float32 or rows.shape != shape or not rows.flags.c_contiguous:
            raise ArgumentError(f"{name} must be contiguous float32 of shape {shape}, got {rows.dtype} {rows.shape}")

    def _check_size(self, rows: int, batch: int) -> None:
        if rows > self.batch_rows:
            raise CapacityError(
                f"batch {batch} pulls {rows:,} distinct rows, but memory_bytes={self.budget.memory_bytes:,} holds at "
                f"most {self.batch_rows:,} of one batch ({self.budget.row_bytes} bytes each, and their bookkeeping); "
                f"make the batch smaller or raise memory_bytes"
            )

    def _answer(self) -> list[Delivery]:
        """Answer batches in order while they are complete and fit; hand out everything that is ready."""
        while len(self._pulls.get(self._next_answer, ())) == self.nodes:
            batch = self._next_answer
            if self._united is None:
                pulls = self._pulls[batch]
                self._united = WorkingSet([pulls[node] for node in range(self.nodes)])
                self._check_size(len(self._united), batch)
                self._counters[batch] = Counter()
            if not self._fits(self._united, batch):
                self._counters[batch]["waits"] = 1
                break
            self._open(self._united, batch)
            self._united = None
            del self._pulls[batch]
            self._next_answer += 1
        ready, self._ready = self._ready, []
        return ready

    def _fits(self, working_set: WorkingSet, batch: int) -> bool:
        if not self._flights:
            return True
        in_flight = sum(len(flight.slots) for flight in self._flights.values())
        if batch - min(self._flights) >= BATCHES_IN_FLIGHT or in_flight + len(working_set) > self.budget.flight_rows:
            return False
        pinned = self._cache.pinned_rows + len(working_set)
        return pinned <= self.cache_rows or pinned - self._cache.count_pinned(working_set.keys) <= self.cache_rows

    def _open(self, working_set: WorkingSet, batch: int) -> None:
        """Pin the rows of a batch, bring in what is missing, and make its first deliveries."""
        counters, demoted = self._counters[batch], self._cache.demoted
        out = None
        if self.nodes == 1:
            out = working_set.pulls[0].out
            out = np.empty((len(working_set), self.layout.width), np.float32) if out is None else out
        visit = self._cache.visit(working_set.keys, batch, out)
        if visit is None:
            raise ArgumentError(f"the pull of batch {batch} names a key twice; pull distinct keys")
        try:
            self._bring_in(working_set.keys, visit, batch, out)
        except BaseException:
            self._cache.unpin(visit.slots, batch)
            raise
        counters.update(hits=visit.found, late=len(visit.late), lru_victims=self._cache.demoted - demoted)
        self._cache.age(len(working_set))
        flight = Flight(batch, working_set if self.nodes > 1 else None, visit.slots, len(working_set))
        self._flights[batch] = flight
        for other in self._flights:
            self._counters[other]["pinned_rows"] = max(self._counters[other]["pinned_rows"], self.pinned_rows)
        if self.nodes == 1:
            self._deliver_alone(working_set.pulls[0], visit, flight, out)
        else:
            self._deliver_all(working_set, visit, flight)
        self._close_if_over(flight)

    def _bring_in(self, keys: Keys, visit: Visit, batch: int, out: Floats | None) -> None:
        """Load or make the rows that are not cached, in pieces of the staging buffer."""
        counters = self._counters[batch]
        for start in range(0, len(visit.missing), len(self._staging)):
            positions = visit.missing[start : start + len(self._staging)]
            wanted = keys[positions]
            self._make_room(len(positions), counters)
            rows, found = self._load(wanted)
            if self._cache.insert(keys, positions, visit.slots, batch) < len(positions):
                raise ArgumentError(f"the pull of batch {batch} names a key twice; pull distinct keys")
            self._cache.fill(visit.slots, positions, rows, out)
            counters.update(
                misses=found, new_keys=len(positions) - found, bytes_read=found * (self.layout.row_bytes + 8)
            )

    def _load(self, keys: Keys) -> tuple[Floats, int]:
        """Rows of keys that are not cached, in the staging buffer, and how many the store had."""
        rows, found = self.store.load(keys, out=self._staging[: len(keys)])
        known = int(np.count_nonzero(found))
        if known == 0:
            self._initial(keys, rows)
        elif known < len(keys):
            unknown = np.flatnonzero(~found)
            made = np.empty((len(unknown), self.layout.width), np.float32)
            self._initial(keys[unknown], made)
            rows[unknown] = made
        return rows, known

    def _make_room(self, rows: int, counters: Counter[str]) -> None:
        """Evict until `rows` more fit: LFU's least visited leave; the dirty ones are written first, by one append."""
        while (short := rows - (self.cache_rows - self._cache.cached_rows)) > 0:
            wanted = min(max(short, self.cache_rows >> EVICT_SHIFT), len(self._staging))
            victims = self._cache.victims(wanted)
            if len(victims) == 0:  # what is not pinned was pushed after the snapshot that is being written
                if self._snapshot is None:
                    raise CapacityError(f"all {self.cache_rows:,} cached rows are pinned; this is a bug in MEM-PS")
                counters["forced_flushes"] += 1
                self.flush_finish()
                continue
            dirty = self._cache.select(victims, DIRTY)
            if len(dirty):
                keys, rows_out = self._staging_keys[: len(dirty)], self._staging[: len(dirty)]
                self._cache.gather(dirty, rows_out, keys)
                self.store.append(keys, rows_out)
            self._cache.remove(victims)
            counters.update(
                lfu_victims=len(victims),
                written_back=len(dirty),
                bytes_written=len(dirty) * (self.layout.row_bytes + 8),
            )

    # ------------------------------------------------------------ deliveries

    def _deliver_alone(self, pull: Pull, visit: Visit, flight: Flight, rows: Floats | None) -> None:
        """The only node: rows are in place already; what is late is in its own table before, or comes later."""
        assert rows is not None
        copied = visit.late[visit.distances == 1]
        later = visit.distances > 1
        self._wait_for(flight, pull, visit.late[later], visit.slots[visit.late[later]], visit.distances[later])
        positions = None
        if len(visit.late):
            free = np.ones(len(pull.keys), np.bool_)
            free[visit.late] = False
            positions = np.flatnonzero(free).astype(np.uint32)
            if pull.out is None:
                rows = rows[positions]
        self._ready.append(
            Delivery(
                node=0,
                batch=flight.batch,
                first=True,
                positions=positions,
                rows=rows,
                in_place=pull.out is not None,
                copied=copied,
                late=visit.late[later],
                shared=NOWHERE,
                holders=NOBODY,
            )
        )

    def _deliver_all(self, working_set: WorkingSet, visit: Visit, flight: Flight) -> None:
        """Several nodes: each gets its free rows, and the holders of what it shares."""
        assert working_set.holders is not None
        distances = np.zeros(len(working_set), np.uint8)
        distances[visit.late] = visit.distances
        before = np.zeros(len(working_set), np.uint64)  # holders in the batch before, of rows that it is out with
        previous = self._flights.get(flight.batch - 1)
        if previous is not None and previous.working_set is not None:
            out_with_previous = np.flatnonzero(distances == 1)
            before[out_with_previous] = previous.working_set.holders_of(working_set.keys[out_with_previous])
        for pull, indices in zip(working_set.pulls, working_set.indices, strict=True):
            distance, holders = distances[indices], working_set.holders[indices]
            own = (before[indices] >> np.uint64(pull.node)) & np.uint64(1) != 0
            later = np.flatnonzero((distance > 0) & ~own).astype(np.uint32)
            slots = visit.slots[indices]
            self._wait_for(flight, pull, later, slots[later], distance[later])
            shared = np.flatnonzero(holders & (holders - np.uint64(1))).astype(np.uint32)
            self._deliver(
                pull.node,
                flight.batch,
                np.flatnonzero(distance == 0).astype(np.uint32),
                slots,
                pull.out,
                first=True,
                copied=np.flatnonzero(own).astype(np.uint32),
                late=later,
                shared=shared,
                holders=holders[shared],
            )
        working_set.indices = []
        working_set.pulls = []

    def _wait_for(
        self, flight: Flight, pull: Pull, positions: Positions, slots: Slots, distances: npt.NDArray[np.uint8]
    ) -> None:
        for distance in np.unique(distances):
            mine = distances == distance
            flight.waiting.append(
                Waiting(pull.node, flight.batch - int(distance), positions[mine], slots[mine], pull.out)
            )

    def _deliver(
        self,
        node: int,
        batch: int,
        positions: Positions,
        slots: Slots,
        out: Floats | None,
        *,
        first: bool,
        copied: Positions = NOWHERE,
        late: Positions = NOWHERE,
        shared: Positions = NOWHERE,
        holders: Keys = NOBODY,
    ) -> None:
        """Copy the rows of `positions` (slots counted by position) and add a delivery to what is ready."""
        every = len(positions) == len(slots)
        if out is None or every:
            rows = np.empty((len(positions), self.layout.width), np.float32) if out is None else out
            self._cache.gather(slots if every else slots[positions], rows)
        else:
            rows = out
            part = np.empty((len(positions), self.layout.width), np.float32)
            self._cache.gather(slots[positions], part)
            rows[positions] = part
        self._ready.append(
            Delivery(
                node,
                batch,
                first,
                None if first and every else positions,
                rows,
                out is not None,
                copied,
                late,
                shared,
                holders,
            )
        )

    # ---------------------------------------------------------------- push

    def push(
        self,
        keys: Keys,
        rows: Floats,
        batch: int,
        node: int = 0,
        *,
        run: str | None = None,
        epoch: int | None = None,
    ) -> list[Delivery]:
        """Take back rows that `batch` has trained, of keys whose pusher is `node`.

        They come in any order, all at once or in parts. Returns what has become ready. A push that breaks
        the protocol raises and changes nothing.
        """
        self._check_token(run, epoch, node)
        self._check_rows("rows", rows, len(keys))
        flight = self._flights.get(batch)
        if flight is None:
            if batch < self._next_answer:
                if len(keys) == 0:  # a node that holds nothing as the lowest may come last
                    return self._answer()
                raise StaleError(f"node {node} pushes batch {batch}, whose rows have all been pushed; drop it")
            raise ProtocolError(f"node {node} pushes batch {batch}, which has not been pulled yet")
        slots = self._slots_to_push(flight, keys, node)
        if self._snapshot is not None:
            self._snapshot.save(slots)
        self._cache.push(slots, rows, batch)
        self._newest_push = max(self._newest_push, batch)
        flight.remaining -= len(keys)
        for later in self._flights.values():
            if later.batch > batch and later.waiting:
                self._deliver_late(later, batch)
        self._close_if_over(flight)
        return self._answer()

    def _slots_to_push(self, flight: Flight, keys: Keys, node: int) -> Slots:
        """The slots of the keys, after every check of the protocol."""
        earlier = sum(1 << batch % BATCHES_IN_FLIGHT for batch in self._flights if batch < flight.batch)
        if flight.working_set is None:
            # Pushed in the order of the pull, as the table of a device does, nothing needs to be found.
            in_order = len(keys) == len(flight.slots)
            if in_order and self._cache.check(keys, flight.slots, flight.batch, earlier, claims=False) < 0:
                return flight.slots
            slots = self._cache.find(keys)
        else:
            indices = flight.working_set.find(keys)
            unknown = np.flatnonzero(indices == NONE)
            if len(unknown):
                raise ProtocolError(self._refusal(flight, node, keys[unknown[0]], "no node has pulled in that batch"))
            assert flight.working_set.holders is not None
            holders = flight.working_set.holders[indices]
            lowest = holders & (~holders + np.uint64(1))
            wrong = np.flatnonzero(lowest != np.uint64(1 << node))
            if len(wrong):
                pusher = int(lowest[wrong[0]]).bit_length() - 1
                raise ProtocolError(
                    self._refusal(flight, node, keys[wrong[0]], f"node {pusher} pushes: the lowest-ranked holder")
                )
            slots = flight.slots[indices]
        wrong_at = self._cache.check(keys, slots, flight.batch, earlier, claims=True)
        if wrong_at >= 0:
            reason = self._reason(flight, slots[wrong_at], earlier)
            raise ProtocolError(self._refusal(flight, node, keys[wrong_at], reason))
        return slots

    def _refusal(self, flight: Flight, node: int, key: np.uint64, reason: str) -> str:
        return f"node {node} pushes key {key} in batch {flight.batch}, which {reason}; nothing was changed"

    def _reason(self, flight: Flight, slot: np.uint32, earlier: int) -> str:
        if slot == NONE or not np.any(flight.slots == slot):
            return "no node has pulled in that batch"
        holds = int(self._cache.entries["holds"][slot])
        if not holds >> flight.batch % BATCHES_IN_FLIGHT & 1:
            return "has been pushed already"
        if holds & earlier:
            first = next(batch for batch in self._flights if holds >> batch % BATCHES_IN_FLIGHT & 1)
            return f"batch {first} is still out with; push in batch order"
        return "this push names twice"

    def _deliver_late(self, flight: Flight, pushed: int) -> None:
        """Send rows that waited for `pushed` and have now been pushed."""
        still = []
        for waiting in flight.waiting:
            if waiting.after != pushed:
                still.append(waiting)
                continue
            ready = self._cache.ready(waiting.slots, pushed)
            if not ready.all():
                left = ~ready
                still.append(Waiting(waiting.node, pushed, waiting.positions[left], waiting.slots[left], waiting.out))
            if ready.any():
                self._send_late(flight.batch, waiting, ready)
        flight.waiting = still

    def _send_late(self, batch: int, waiting: Waiting, ready: Bools) -> None:
        positions = waiting.positions[ready]
        rows = np.empty((len(positions), self.layout.width), np.float32)
        self._cache.gather(waiting.slots[ready], rows)
        if waiting.out is not None:
            waiting.out[positions] = rows
            rows = waiting.out
        self._ready.append(
            Delivery(
                node=waiting.node,
                batch=batch,
                first=False,
                positions=positions,
                rows=rows,
                in_place=waiting.out is not None,
                copied=NOWHERE,
                late=NOWHERE,
                shared=NOWHERE,
                holders=NOBODY,
            )
        )

    def _close_if_over(self, flight: Flight) -> None:
        if flight.remaining:
            return
        del self._flights[flight.batch]
        counters = self._counters.pop(flight.batch)
        names = BatchStatistics.__dataclass_fields__
        self.statistics.append(
            BatchStatistics(batch=flight.batch, **{name: counters[name] for name in names if name != "batch"})
        )

    # ------------------------------------------------------------- evaluation

    def lookup(self, keys: Keys, out: Floats | None = None) -> Floats:
        """Rows of distinct keys as last pushed; unknown ones as they would begin. Changes nothing in the cache."""
        if out is None:
            out = np.empty((len(keys), self.layout.width), np.float32)
        self._check_rows("out", out, len(keys))
        missing = np.flatnonzero(self._cache.find(keys, out) == NONE)
        for start in range(0, len(missing), len(self._staging)):
            positions = missing[start : start + len(self._staging)]
            out[positions] = self._load(keys[positions])[0]
        return out

    # --------------------------------------------------------------- snapshots

    def flush(self, batch: int, snapshot_id: str) -> None:
        """Prepare a snapshot in the store that holds every push up to `batch` and none after."""
        self.flush_begin(batch, snapshot_id)
        self.flush_finish()

    def flush_begin(self, batch: int, snapshot_id: str) -> None:
        """Begin that snapshot, between the last push of `batch` and the first of the next; `flush_step` writes it."""
        if self._snapshot is not None:
            raise ProtocolError(f"snapshot {self._snapshot.snapshot_id!r} is not finished; call flush_finish first")
        out = [other for other in self._flights if other <= batch]
        if out or batch >= self._next_answer or self._newest_push > batch:
            raise ProtocolError(
                f"flush({batch}) must come between the last push of batch {batch} and the first of {batch + 1}: "
                f"not all pushed: {out}, next to be answered: {self._next_answer}, newest push: {self._newest_push}"
            )
        self._snapshot = SnapshotWriter(snapshot_id, self._cache, self.store, self._copy_keys, self._copies)

    def flush_step(self) -> bool:
        """Write one piece of the snapshot; True when the store has prepared it, or when there is none."""
        if self._snapshot is not None and self._snapshot.step():
            self._snapshot = None
        return self._snapshot is None

    def flush_finish(self) -> None:
        """Write the rest of the snapshot."""
        while not self.flush_step():
            pass

    def close(self) -> None:
        """Give the memory back. Rows pushed after the last snapshot are gone, as the epoch is."""
        for name in ("_cache", "_staging", "_staging_keys", "_copies", "_copy_keys", "_snapshot"):
            self.__dict__.pop(name, None)
