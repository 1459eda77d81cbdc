"""Occurrences are grouped by row: touched rows ascending, occurrences in their order, only the shard's own rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.device.device import CpuDevice, Workspace
from daskps.device.pool import ComputePool
from daskps.hbm.pooling import group_occurrences
from tests.kernels import kernel_twins as twins
from tests.kernels.kernel_inputs import PTXRUN


def check(device, row_of, offsets, slots, first_row, row_count, pooling="sum", weights=None, workspace=None):
    groups = group_occurrences(
        device,
        row_of=device.from_host(row_of),
        offsets=device.from_host(offsets),
        slots=slots,
        first_row=first_row,
        row_count=row_count,
        pooling=pooling,
        weights=None if weights is None else device.from_host(weights),
        workspace=workspace,
    )
    touched, starts, bags, coefficients = twins.grouped(row_of, offsets, first_row, row_count, pooling, weights)
    np.testing.assert_array_equal(device.to_host(groups.touched), touched)
    np.testing.assert_array_equal(device.to_host(groups.starts), starts)
    np.testing.assert_array_equal(device.to_host(groups.bags), bags)
    if pooling == "sum" and weights is None:
        assert groups.coefficients is None
    else:
        np.testing.assert_array_equal(device.to_host(groups.coefficients), coefficients)


@given(data=st.data())
def test_any_rows_and_bags(node, data):
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=0, max_size=40))
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int64)
    count = sum(lengths)
    row_of = np.array(data.draw(st.lists(st.integers(-1, 30), min_size=count, max_size=count)), np.int32)
    first = data.draw(st.integers(0, 31))
    check(node(1)[0], row_of, offsets, 1, first, data.draw(st.integers(0, 31 - first)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
def test_coefficients_are_weight_times_scale(node, rng, pooling, weighted):
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, 60))]).astype(np.int64)
    row_of = rng.integers(-1, 40, offsets[-1]).astype(np.int32)
    weights = rng.random(offsets[-1]).astype(np.float32) if weighted else None
    check(node(1)[0], row_of, offsets, 3, 5, 30, pooling, weights)


@pytest.mark.skipif(PTXRUN, reason="the CPU's order of work")
@pytest.mark.parametrize("rows", [300, 100_000, 40_000_000])
def test_many_parts_and_any_number_of_threads(rng, rows):
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, 12_000))]).astype(np.int64)
    row_of = np.minimum(rng.zipf(1.1, offsets[-1]), rows).astype(np.int32) - 1
    row_of[: len(row_of) // 2] = rng.integers(0, rows, len(row_of) // 2)
    for cores in range(1, 8):
        with ComputePool(cores) as pool:
            device = CpuDevice(0, pool)
            workspace = Workspace(device)
            check(device, row_of[:10], offsets[:1].repeat(2) * 0 + np.array([0, 10]), 1, 0, rows, workspace=workspace)
            check(device, row_of, offsets, 4, 0, rows, workspace=workspace)
            check(device, row_of, offsets, 4, rows // 3, rows // 2, workspace=workspace)
