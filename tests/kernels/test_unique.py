"""Distinct keys come once each, their numbers give the occurrences back, and threads do not change the order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.device.device import CpuDevice, Workspace
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError
from daskps.hbm.dedup import unique
from tests.kernels import kernel_twins as twins


def check(device, keys):
    found = unique(device, keys=device.from_host(keys))
    distinct, row_of = device.to_host(found.keys), device.to_host(found.row_of)
    np.testing.assert_array_equal(np.sort(distinct), np.unique(keys))
    np.testing.assert_array_equal(distinct[row_of], keys)
    assert row_of.dtype == np.int32
    return distinct


@given(keys=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 20) | st.sampled_from(twins.EDGE_KEYS.tolist())))
def test_distinct_keys_and_their_numbers(node, keys):
    check(node(1)[0], np.array(keys, np.uint64))


def test_no_keys(node):
    assert len(check(node(1)[0], np.zeros(0, np.uint64))) == 0


@pytest.mark.parametrize("distinct", [1, 3, 900])
def test_repeated_keys(node, rng, distinct):
    keys = np.concatenate([twins.EDGE_KEYS, rng.integers(0, 2**64, distinct, np.uint64)])
    check(node(1)[0], keys[rng.integers(0, len(keys), 1000)])


@pytest.mark.parametrize("keys", [60_000, 300_000])
def test_the_order_does_not_depend_on_threads_or_earlier_calls(rng, keys):
    values = np.concatenate([rng.zipf(1.2, keys).astype(np.uint64), np.full(5000, 7, np.uint64), twins.EDGE_KEYS])
    results = []
    for cores in range(1, 8):
        with ComputePool(cores) as pool:
            device = CpuDevice(0, pool)
            workspace = Workspace(device)
            unique(device, keys=rng.integers(0, 2**64, 7777, np.uint64), workspace=workspace)
            results.append(unique(device, keys=values, workspace=workspace))
            check(device, values)
    for result in results[1:]:
        np.testing.assert_array_equal(result.keys, results[0].keys)
        np.testing.assert_array_equal(result.row_of, results[0].row_of)


def test_all_keys_distinct_make_the_tables_grow(pool, rng):
    check(CpuDevice(0, pool), rng.permutation(200_000).astype(np.uint64) << np.uint64(40))


def test_wrong_dtype_is_explained(node):
    device = node(1)[0]
    with pytest.raises(
        ArgumentError, match=r"unique: keys wants a C-contiguous uint64 array \(n,\) on .*got dtype int64"
    ):
        unique(device, keys=device.zeros(3, np.int64))
