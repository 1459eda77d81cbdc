"""MEM-PS: one node's partition of one table, a bounded cache over the disk tier that never changes a result.

In: pulls and pushes of whole working sets, by batch and node. Out: `Delivery` values that have become ready, and
snapshots prepared in the store. There are no threads, clocks or sockets in here, so a test can play any number of
nodes: the owner of a `MemPS` calls it from one thread at a time and carries the deliveries to their nodes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.errors import ArgumentError, CapacityError, ConfigError, ProtocolError, StaleError
from daskps.mem import budget as budgets
from daskps.mem import dispatch
from daskps.mem.cache import BATCHES_IN_FLIGHT
from daskps.mem.cached_store import CachedStore
from daskps.mem.delivery import BatchStatistics, Delivery
from daskps.mem.flight import Flight, Push
from daskps.mem.store import RowStore, store_bytes
from daskps.mem.working_set import Pull, WorkingSet
from daskps.types import Floats, Keys, RowLayout

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
        lru_share: float = 0.5,
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
        self.layout, self.nodes, self.run, self.epoch = layout, nodes, run, epoch
        self.statistics: deque[BatchStatistics] = deque(maxlen=KEPT_STATISTICS)  # of batches that are over
        self._rows = CachedStore(self.budget, store, initial, pool)
        self._next_pull = [first_batch] * nodes  # of each node: the batch it must pull next
        self._next_answer = first_batch
        self._newest_push = first_batch - 1  # whose rows are in the cache
        self._pulls: dict[int, dict[int, Pull]] = {}  # registered, not answered: batch, node
        self._united: WorkingSet | None = None  # of batch `_next_answer`, once all its pulls are in
        self._flights: dict[int, Flight] = {}  # answered, not over; in batch order
        self._planned: tuple[int, str] | None = None  # snapshot to begin: after which batch, under which name
        self._counters: dict[int, Counter[str]] = {}
        self._carried: Counter[str] = Counter()  # of snapshots; they count for the next batch
        self._ready: list[Delivery] = []

    @property
    def cache_rows(self) -> int:
        """Rows that fit in memory; fewer when the store's index has grown."""
        return self._rows.cache.cache_rows

    @property
    def batch_rows(self) -> int:
        """The largest working set, over all nodes, that can be pulled at once."""
        return min(self.cache_rows, self._rows.left.flight_rows)

    @property
    def freed_row_bytes(self) -> int:
        """What the cache gives back for each row when it shrinks."""
        return self.budget.freed_row_bytes

    @property
    def cached_rows(self) -> int:
        """Rows that are in memory now."""
        return self._rows.cache.cached_rows

    @property
    def pinned_rows(self) -> int:
        """Rows that batches in flight hold now."""
        return self._rows.cache.pinned_rows

    @property
    def used_bytes(self) -> int:
        """Memory in use, the store's index with it; at most `memory_bytes`."""
        return self._rows.used_bytes

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
        `keys` and `out` are kept until its last delivery; rows go to `out`, at their positions, if it is given.
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
            self._answer()
        except Exception:
            if batch >= self._next_answer:  # as if it had never been called
                del self._pulls[batch][node]
                self._next_pull[node] -= 1
                self._united = None
            raise
        return self._hand_out()

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
                f"most {self.batch_rows:,} of one batch ({self.budget.row_bytes} bytes each, and their bookkeeping; "
                f"the disk tier's index takes {store_bytes(self._rows.store):,}); make the batch smaller, or raise "
                f"memory_bytes"
            )

    def _answer(self) -> None:
        """Answer batches in order while they are complete and fit."""
        while len(self._pulls.get(self._next_answer, ())) == self.nodes:
            batch = self._next_answer
            if self._united is None:
                pulls = self._pulls[batch]
                self._united = WorkingSet([pulls[node] for node in range(self.nodes)])
                self._counters[batch], self._carried = self._carried, Counter()
            self._give_way(self._counters[batch])
            self._check_size(len(self._united), batch)
            if not self._fits(self._united, batch):
                self._counters[batch]["waits"] = 1
                return
            self._open(self._united, batch)

    def _give_way(self, counters: Counter[str]) -> None:
        before = self.cache_rows
        moved = self._rows.give_way(counters, self._least_rows())
        counters["given_rows"] += before - self.cache_rows
        if moved is not None:
            for flight in self._flights.values():
                flight.move(self.cache_rows, moved)

    def _least_rows(self) -> int:
        """Of a cache with whose rows those in flight may be kept."""
        in_flight = sum(len(flight.slots) for flight in self._flights.values())
        shrinks = self.budget.flight_rows >= self.budget.cache_rows
        return -(-in_flight * self.budget.cache_rows // self.budget.flight_rows) if shrinks else 0

    def _fits(self, working_set: WorkingSet, batch: int) -> bool:
        if not self._flights:
            return True
        in_flight = sum(len(flight.slots) for flight in self._flights.values())
        if (
            batch - min(self._flights) >= BATCHES_IN_FLIGHT
            or in_flight + len(working_set) > self._rows.left.flight_rows
        ):
            return False
        cache = self._rows.cache
        pinned = cache.pinned_rows + len(working_set)
        return pinned <= cache.cache_rows or pinned - cache.count_pinned(working_set.keys) <= cache.cache_rows

    def _open(self, working_set: WorkingSet, batch: int) -> None:
        """Pin the rows of a batch and make its first deliveries."""
        alone = working_set.pulls[0] if self.nodes == 1 else None
        out = None if alone is None else alone.out
        if alone is not None and out is None:
            out = np.empty((len(working_set), self.layout.width), np.float32)
        visit = self._rows.take(working_set.keys, batch, out, self._counters[batch])
        flight = Flight(batch, visit.slots, len(working_set))
        if alone is not None:
            assert out is not None
            self._ready.append(dispatch.first_alone(alone, visit, flight, out))
        else:
            flight.working_set, flight.pushed = working_set, np.zeros(len(working_set), np.uint8)
            previous = self._flights.get(batch - 1)
            self._ready += dispatch.first_shared(working_set, visit, flight, previous, self._rows.cache)
            working_set.forget_pulls()
        self._flights[batch] = flight
        self._united = None
        del self._pulls[batch]
        self._next_answer += 1
        for other in self._flights:
            self._counters[other]["pinned_rows"] = max(self._counters[other]["pinned_rows"], self.pinned_rows)
        self._close_if_over(flight)
        self._begin_if_due()

    def _hand_out(self) -> list[Delivery]:
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
        epoch: int | None = None,
    ) -> list[Delivery]:
        """Take back rows that `batch` has trained, of keys whose pusher is `node`; returns what has become ready.

        They come in any order, all at once or in parts. One that breaks the protocol raises and changes nothing. Nodes
        are not in step: what comes before all earlier batches are over is kept (not copied) until they are.
        """
        self._check_token(run, epoch, node)
        self._check_rows("rows", rows, len(keys))
        flight = self._flights.get(batch)
        if flight is None:
            if batch >= self._next_answer:
                raise ProtocolError(f"node {node} pushes batch {batch}, which has not been pulled yet")
            if len(keys):
                raise StaleError(f"node {node} pushes batch {batch}, whose rows have all been pushed; drop it")
            return self._hand_out()  # a node that is the lowest holder of nothing may come last
        if self.nodes == 1 and batch != min(self._flights):
            raise ProtocolError(f"batch {batch} is pushed, but {min(self._flights)} is not over; push in batch order")
        flight.deferred.append(Push(flight.claim(keys, node, self._rows.cache), rows))
        self._take_back()
        self._answer()
        return self._hand_out()

    def _take_back(self) -> None:
        """Take the pushes of the oldest batch, and when it is over those of the next."""
        while self._flights and (oldest := self._flights[min(self._flights)]).deferred:
            for push in oldest.deferred:
                self._rows.push(push.slots, push.rows, oldest.batch)
                oldest.remaining -= len(push.slots)
            oldest.deferred = []
            self._newest_push = oldest.batch
            for later in self._flights.values():
                self._ready += dispatch.late_rows(later, oldest.batch, self._rows.cache)
            self._close_if_over(oldest)
            self._begin_if_due()

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
        self._rows.lookup(keys, out)
        return out

    # --------------------------------------------------------------- snapshots

    @property
    def flushing(self) -> bool:
        """A snapshot is being written, or will be when its batch is over."""
        return self._planned is not None or self._rows.snapshot is not None

    def flush(self, batch: int, snapshot_id: str) -> None:
        """Prepare a snapshot in the store that holds every push up to `batch` and none after."""
        self.flush_begin(batch, snapshot_id)
        if self._planned is not None:
            self._planned = None
            raise ProtocolError(
                f"flush({batch}), but its rows are not all pushed: in flight are {list(self._flights)}, the next to be "
                f"answered is {self._next_answer}; call it later, or flush_begin now"
            )
        self.flush_finish()

    def flush_begin(self, batch: int, snapshot_id: str) -> None:
        """Begin that snapshot as soon as `batch` is over, which may be now; `flush_step` then writes it."""
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
        if batch < min(self._flights, default=self._next_answer):
            self._rows.begin_snapshot(snapshot_id)
            self._planned = None

    def flush_step(self) -> bool:
        """Write one piece of the snapshot, if it has begun; True when the store has prepared it, or there is none."""
        done = self._rows.step_snapshot()
        self._give_way(self._carried)
        return done and self._planned is None

    def flush_finish(self) -> None:
        """Write the rest of the snapshot, which must have begun."""
        if self._planned is not None:
            raise ProtocolError(f"the snapshot of batch {self._planned[0]} has not begun: its rows are not all pushed")
        while not self.flush_step():
            pass

    def close(self) -> None:
        """Give the memory back. Rows pushed after the last snapshot are gone, as the epoch is."""
        self.__dict__.pop("_rows", None)
        self._flights = {}
