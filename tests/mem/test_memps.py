"""One partition: what a pull brings, what waits, what is refused, what is counted."""

import numpy as np
import pytest

from daskps.budget import ORDERED_PIECES
from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, CapacityError, ConfigError, ProtocolError, StaleError
from daskps.hbm.dedup import unique
from daskps.mem import MemPS, total
from tests.mem.memory_store import MemoryStore, bytes_for, initial, initial_rows, keys_of, layout

WIDTH = 2


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(WIDTH)


def partition(store: MemoryStore, pool: ComputePool, *, rows: int = 100, nodes: int = 1, **settings) -> MemPS:
    """A partition whose cache holds exactly `rows` rows, or more where several nodes pull so many."""
    return MemPS(
        layout=layout(WIDTH),
        store=store,
        initial=initial,
        memory_bytes=bytes_for(WIDTH, cache_rows=rows, flight_rows=rows if nodes > 1 else 1, nodes=nodes),
        pool=pool,
        nodes=nodes,
        **settings,
    )


def filled(value: float, count: int) -> np.ndarray:
    return np.full((count, WIDTH), value, np.float32)


def train(ps: MemPS, keys: np.ndarray, batch: int, value: float) -> None:
    """Pull and push one batch."""
    ps.pull(keys, batch)
    ps.push(keys, filled(value, len(keys)), batch)


def test_an_unknown_key_begins_with_its_initial_row_and_a_pushed_one_keeps_its_bits(store, pool) -> None:
    ps = partition(store, pool)
    keys = keys_of(0, 2**64 - 1, 5)
    (first,) = ps.pull(keys, 0)
    np.testing.assert_array_equal(first.rows.view(np.uint32), initial_rows(keys, WIDTH).view(np.uint32))
    nans = np.arange(0x7F800001, 0x7F800007, dtype=np.uint32).reshape(3, 2).view(np.float32)
    ps.push(keys, nans, 0)
    np.testing.assert_array_equal(ps.lookup(keys[::-1].copy()).view(np.uint32), nans[::-1].view(np.uint32))


def test_a_pull_fills_the_given_buffer_and_leaves_late_rows_alone(store, pool) -> None:
    ps = partition(store, pool)
    ps.pull(keys_of(1, 2), 0)
    out = filled(-1, 3)
    (first,) = ps.pull(keys_of(2, 3, 4), 1, out=out)
    assert first.in_place
    assert first.rows is out
    assert first.forwarded.tolist() == [0]
    assert first.positions.tolist() == [1, 2]
    assert out[0].tolist() == [-1, -1]
    np.testing.assert_array_equal(out[1:].view(np.uint32), initial_rows(keys_of(3, 4), WIDTH).view(np.uint32))


def test_a_row_out_with_an_older_batch_is_delivered_by_its_push(store, pool) -> None:
    ps = partition(store, pool)
    ps.pull(keys_of(1, 2), 0)
    ps.pull(keys_of(3), 1)
    (first,) = ps.pull(keys_of(2, 3), 2)
    assert (first.deferred.tolist(), first.forwarded.tolist(), len(first.rows)) == ([0], [1], 0)
    (late,) = ps.push(keys_of(1, 2), filled(7, 2), 0)
    assert (late.first, late.batch, late.positions.tolist(), late.rows.tolist()) == (False, 2, [0], [[7, 7]])
    assert ps.pinned_rows == 2


def test_a_push_in_parts_delivers_late_rows_part_by_part(store, pool) -> None:
    ps = partition(store, pool)
    ps.pull(keys_of(1, 2, 3), 0)
    ps.pull(keys_of(9), 1)
    ps.pull(keys_of(1, 3), 2)
    assert ps.push(keys_of(2), filled(5, 1), 0) == []
    assert [late.positions.tolist() for late in ps.push(keys_of(3), filled(6, 1), 0)] == [[1]]
    assert [late.positions.tolist() for late in ps.push(keys_of(1), filled(7, 1), 0)] == [[0]]


