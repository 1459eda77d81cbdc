"""Promise 1 of the memory tier: whatever the budget, rows are those of a plain dictionary, bit for bit.

One node: hypothesis plays any sequence of pulls, pushes, evaluations, flushes (stepwise too) and reopenings.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from daskps.device.pool import ComputePool
from daskps.errors import CapacityError
from daskps.mem import MemPS
from daskps.mem.eviction import POLICIES
from daskps.mem.memps import SnapshotPiece
from tests.mem.memory_store import MemoryStore, bytes_for, initial, initial_rows, layout

POOL = ComputePool(1)
KEY = st.integers(0, 39).map(lambda i: (i * 0x9E3779B97F4A7C15) % 2**64) | st.sampled_from([0, 2**64 - 1, 2**63])
WORKING_SET = st.lists(KEY, unique=True, max_size=12).map(lambda keys: np.array(keys, np.uint64))


class OneNode(RuleBasedStateMachine):
    """A partition of one node beside the dictionary it must equal."""

    @initialize(
        width=st.integers(1, 6),
        rows_that_fit=st.integers(1, 45),
        eviction=st.sampled_from(list(POLICIES)),
        depth=st.integers(1, 4),
    )
    def open(self, width: int, rows_that_fit: int, eviction: str, depth: int) -> None:
        self.width, self.eviction, self.depth = width, eviction, depth
        self.memory_bytes = bytes_for(width, cache_rows=rows_that_fit)
        self.model: dict[int, bytes] = {}  # pushed rows
        self.snapshots: dict[str, dict[int, bytes]] = {}
        self.batch = 0
        self.random = np.random.default_rng(0)
        self.open_on(MemoryStore(width))

    def open_on(self, store: MemoryStore) -> None:
        self.store = store
        self.piece: SnapshotPiece | None = None  # what another thread has
        self.ps = MemPS(
            layout=layout(self.width),
            store=store,
            initial=initial,
            memory_bytes=self.memory_bytes,
            pool=POOL,
            first_batch=self.batch,
            eviction=self.eviction,
        )
        # per batch in flight: keys, rows of its "table", which rows are still to come
        self.tables: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.unanswered: dict[int, np.ndarray] = {}

    def expected(self, keys: np.ndarray) -> np.ndarray:
        rows = initial_rows(keys, self.width)
        for i, key in enumerate(keys.tolist()):
            if key in self.model:
                rows[i] = np.frombuffer(self.model[key], np.float32)
        return rows

    def take(self, deliveries: list) -> None:
        for delivery in deliveries:
            if delivery.first:
                keys = self.unanswered.pop(delivery.batch)
                rows = np.zeros((len(keys), self.width), np.float32)
                self.tables[delivery.batch] = (keys, rows, np.ones(len(keys), np.bool_))
                keys, rows, missing = self.tables[delivery.batch]
                if len(delivery.forwarded):
                    before = self.tables[delivery.batch - 1][0]
                    assert set(keys[delivery.forwarded].tolist()) <= set(before.tolist())
                missing[:] = False
                missing[delivery.forwarded] = True
                missing[delivery.deferred] = True
            keys, rows, missing = self.tables[delivery.batch]
            positions = np.arange(len(keys)) if delivery.positions is None else delivery.positions
            rows[positions] = delivery.rows[positions] if delivery.in_place else delivery.rows
            assert (
                set(positions.tolist()) == set(np.flatnonzero(~missing)) if delivery.first else missing[positions].all()
            )
            missing[positions] = False

    @precondition(lambda self: len(self.unanswered) + len(self.tables) < self.depth)
    @rule(keys=WORKING_SET, in_place=st.booleans())
    def pull(self, keys: np.ndarray, in_place: bool) -> None:
        keys = keys[: self.ps.batch_rows]
        self.unanswered[self.batch] = keys
        out = np.zeros((len(keys), self.width), np.float32) if in_place else None
        try:
            self.take(self.ps.pull(keys, self.batch, out=out))
        except CapacityError:  # the cache gave way to the store's index first
            assert self.store.memory_bytes
            assert len(keys) > self.ps.batch_rows
            del self.unanswered[self.batch]
            return
        self.batch += 1
        self.drop_empty()

    def drop_empty(self) -> None:
        for batch in [batch for batch, (keys, _, _) in self.tables.items() if len(keys) == 0]:
            del self.tables[batch]

    @precondition(lambda self: self.tables)
    @rule(shuffle=st.booleans(), parts=st.integers(1, 3))
    def train_and_push_the_oldest(self, shuffle: bool, parts: int) -> None:
        batch = min(self.tables)
        keys, rows, missing = self.tables[batch]
        assert not missing.any()
        np.testing.assert_array_equal(rows.view(np.uint32), self.expected(keys).view(np.uint32))
        trained = self.random.integers(0, 2**32, (len(keys), self.width), np.uint32).view(np.float32)
        order = self.random.permutation(len(keys)) if shuffle else np.arange(len(keys))
        for part in np.array_split(order, parts):
            for key, row in zip(keys[part].tolist(), trained[part], strict=True):
                self.model[key] = row.tobytes()
            self.take(self.ps.push(keys[part], np.ascontiguousarray(trained[part]), batch))
        if batch + 1 in self.tables:  # the device copies table to table; the next batch may have waited for this push
            next_keys, next_rows, next_missing = self.tables[batch + 1]
            at = {key: i for i, key in enumerate(keys.tolist())}
            for i, key in enumerate(next_keys.tolist()):
                if next_missing[i] and key in at:
                    next_rows[i] = trained[at[key]]
                    next_missing[i] = False
        del self.tables[batch]
        self.drop_empty()

    @precondition(lambda self: not self.tables and not self.unanswered)
    @rule(growth=st.integers(1, 300))
    def the_index_of_the_store_grows(self, growth: int) -> None:
        self.store.memory_bytes += growth

    @rule(keys=WORKING_SET)
    def evaluate(self, keys: np.ndarray) -> None:
        before = self.ps._rows.cache.entries.copy()
        np.testing.assert_array_equal(self.ps.lookup(keys).view(np.uint32), self.expected(keys).view(np.uint32))
        np.testing.assert_array_equal(before, self.ps._rows.cache.entries)

    def last_over(self) -> int:
        in_flight = [*self.tables, *self.unanswered]
        return min(in_flight, default=self.batch) - 1

    @precondition(lambda self: not self.ps.flushing)
    @rule()
    def begin_flush(self) -> None:
        name = f"s{len(self.snapshots)}"
        self.snapshots[name] = dict(self.model)
        self.ps.flush_begin(self.last_over(), name)

    @rule()
    def step_flush(self) -> None:
        self.ps.flush_step()

    @rule(write=st.booleans())
    def take_a_piece_to_another_thread(self, write: bool) -> None:
        self.piece = self.ps.next_piece() or self.piece
        if write and self.piece is not None:
            self.piece()

    @precondition(lambda self: self.piece is not None)
    @rule()
    def report_the_piece(self) -> None:
        self.piece()
        self.ps.piece_written(self.piece)

    @rule()
    def finish_flush(self) -> None:
        self.ps.flush_finish()

    @rule()
    def reopen_at_the_last_snapshot(self) -> None:
        if not self.store.snapshots:
            return
        name = list(self.store.snapshots)[-1]
        self.ps.close()
        self.model = dict(self.snapshots[name])
        self.open_on(MemoryStore(self.width, self.store.snapshots[name]))

    @invariant()
    def snapshots_hold_what_was_pushed_and_nothing_after(self) -> None:
        if hasattr(self, "store"):
            for name, rows in self.store.snapshots.items():
                assert rows == self.snapshots[name]

    @invariant()
    def pins_are_the_rows_in_flight(self) -> None:
        if hasattr(self, "ps"):
            held = {key for keys, _, _ in self.tables.values() for key in keys.tolist()}
            assert self.ps.pinned_rows == len(held)
            assert self.ps.cached_rows <= self.ps.cache_rows


OneNode.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestOneNode = OneNode.TestCase
