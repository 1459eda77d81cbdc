"""flush(batch=t): the store's snapshot has every push up to t and none after, whatever happens while it is written."""

import numpy as np
import pytest

from daskps.device.pool import ComputePool
from daskps.errors import ProtocolError
from daskps.mem import MemPS, total
from tests.mem.memory_store import MemoryStore, bytes_for, initial, layout

ROWS = 64
KEYS = np.arange(ROWS, dtype=np.uint64)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1)


@pytest.fixture
def ps(store: MemoryStore, pool: ComputePool) -> MemPS:
    return MemPS(layout=layout(1), store=store, initial=initial, memory_bytes=bytes_for(1, cache_rows=ROWS), pool=pool)


def train(ps: MemPS, keys: np.ndarray, batch: int) -> None:
    ps.pull(keys, batch)
    ps.push(keys, np.full((len(keys), 1), batch, np.float32), batch)


def values(rows: dict[int, bytes]) -> dict[int, float]:
    return {key: float(np.frombuffer(row, np.float32)[0]) for key, row in rows.items()}


def test_rows_pushed_while_it_is_written_do_not_leak_into_it(store, ps) -> None:
    train(ps, KEYS, 0)
    ps.flush_begin(0, "zero")
    assert ps.flush_step() is False
    train(ps, KEYS, 1)  # overwrites rows that are written and rows that are not
    ps.flush_finish()
    assert values(store.snapshots["zero"]) == dict.fromkeys(range(ROWS), 0.0)
    assert ps.lookup(KEYS)[:, 0].tolist() == [1.0] * ROWS
    ps.flush(1, "one")
    assert values(store.snapshots["one"]) == dict.fromkeys(range(ROWS), 1.0)


def test_a_batch_that_needs_room_which_only_newer_rows_can_give_finishes_the_snapshot_first(store, ps) -> None:
    train(ps, KEYS, 0)
    ps.flush_begin(0, "zero")
    train(ps, KEYS, 1)  # all rows in memory are newer than the snapshot
    assert "zero" not in store.snapshots
    train(ps, KEYS + np.uint64(1000), 2)
    assert values(store.snapshots["zero"]) == dict.fromkeys(range(ROWS), 0.0)
    assert total(ps.statistics).forced_flushes == 1
    assert ps.lookup(KEYS)[:, 0].tolist() == [1.0] * ROWS


def test_rows_evicted_while_it_is_written_are_in_it_once_and_as_they_were(store, ps) -> None:
    train(ps, KEYS, 0)
    ps.flush_begin(0, "zero")
    train(ps, np.arange(2000, 2032, dtype=np.uint64), 1)  # evicts half, before the snapshot has written them
    ps.flush_finish()
    assert values(store.snapshots["zero"]) == dict.fromkeys(range(ROWS), 0.0)


def test_a_key_that_was_only_pulled_is_not_stored(store, ps) -> None:
    train(ps, KEYS[:3], 0)
    ps.pull(KEYS[3:6], 1)
    ps.flush(0, "zero")
    assert sorted(store.snapshots["zero"]) == [0, 1, 2]


def test_a_row_out_with_a_later_batch_is_in_the_snapshot_as_last_pushed(store, ps) -> None:
    ps.pull(KEYS[:2], 0)
    ps.pull(KEYS[:2], 1)
    ps.push(KEYS[:2], np.ones((2, 1), np.float32), 0)
    ps.flush(0, "zero")
    assert values(store.snapshots["zero"]) == {0: 1.0, 1: 1.0}


def test_a_second_snapshot_writes_only_what_changed(store, ps) -> None:
    train(ps, KEYS, 0)
    ps.flush(0, "zero")
    before = store.appended_rows
    train(ps, KEYS[:5], 1)
    ps.flush(1, "one")
    assert store.appended_rows - before == 5


def test_a_snapshot_can_be_asked_for_before_its_batch_is_over(store, ps) -> None:
    ps.pull(KEYS[:2], 0)
    ps.flush_begin(0, "zero")
    assert ps.flushing
    assert ps.flush_step() is False
    with pytest.raises(ProtocolError, match="snapshot of batch 0 has not begun"):
        ps.flush_finish()
    ps.push(KEYS[:2], np.ones((2, 1), np.float32), 0)
    train(ps, KEYS[:2], 1)
    ps.flush_finish()
    assert values(store.snapshots["zero"]) == {0: 1.0, 1: 1.0}


def test_a_flush_at_the_wrong_time_says_what_is_missing(ps) -> None:
    ps.pull(KEYS[:1], 0)
    with pytest.raises(ProtocolError, match=r"flush\(0\), but its rows are not all pushed: in flight are \[0\]"):
        ps.flush(0, "zero")
    ps.push(KEYS[:1], np.ones((1, 1), np.float32), 0)
    with pytest.raises(ProtocolError, match=r"flush\(-1\) comes too late: rows of batch 0 have been pushed"):
        ps.flush(-1, "before")
    ps.flush_begin(0, "zero")
    with pytest.raises(ProtocolError, match="an earlier snapshot is not finished"):
        ps.flush(0, "again")


def test_a_store_that_fails_can_be_asked_again(store, ps, monkeypatch) -> None:
    train(ps, KEYS, 0)
    ps.flush_begin(0, "zero")
    ps.pull(KEYS[:1], 1)
    ps.push(KEYS[:1], np.ones((1, 1), np.float32), 1)
    monkeypatch.setattr(store, "append", lambda keys, rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ps.flush_step()
    monkeypatch.undo()
    ps.flush_finish()
    assert values(store.snapshots["zero"]) == dict.fromkeys(range(ROWS), 0.0)


def test_pushes_and_evictions_while_another_thread_has_a_piece_do_not_change_the_snapshot(store, ps) -> None:
    train(ps, KEYS, 0)
    ps.flush_begin(0, "zero")
    piece = ps.next_piece()
    assert piece is not None
    train(ps, KEYS, 1)  # replaces the rows of the piece in the cache before they are written
    piece()
    ps.piece_written(piece)
    ps.flush_finish()
    assert values(store.snapshots["zero"]) == dict.fromkeys(range(ROWS), 0.0)
    ps.flush(1, "one")
    assert values(store.snapshots["one"]) == dict.fromkeys(range(ROWS), 1.0)


def test_a_row_that_takes_the_entry_of_an_evicted_one_is_not_taken_for_stored(store, ps) -> None:
    train(ps, KEYS, 0)
    ps.flush_begin(0, "zero")
    piece = ps.next_piece()
    others = np.arange(2000, 2000 + ROWS // 2, dtype=np.uint64)
    train(ps, others, 1)  # evicts half of the rows, also of the piece, and takes their entries
    piece()
    ps.piece_written(piece)
    ps.flush_finish()
    ps.flush(1, "one")
    assert values(store.snapshots["one"]) == dict.fromkeys(range(ROWS), 0.0) | dict.fromkeys(others.tolist(), 1.0)


def test_a_batch_that_needs_room_waits_for_the_piece_that_another_thread_writes(store, ps) -> None:
    train(ps, KEYS, 0)
    ps.flush_begin(0, "zero")
    piece = ps.next_piece()
    train(ps, KEYS, 1)
    train(ps, KEYS + np.uint64(1000), 2)  # finishes the snapshot
    before = store.appended_rows
    piece()
    ps.piece_written(piece)
    assert (ps.next_piece(), store.appended_rows) == (None, before)
    assert values(store.snapshots["zero"]) == dict.fromkeys(range(ROWS), 0.0)
