"""The hash table finds every key it was built from on whichever device, and says so when a key is absent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.errors import ArgumentError, CapacityError
from daskps.hbm.dedup import partition
from daskps.hbm.hash_table import DEVICE_SALT, Shard, build_table, find_rows, join_shards, table_cells
from tests.kernels import kernel_twins as twins


def build(devices, keys, load=None):
    """Shards of `keys` over `devices`; and the keys in the order of their row numbers."""
    parts = partition(devices[0], keys=devices[0].from_host(keys), parts=len(devices), salt=DEVICE_SALT)
    order = devices[0].to_host(parts.order)
    shards = []
    for m, device in enumerate(devices):
        mine = keys[order[parts.starts[m] : parts.starts[m + 1]]]
        cells = None if load is None else device.empty((max(int(len(mine) / load), 1), 2), np.uint64)
        cells = build_table(device, keys=device.from_host(mine), first_row=int(parts.starts[m]), cells=cells)
        shards.append(Shard(device, device.zeros((len(mine), 2), np.float32), cells))
    return join_shards(shards), keys[order]


@pytest.mark.parametrize("count", [1, 2, 3])
@given(data=st.data())
def test_every_device_finds_present_keys_and_no_others(node, count, data):
    devices = node(count)
    keys = st.lists(st.integers(0, 2**64 - 1) | st.sampled_from(twins.EDGE_KEYS.tolist()), unique=True)
    present = np.array(data.draw(keys), np.uint64)
    asked = np.concatenate([present, np.array(data.draw(keys), np.uint64), twins.EDGE_KEYS])
    shards, ordered = build(devices, present)
    numbers = {int(key): row for row, key in enumerate(ordered)}
    for device in devices:
        rows = device.to_host(find_rows(device, shards=shards, keys=device.from_host(asked)))
        assert rows.tolist() == [numbers.get(int(key), -1) for key in asked]


def test_a_table_without_a_free_cell_still_finds_and_still_ends(node, rng):
    keys = np.concatenate([twins.EDGE_KEYS, rng.integers(0, 2**64, 95, np.uint64)])
    shards, ordered = build(node(1), keys, load=1.0)
    device = shards.shards[0].device
    np.testing.assert_array_equal(
        device.to_host(find_rows(device, shards=shards, keys=device.from_host(ordered))), np.arange(100)
    )
    absent = device.from_host(np.arange(1000, 1010, dtype=np.uint64))
    assert (device.to_host(find_rows(device, shards=shards, keys=absent)) == -1).all()


def test_a_table_that_is_too_small_is_an_error_with_figures(node):
    device = node(1)[0]
    with pytest.raises(
        CapacityError, match=rf"table of 8 cells cannot hold 9 keys; give it at least {table_cells(9)} cells"
    ):
        build_table(device, keys=device.from_host(np.arange(9, dtype=np.uint64)), cells=device.empty((8, 2), np.uint64))


def test_many_threads_build_one_table(pool, rng):
    from daskps.device.device import CpuDevice
    from daskps.device.pool import ComputePool

    keys = np.unique(rng.integers(0, 2**64, 50_000, np.uint64))
    with ComputePool(7) as threads:
        shards, ordered = build([CpuDevice(0, threads)], keys, load=0.95)
        rows = find_rows(shards.shards[0].device, shards=shards, keys=ordered)
    np.testing.assert_array_equal(rows, np.arange(len(keys)))


def test_an_empty_shard_is_passed_over(node, rng):
    devices = node(3)
    keys = rng.integers(0, 2**64, 1, np.uint64)
    shards, _ = build(devices, keys)
    assert sorted(len(shard.rows) for shard in shards.shards) == [0, 0, 1]
    for device in devices:
        assert device.to_host(find_rows(device, shards=shards, keys=device.from_host(keys))).tolist() == [0]


def test_shards_of_different_width_are_refused(node):
    device = node(1)[0]
    with pytest.raises(ArgumentError, match=r"rows wants .* array \(n, 2\)"):
        join_shards([Shard(device, device.zeros((1, 2), np.float32)), Shard(device, device.zeros((1, 3), np.float32))])


def test_a_device_outside_the_shards_is_named(node):
    devices = node(2)
    shards, _ = build(devices[:1], twins.EDGE_KEYS)
    with pytest.raises(ArgumentError, match=r":1 is none of the table's devices"):
        find_rows(devices[1], shards=shards, keys=devices[1].zeros(1, np.uint64))
