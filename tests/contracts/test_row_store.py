"""The contract of `RowStore`. A new implementation subclasses `RowStoreContract` and says how it is made."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskps.device.pool import ComputePool
from daskps.ssd import Options, TableStore
from daskps.storage.partition import Placement
from daskps.storage.row_store import RowStore
from daskps.types import Field, RowLayout
from tests.mem.memory_store import MemoryStore
from tests.simulation.disk import SimulatedDisk, SimulatedFiles
from tests.simulation.simulated_store import SimulatedPartition, SimulatedStore

WIDTH = 5
LAYOUT = RowLayout((Field("embedding", WIDTH),))
EXTREMES = np.array([0, 1, 2**32, 2**63, 2**64 - 1], np.uint64)


def rows_of(keys: np.ndarray, seed: int) -> np.ndarray:
    """Rows of any bits, NaN among them: a store does not look at them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, (len(keys), WIDTH), np.uint32)
    return bits.view(np.float32)


def load(store: RowStore, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((len(keys), WIDTH), np.float32)
    return out, store.start_load(keys, np.arange(len(keys), dtype=np.uint32), out).wait()


def bits(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint32)


class RowStoreContract:
    """What MEM-PS relies on. Subclasses have a fixture `store`, of rows of WIDTH values, and `read_snapshot`."""

    def read_snapshot(self, store: Any, snapshot_id: str) -> dict[int, bytes]:
        """Return the rows of a prepared snapshot by key."""
        raise NotImplementedError

    def test_appended_rows_come_back_bit_for_bit(self, store: RowStore) -> None:
        keys = np.unique(np.concatenate([EXTREMES, np.random.default_rng(0).integers(0, 2**64, 3000, np.uint64)]))
        rows = rows_of(keys, 1)
        store.append(keys, rows)
        found_rows, found = load(store, keys)
        assert found.dtype == np.bool_
        assert found.all()
        np.testing.assert_array_equal(bits(found_rows), bits(rows))

    def test_rows_go_to_the_callers_positions_and_no_other_row_changes(self, store: RowStore) -> None:
        keys = np.arange(40, dtype=np.uint64)
        rows = rows_of(keys, 2)
        store.append(keys, rows)
        wanted = np.array([7, 100, 3, 39, 200, 7], np.uint64)  # 100 and 200 are unknown, 7 comes twice
        positions = np.array([9, 8, 0, 5, 2, 1], np.uint32)
        out = rows_of(np.arange(10), 3)
        expected = out.copy()
        expected[[9, 0, 5, 1]] = rows[[7, 3, 39, 7]]
        assert store.start_load(wanted, positions, out).wait().tolist() == [True, False, True, True, False, True]
        np.testing.assert_array_equal(bits(out), bits(expected))

    def test_two_loads_may_be_under_way_at_once(self, store: RowStore) -> None:
        keys = np.arange(100, dtype=np.uint64)
        rows = rows_of(keys, 4)
        store.append(keys, rows)
        out = np.zeros((100, WIDTH), np.float32)
        last = store.start_load(keys[50:], np.arange(50, 100, dtype=np.uint32), out)
        first = store.start_load(keys[:50], np.arange(50, dtype=np.uint32), out)
        store.append(keys + np.uint64(1000), rows)  # of other keys
        assert first.wait().all()
        assert last.wait().all()
        np.testing.assert_array_equal(bits(out), bits(rows))

    def test_one_thread_may_load_while_another_appends_and_prepares(self, store: RowStore) -> None:
        keys = np.arange(500, dtype=np.uint64)
        rows = rows_of(keys, 13)
        store.append(keys, rows)

        def change() -> None:
            for number in range(5):
                others = keys + np.uint64(1000 * (1 + number))
                store.append(others, rows_of(others, number))
                store.prepare(f"000001-{number:08d}")

        with ThreadPoolExecutor(1) as executor:
            changing = executor.submit(change)
            loads = 0
            while not changing.done() or not loads:
                found_rows, found = load(store, keys)
                assert found.all()
                np.testing.assert_array_equal(bits(found_rows), bits(rows))
                loads += 1
            changing.result()
        assert len(self.read_snapshot(store, "000001-00000004")) == 6 * len(keys)

    def test_no_keys_are_a_load_an_append_and_a_delete_too(self, store: RowStore) -> None:
        none = np.empty(0, np.uint64)
        store.append(none, np.empty((0, WIDTH), np.float32))
        assert len(load(store, none)[1]) == len(store.delete(none)) == len(store.reading_order(none)) == 0

    def test_the_last_row_appended_counts(self, store: RowStore) -> None:
        keys = np.arange(300, dtype=np.uint64)
        first, second = rows_of(keys, 5), rows_of(keys, 6)
        store.append(keys, first)
        store.append(keys[100:], second[100:])
        np.testing.assert_array_equal(bits(load(store, keys)[0]), bits(np.concatenate([first[:100], second[100:]])))

    def test_the_arrays_of_an_append_may_be_used_again(self, store: RowStore) -> None:
        keys = np.arange(300, dtype=np.uint64)
        rows = rows_of(keys, 7)
        given_keys, given_rows = keys.copy(), rows.copy()
        store.append(given_keys, given_rows)
        given_keys[:], given_rows[:] = 0, 0
        np.testing.assert_array_equal(bits(load(store, keys)[0]), bits(rows))

    def test_deleted_keys_are_unknown_until_they_are_appended_again(self, store: RowStore) -> None:
        keys = np.arange(100, dtype=np.uint64)
        rows = rows_of(keys, 8)
        store.append(keys, rows)
        assert store.delete(np.array([5, 500, 6], np.uint64)).tolist() == [True, False, True]
        found = load(store, keys)[1]
        assert np.flatnonzero(~found).tolist() == [5, 6]
        assert store.delete(keys[5:6]).tolist() == [False]
        store.append(keys[5:6], rows[5:6])
        assert load(store, keys[5:6])[1].all()

    def test_a_snapshot_has_the_rows_of_its_moment(self, store: RowStore) -> None:
        keys = np.arange(200, dtype=np.uint64)
        rows = rows_of(keys, 9)
        store.append(keys, rows)
        store.prepare("000001-00000001")
        store.append(keys[:50], rows_of(keys[:50], 10))
        store.delete(keys[50:60])
        store.append(np.array([1000], np.uint64), rows[:1])
        kept = self.read_snapshot(store, "000001-00000001")
        assert kept == {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}

    def test_the_reading_order_is_a_permutation(self, store: RowStore) -> None:
        keys = np.random.default_rng(0).integers(0, 2**64, 1000, np.uint64)
        np.testing.assert_array_equal(np.sort(store.reading_order(keys)), np.arange(1000))

    def test_sizes_are_whole_numbers_and_buffers_are_part_of_the_memory(self, store: RowStore) -> None:
        keys = np.arange(1000, dtype=np.uint64)
        store.append(keys, rows_of(keys, 11))
        store.prepare("000001-00000001")
        sizes = store.memory_bytes, store.buffer_bytes, store.disk_bytes, store.file_bytes
        assert all(isinstance(size, int) and size >= 0 for size in sizes)
        assert store.buffer_bytes <= store.memory_bytes


class TestTableStore(RowStoreContract):
    """On disk: segments so short that a test writes many."""

    @pytest.fixture(params=[1, 3])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path, pool: ComputePool) -> Iterator[TableStore]:
        options = Options(background_compaction=False)
        with TableStore.create(
            tmp_path, LAYOUT, pool=pool, partitions=request.param, file_rows=64, options=options
        ) as store:
            yield store

    def read_snapshot(self, store: TableStore, snapshot_id: str) -> dict[int, bytes]:
        pieces = store.scan(snapshot_id)
        return {int(key): row.tobytes() for keys, rows in pieces for key, row in zip(keys, rows, strict=True)}

    def test_a_failed_load_raises_when_it_is_waited_for(self, store: TableStore, tmp_path: Path) -> None:
        keys = np.arange(1000, dtype=np.uint64)
        store.append(keys, rows_of(keys, 12))
        store.prepare("000001-00000001")
        for path in tmp_path.glob("*/rows/c.*"):
            path.unlink()
        loading = store.start_load(keys, np.arange(1000, dtype=np.uint32), np.empty((1000, WIDTH), np.float32))
        with pytest.raises(Exception, match="missing"):
            loading.wait()


class TestMemoryStore(RowStoreContract):
    """In memory, for tests of MEM-PS."""

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore(WIDTH)

    def read_snapshot(self, store: MemoryStore, snapshot_id: str) -> dict[int, bytes]:
        return store.snapshots[snapshot_id]


class TestSimulatedStore(RowStoreContract):
    """On the simulated disk."""

    @pytest.fixture
    def store(self) -> SimulatedStore:
        disk = SimulatedDisk()
        roots = {part: SimulatedFiles(disk, f"tables/main/{part}") for part in range(3)}
        partitions = {part: SimulatedPartition(files, "model") for part, files in roots.items()}
        return SimulatedStore(partitions, Placement(3))

    def read_snapshot(self, store: SimulatedStore, snapshot_id: str) -> dict[int, bytes]:
        rows: dict[int, bytes] = {}
        for partition in store.stores.values():
            partition.open(snapshot_id)
            rows |= partition.rows
        return rows
