"""Several partitions answer as one store, can be owned by different nodes, and commit together or not at all."""

import numpy as np
import pytest

from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, StoreError
from daskps.ssd import Options, Placement, Store, TableStore
from daskps.storage.model_directory import apply_live
from tests.ssd.helpers import LAYOUT, QUIET, as_dict, check, rows_for

KEYS = np.random.default_rng(0).integers(0, 2**64, 3000, np.uint64)


@pytest.mark.parametrize("partitions", [1, 3, 8])
@pytest.mark.parametrize("hash", ["mixed", "modulo"])
def test_partitions_answer_as_one_store(tmp_path, pool: ComputePool, partitions: int, hash: str) -> None:
    options = {"pool": pool, "options": QUIET}
    with TableStore.create(tmp_path, LAYOUT, partitions=partitions, hash=hash, file_rows=64, **options) as table:
        rows = rows_for(KEYS)
        table.append(KEYS, rows)
        model = as_dict(KEYS, rows)
        check(table, model, others=np.arange(50, dtype=np.uint64))
        table.commit("a")
        deleted = table.delete(np.array([KEYS[0], 1, KEYS[2]], np.uint64))
        assert deleted.tolist() == [True, False, True]
        table.append(KEYS[5:900], rows_for(KEYS[5:900]))
        table.prepare("b")
        for store in table.stores.values():
            assert {s.id: s.state for s in store.snapshots()} == {"a": "confirmed", "b": "prepared"}
        assert table.stats().live_rows == len(model) - 2
        table.verify()
    with TableStore.open(tmp_path, **options) as table:
        check(table, model)


@pytest.mark.parametrize("hash", ["mixed", "modulo"])
@pytest.mark.parametrize("count", [0, 1, 3000, 100_000])
def test_keys_are_split_stably_by_partition(pool: ComputePool, hash: str, count: int) -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, count, np.uint64)
    placement = Placement(7, hash)
    order, begins = placement.split(keys, pool)
    numbers = placement.of(keys, pool)
    np.testing.assert_array_equal(order, np.argsort(numbers, kind="stable"))
    np.testing.assert_array_equal(np.diff(begins), np.bincount(numbers, minlength=7))


def test_nodes_take_over_folders(tmp_path, pool: ComputePool) -> None:
    rows = rows_for(KEYS)
    TableStore.create(tmp_path, LAYOUT, pool=pool, owned=[0, 1, 2], options=QUIET).close()
    TableStore.create(tmp_path, LAYOUT, pool=pool, owned=[3, 4, 5, 6, 7], options=QUIET).close()
    owner = Placement(8).of(KEYS, pool)
    assert np.bincount(owner, minlength=8).min() > 300
    for owned in ([0, 1, 2, 3], [4, 5, 6, 7]):
        mine = np.isin(owner, owned)
        with TableStore.open(tmp_path, pool=pool, owned=owned, options=QUIET) as table:
            table.append(KEYS[mine], rows[mine])
            table.commit("a")
            with pytest.raises(ArgumentError, match=r"belongs to partition \d of 8, but only \[.*\] are owned here"):
                table.load(KEYS)
    with TableStore.open(tmp_path, pool=pool, read_only=True) as table:
        check(table, as_dict(KEYS, rows))


def test_a_commit_that_stopped_between_partitions_is_decided_by_the_first_confirmation(
    tmp_path, pool: ComputePool
) -> None:
    first, second = rows_for(KEYS), rows_for(KEYS)
    with TableStore.create(tmp_path, LAYOUT, pool=pool, partitions=3, options=QUIET) as table:
        table.append(KEYS, first)
        table.commit("a")
        table.append(KEYS, second)
        for number in (0, 1):
            table.stores[number].prepare("b")
    with TableStore.open(tmp_path, pool=pool, options=QUIET) as table:  # one had not prepared: not decided
        check(table, as_dict(KEYS, first))
        for store in table.stores.values():
            apply_live(store, ["a"], discard_unpublished=True)
        table.append(KEYS, second)
        table.prepare("c")
        table.stores[1].confirm("c")
    with TableStore.open(tmp_path, pool=pool, options=QUIET) as table:  # all had, and one confirmed: decided
        check(table, as_dict(KEYS, second))
        assert [s.state for store in table.stores.values() for s in store.snapshots()] == ["confirmed"] * 6


def test_a_failed_prepare_leaves_nothing_prepared(tmp_path, pool: ComputePool) -> None:
    with TableStore.create(tmp_path, LAYOUT, pool=pool, partitions=3, options=QUIET) as table:
        table.append(KEYS, rows_for(KEYS))
        table.stores[2].close()
        with pytest.raises(StoreError, match="closed"):
            table.prepare("a")
        assert not any(table.stores[number].snapshots() for number in (0, 1))


def test_another_table_or_a_single_store_is_refused(tmp_path, pool: ComputePool) -> None:
    TableStore.create(tmp_path / "table", LAYOUT, pool=pool, partitions=2, options=Options()).close()
    with pytest.raises(StoreError, match="another table"):
        TableStore.create(tmp_path / "table", LAYOUT, pool=pool, partitions=3)
    Store.create(tmp_path / "store", LAYOUT, pool=pool).close()
    with pytest.raises(StoreError, match="single partition"):
        TableStore.open(tmp_path / "store", pool=pool)
    with pytest.raises(StoreError, match="no partitions there"):
        TableStore.open(tmp_path / "nowhere", pool=pool)
    with pytest.raises(ArgumentError, match="from 0 to 1, got"):
        TableStore.open(tmp_path / "table", pool=pool, owned=[2])