def test_a_batch_that_does_not_fit_beside_the_pins_waits_for_a_push_and_is_counted(store, pool) -> None:
    ps = partition(store, pool, rows=10)
    ps.pull(np.arange(8, dtype=np.uint64), 0)
    assert ps.pull(np.arange(4, 12, dtype=np.uint64), 1) == []  # 12 distinct rows
    delivered = ps.push(np.arange(8, dtype=np.uint64), filled(1, 8), 0)
    assert [(one.batch, one.first, len(one.rows)) for one in delivered] == [(1, True, 8)]
    ps.push(np.arange(4, 12, dtype=np.uint64), filled(2, 8), 1)
    assert [one.waits for one in ps.statistics] == [0, 1]


def test_overlapping_batches_fit_when_their_distinct_rows_do(store, pool) -> None:
    ps = partition(store, pool, rows=100)
    ps.pull(np.arange(60, dtype=np.uint64), 0)
    assert len(ps.pull(np.arange(20, 80, dtype=np.uint64), 1)) == 1
    assert ps.pinned_rows == 80


def test_a_batch_that_can_never_fit_is_refused_with_figures_and_the_next_try_may_be_smaller(store, pool) -> None:
    ps = partition(store, pool, rows=10)
    with pytest.raises(CapacityError, match=r"batch 0 pulls 11 distinct rows, but memory_bytes=.* at most 10 of"):
        ps.pull(np.arange(11, dtype=np.uint64), 0)
    assert len(ps.pull(np.arange(10, dtype=np.uint64), 0)) == 1


def test_a_union_that_can_never_fit_is_refused_when_the_last_node_pulls(store, pool) -> None:
    ps = partition(store, pool, rows=10, nodes=2)
    limit = ps.batch_rows
    ps.pull(np.arange(limit, dtype=np.uint64), 0, 0)
    with pytest.raises(CapacityError, match=f"batch 0 pulls {limit + 1} distinct rows"):
        ps.pull(keys_of(1000), 0, 1)
    assert len(ps.pull(keys_of(1), 0, 1)) == 2


def test_more_than_sixteen_batches_in_flight_wait(store, pool) -> None:
    ps = partition(store, pool)
    for batch in range(16):
        assert len(ps.pull(keys_of(batch), batch)) == 1
    assert ps.pull(keys_of(16), 16) == []
    assert [one.batch for one in ps.push(keys_of(0), filled(0, 1), 0)] == [16]


@pytest.mark.parametrize(
    ("keys", "batch", "error", "words"),
    [
        ([1, 9], 0, ProtocolError, "key 9 in batch 0, which no node has pulled in that batch"),
        ([1, 3], 0, ProtocolError, "key 3 in batch 0, which no node has pulled in that batch"),
        ([2], 0, ProtocolError, "key 2 in batch 0, which has been pushed already"),
        ([1, 1], 0, ProtocolError, "key 1 in batch 0, which this push names twice"),
        ([3], 1, ProtocolError, "batch 1 is pushed, but 0 is not over; push in batch order"),
        ([3], 2, ProtocolError, "batch 2, which has not been pulled yet"),
    ],
)
def test_a_push_that_breaks_the_protocol_says_why_and_changes_nothing(
    store, pool, keys: list[int], batch: int, error: type[Exception], words: str
) -> None:
    ps = partition(store, pool)
    ps.pull(keys_of(1, 2), 0)
    ps.pull(keys_of(3), 1)
    ps.push(keys_of(2), filled(4, 1), 0)
    before = ps._rows.cache.entries.copy(), ps._rows.cache.rows.copy()
    with pytest.raises(error, match=words):
        ps.push(keys_of(*keys), filled(8, len(keys)), batch)
    np.testing.assert_array_equal(before[0], ps._rows.cache.entries)
    np.testing.assert_array_equal(before[1].view(np.uint32), ps._rows.cache.rows.view(np.uint32))
    ps.push(keys_of(1), filled(5, 1), 0)
    ps.push(keys_of(3), filled(6, 1), 1)
    assert ps.lookup(keys_of(1, 2, 3))[:, 0].tolist() == [5, 4, 6]


