"""Keys are dealt into parts by their mixed bits or modulo, in a stable order, whatever the number of threads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError
from daskps.hbm.dedup import OWNER_SALT, partition, parts_of
from daskps.hbm.hash_table import DEVICE_SALT
from tests.kernels import kernel_twins as twins


@pytest.mark.parametrize("modulo", [False, True])
@given(data=st.data())
def test_parts_hold_their_keys_in_order(node, modulo, data):
    device = node(1)[0]
    parts = data.draw(st.integers(1, 70))
    drawn = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9) | st.sampled_from(twins.EDGE_KEYS.tolist()))
    keys = np.array(data.draw(drawn), np.uint64)
    want = (keys % np.uint64(parts)).astype(np.int32) if modulo else twins.parts_of(keys, parts, OWNER_SALT)
    on_device = device.from_host(keys)
    np.testing.assert_array_equal(device.to_host(parts_of(device, keys=on_device, parts=parts, modulo=modulo)), want)
    got = partition(device, keys=on_device, parts=parts, modulo=modulo)
    np.testing.assert_array_equal(device.to_host(got.order), np.argsort(want, kind="stable"))
    np.testing.assert_array_equal(np.diff(got.starts), np.bincount(want, minlength=parts))


def test_threads_do_not_change_the_order(rng):
    keys = rng.integers(0, 2**64, 20_011, np.uint64)
    for cores in range(1, 8):
        with ComputePool(cores) as pool:
            got = partition(CpuDevice(0, pool), keys=keys, parts=8, salt=DEVICE_SALT)
        np.testing.assert_array_equal(got.order, np.argsort(twins.parts_of(keys, 8, DEVICE_SALT), kind="stable"))


def test_parts_are_even_and_levels_independent(rng):
    with ComputePool(2) as pool:
        device = CpuDevice(0, pool)
        keys = np.arange(100_000, dtype=np.uint64)
        by_owner = parts_of(device, keys=keys, parts=8)
        by_device = parts_of(device, keys=keys, parts=4, salt=DEVICE_SALT)
    both = np.bincount(by_owner * 4 + by_device, minlength=32)
    assert abs(both / (len(keys) / 32) - 1).max() < 0.1


def test_no_parts_are_refused(node):
    device = node(1)[0]
    with pytest.raises(ArgumentError, match="parts must be from 1 to 65536, got 0"):
        partition(device, keys=device.zeros(1, np.uint64), parts=0)
