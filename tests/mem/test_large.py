"""Working sets large enough for shares, several visit runs and several staging pieces: still the rows of an array."""

import numpy as np
import pytest

from daskps.device.pool import ComputePool
from daskps.mem import MemPS, total
from tests.mem.memory_store import EmptyStore, bytes_for, initial, initial_rows, layout

KEYS = 150_000
WIDTH = 5


class ArrayStore(EmptyStore):
    """A store over keys 0..KEYS-1, quick enough for many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = np.zeros((KEYS, WIDTH), np.float32)
        self.known = np.zeros(KEYS, np.bool_)
        self.prepared: dict[str, np.ndarray] = {}
        self.appends = 0

    def append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self.rows[keys] = rows
        self.known[keys] = True
        self.appends += 1

    def load(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        found = self.known[keys]
        out[positions[found]] = self.rows[keys[found]]
        return found

    def prepare(self, snapshot_id: str) -> None:
        self.prepared[snapshot_id] = np.where(self.known[:, None], self.rows, 0)


def play(cores: int, index_growth: int = 0) -> tuple[MemPS, ArrayStore]:
    """Twelve batches, two in flight, with a snapshot in pieces; every row is compared on the way."""
    random = np.random.default_rng(5)
    store = ArrayStore()
    model = initial_rows(np.arange(KEYS, dtype=np.uint64), WIDTH)
    ever = np.zeros(KEYS, np.bool_)
    with ComputePool(cores) as pool:
        memory_bytes = bytes_for(WIDTH, cache_rows=60_000)
        ps = MemPS(layout=layout(WIDTH), store=store, initial=initial, memory_bytes=memory_bytes, pool=pool)
        tables: dict[int, list[np.ndarray]] = {}

        def pull(batch: int) -> None:
            keys = random.permutation(np.unique((KEYS * random.random(28_000) ** 3).astype(np.uint64)))
            out = np.zeros((len(keys), WIDTH), np.float32)
            (first,) = ps.pull(keys, batch, out=out)
            assert len(first.deferred) == 0
            tables[batch] = [keys, out, first.forwarded]

        pull(0)
        expected_snapshot = None
        for batch in range(12):
            if batch < 11:
                pull(batch + 1)
            keys, rows, _ = tables[batch]
            np.testing.assert_array_equal(rows.view(np.uint32), model[keys].view(np.uint32))
            result = (rows.view(np.uint32) * np.uint32(3) + np.uint32(batch)).view(np.float32)
            model[keys] = result
            ever[keys] = True
            if batch < 11:
                next_keys, next_rows, copied = tables[batch + 1]
                next_rows[copied] = model[next_keys[copied]]
            ps.push(keys, result, batch)
            if batch == 5:
                ps.flush_begin(5, "five")
                expected_snapshot = np.where(ever[:, None], model, 0)
            ps.flush_step()
            store.memory_bytes += index_growth
            assert ps.cached_rows <= ps.cache_rows
        ps.flush_finish()
        np.testing.assert_array_equal(store.prepared["five"].view(np.uint32), expected_snapshot.view(np.uint32))
        every = random.permutation(KEYS).astype(np.uint64)
        np.testing.assert_array_equal(ps.lookup(every).view(np.uint32), model[every].view(np.uint32))
    return ps, store


def test_any_number_of_threads_gives_the_same_rows_and_the_same_evictions() -> None:
    (one, store_one), (three, store_three) = play(1), play(3)
    assert total(one.statistics).written_back > 10_000
    assert list(one.statistics) == list(three.statistics)
    assert store_one.appends == store_three.appends


@pytest.mark.parametrize("index_growth", [30_000, 70_000])
def test_the_cache_shrinks_as_the_index_of_the_store_grows_and_no_row_is_lost(index_growth: int) -> None:
    ps, _ = play(2, index_growth)
    assert 0 < total(ps.statistics).given_rows <= ps.budget.cache_rows - ps.cache_rows
    assert ps.used_bytes <= ps.budget.memory_bytes