@pytest.mark.parametrize(
    ("keys", "node", "words"),
    [
        ([1], 1, "node 1 pushes key 1 in batch 0, which node 0 has to push: the lowest-ranked holder"),
        ([2], 0, "node 0 pushes key 2 in batch 0, which node 1 has to push"),
        ([9], 0, "key 9 in batch 0, which no node has pulled"),
        ([5], 0, "key 5 in batch 0, which has been pushed already"),
        ([1, 1], 0, "names twice"),
        ([1], 2, "node 2 is not one of the 2 nodes"),
    ],
)
def test_with_more_nodes_only_the_lowest_ranked_holder_pushes_and_once(
    store, pool, keys: list[int], node: int, words: str
) -> None:
    ps = partition(store, pool, nodes=2)
    ps.pull(keys_of(1, 5), 0, 0)
    ps.pull(keys_of(1, 2), 0, 1)
    ps.push(keys_of(5), filled(1, 1), 0, 0)
    with pytest.raises(ProtocolError, match=words):
        ps.push(keys_of(*keys), filled(8, len(keys)), 0, node)
    ps.push(keys_of(1), filled(2, 1), 0, 0)
    ps.push(keys_of(2), filled(3, 1), 0, 1)
    assert ps.pinned_rows == 0
    assert ps.lookup(keys_of(1, 2, 5))[:, 0].tolist() == [2, 3, 1]


def test_messages_of_another_run_incarnation_or_batch_are_stale(store, pool) -> None:
    ps = partition(store, pool, run="r", incarnation=3, first_batch=7)
    for token in ({"run": "q"}, {"incarnation": 2}, {"run": "r", "incarnation": 4}):
        with pytest.raises(StaleError, match="but this is run 'r', incarnation 3; drop it"):
            ps.pull(keys_of(1), 7, **token)
        with pytest.raises(StaleError, match="but this is run 'r', incarnation 3; drop it"):
            ps.push(keys_of(1), filled(0, 1), 7, **token)
    with pytest.raises(StaleError, match="pulls batch 6, but its next one is 7"):
        ps.pull(keys_of(1), 6)
    with pytest.raises(ProtocolError, match="pulls batch 8, but its next one is 7"):
        ps.pull(keys_of(1), 8)
    ps.pull(keys_of(1), 7, run="r", incarnation=3)
    ps.push(keys_of(1), filled(0, 1), 7, run="r", incarnation=3)
    with pytest.raises(StaleError, match="pushes batch 7, whose rows have all been pushed"):
        ps.push(keys_of(1), filled(0, 1), 7)
    assert ps.push(keys_of(), filled(0, 0), 7) == []


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("cached", [False, True])
def test_a_repeated_key_is_refused_and_the_pull_can_be_made_again(store, pool, nodes: int, cached: bool) -> None:
    ps = partition(store, pool, nodes=nodes, first_batch=1 - cached)
    if cached:
        for node in range(nodes):
            ps.pull(keys_of(1, 2), 0, node)
        ps.push(keys_of(1, 2), filled(3, 2), 0)
    for node in range(nodes - 1):
        ps.pull(keys_of(5), 1, node)
    with pytest.raises(ArgumentError, match="twice; pull distinct keys"):
        ps.pull(keys_of(1, 2, 1), 1, nodes - 1)
    assert ps.pinned_rows == 0
    assert len(ps.pull(keys_of(1, 2), 1, nodes - 1)) == nodes


def test_a_store_that_fails_leaves_nothing_pinned_and_the_pull_can_be_made_again(store, pool, monkeypatch) -> None:
    ps = partition(store, pool)
    train(ps, keys_of(1), 0, 1.0)
    monkeypatch.setattr(store, "start_load", lambda keys, positions, out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ps.pull(keys_of(1, 2), 1)
    assert ps.pinned_rows == 0
    monkeypatch.undo()
    (first,) = ps.pull(keys_of(1, 2), 1)
    assert first.rows[0].tolist() == [1, 1]


def test_wrong_arrays_are_named(store, pool) -> None:
    ps = partition(store, pool)
    with pytest.raises(ArgumentError, match="contiguous run of uint64, got int64"):
        ps.pull(np.arange(3), 0)
    with pytest.raises(ArgumentError, match=r"out must be contiguous float32 of shape \(3, 2\)"):
        ps.pull(np.arange(3, dtype=np.uint64), 0, out=filled(0, 2))
    ps.pull(keys_of(1), 0)
    with pytest.raises(ArgumentError, match=r"rows must be contiguous float32 of shape \(1, 2\)"):
        ps.push(keys_of(1), np.zeros((1, 3), np.float32), 0)


def test_settings_that_cannot_work_are_refused_with_figures(store, pool) -> None:
    settings = {"layout": layout(WIDTH), "store": store, "initial": initial, "pool": pool}
    with pytest.raises(CapacityError, match=r"memory_bytes=1,000 holds no row: .* needs 33,\d+ bytes in all"):
        MemPS(**settings, memory_bytes=1000)
    store.memory_bytes = 90_000
    with pytest.raises(CapacityError, match="the disk tier's index takes 90,000 bytes"):
        MemPS(**settings, memory_bytes=90_000)
    with pytest.raises(ConfigError, match="1 to 64 nodes, got 65"):
        MemPS(**settings, memory_bytes=1 << 20, nodes=65)


def test_evaluation_never_inserts_and_never_changes_the_order(store, pool) -> None:
    def left_after(looked_up: list[int]) -> set[int]:
        ps = partition(MemoryStore(WIDTH), pool, rows=10)
        for batch in range(10):
            train(ps, keys_of(batch), batch, batch)
        for _ in range(50):
            ps.lookup(keys_of(*looked_up))
        assert ps.cached_rows == 10
        train(ps, keys_of(100, 101, 102), 10, 0.0)
        return {key for key in range(10) if ps._rows.cache.find(keys_of(key))[0] != 0xFFFFFFFF}

    assert left_after([0, 1, 2, 500]) == left_after([])


def test_every_batch_is_counted(store, pool) -> None:
    ps = partition(store, pool, rows=20)
    row_bytes = 4 * WIDTH + 8
    train(ps, np.arange(20, dtype=np.uint64), 0, 1.0)
    train(ps, np.arange(15, 35, dtype=np.uint64), 1, 2.0)  # 5 hits, 15 new, so 15 dirty ones leave
    train(ps, np.arange(0, 5, dtype=np.uint64), 2, 3.0)  # 5 from disk
    first, second, third = ps.statistics
    assert (first.hits, first.misses, first.new_keys, first.evicted, first.pinned_rows) == (0, 0, 20, 0, 20)
    assert (second.hits, second.misses, second.new_keys) == (5, 0, 15)
    assert (second.evicted, second.written_back, second.bytes_written) == (15, 15, 15 * row_bytes)
    assert (third.misses, third.new_keys, third.bytes_read) == (5, 0, 5 * row_bytes)
    both = total(ps.statistics)
    assert (both.batch, both.hits, both.misses, both.new_keys, both.pinned_rows) == (2, 5, 5, 35, 20)


def test_clean_rows_leave_without_a_write(store, pool) -> None:
    ps = partition(store, pool, rows=20)
    train(ps, np.arange(20, dtype=np.uint64), 0, 1.0)
    ps.flush(0, "s")
    appends = store.appends
    train(ps, np.arange(20, 40, dtype=np.uint64), 1, 2.0)
    assert store.appends == appends
    assert ps.statistics[-1].evicted == 20
    assert ps.statistics[-1].written_back == 0


def test_keys_in_the_order_of_dedup_do_not_crowd_in_the_index(store, pool) -> None:
    """A piece of a large batch holds keys from one end of dedup's order: by the same hash, one end of the index would
    be over-full and searched from end to end."""
    keys = np.random.default_rng(1).integers(0, 2**64, 200_000, np.uint64)
    piece = unique(CpuDevice(0, pool), keys=keys).keys[:70_000]
    ps = partition(store, pool, rows=100_000)
    ps.pull(piece, 0)
    taken = np.flatnonzero(ps._rows.cache.buckets == 0)
    assert np.diff(taken, prepend=-1).max() < 2_000


def test_pieces_of_a_batch_that_come_together_read_each_part_of_the_store_once(store, pool) -> None:
    parts: list[set[int]] = []

    def load(keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        parts.append(set((keys % np.uint64(50)).tolist()))
        return MemoryStore.load(store, keys, positions, out)

    ps = partition(store, pool, rows=1_000)
    store.load = load
    store.reading_order = lambda keys: np.argsort(keys % np.uint64(50), kind="stable")
    (first,) = ps.pull(np.arange(900, dtype=np.uint64), 0)
    np.testing.assert_array_equal(
        first.rows.view(np.uint32), initial_rows(np.arange(900, dtype=np.uint64), WIDTH).view(np.uint32)
    )
    assert len(parts) > 5
    together = -(-len(parts) // ORDERED_PIECES)
    assert sum(map(len, parts)) <= 50 * together + len(parts)  # a part that two pieces share counts twice
