"""Pooled embeddings have the bits of their NumPy twin for any dimension, pooling, weights, bags, devices, threads."""

import numpy as np
import pytest

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError
from daskps.hbm.hash_table import Shard, join_shards
from daskps.hbm.pooling import pool_rows
from tests.kernels import kernel_twins as twins
from tests.kernels.kernel_inputs import ALL_DIMS, bags, wait_for_each_other


def cut(devices, rows):
    """`rows` over `devices` in unequal shards, one of them empty where there are three."""
    edges = [*[0, len(rows) // 3, len(rows) // 3][: len(devices)], len(rows)]
    pieces = [rows[edges[m] : edges[m + 1]] for m in range(len(devices))]
    shards = join_shards([Shard(d, d.from_host(piece.copy())) for d, piece in zip(devices, pieces, strict=True)])
    wait_for_each_other(devices)
    return shards


def pool(device, shards, dim, offsets, row_of, slots, weights=None, **more):
    result = pool_rows(
        device,
        shards=shards,
        dim=dim,
        row_of=device.from_host(row_of),
        offsets=device.from_host(offsets),
        slots=slots,
        weights=None if weights is None else device.from_host(weights),
        **more,
    )
    return device.to_host(result)


@pytest.mark.parametrize("dim", ALL_DIMS)
def test_any_dimension(node, rng, dim):
    devices = node(2)
    rows = rng.normal(size=(40, dim + 3)).astype(np.float32)
    shards = cut(devices, rows)
    offsets, row_of = bags(rng, 30, 40)
    want = twins.pooled(rows, dim, row_of, offsets).reshape(10, 3 * dim)
    for device in devices:
        np.testing.assert_array_equal(pool(device, shards, dim, offsets, row_of, 3), want)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("count", [1, 3])
def test_poolings_weights_and_devices(node, rng, pooling, weighted, count):
    devices = node(count)
    rows = rng.normal(size=(50, 9)).astype(np.float32)
    offsets, row_of = bags(rng, 60, 50, longest=40)
    weights = rng.normal(size=len(row_of)).astype(np.float32) if weighted else None
    want = twins.pooled(rows, 8, row_of, offsets, pooling, weights).reshape(12, 40)
    got = pool(devices[-1], cut(devices, rows), 8, offsets, row_of, 5, weights, pooling=pooling)
    np.testing.assert_array_equal(got, want)


def test_pooled_columns_stand_within_a_wider_matrix(node, rng):
    device = node(1)[0]
    rows = rng.normal(size=(20, 4)).astype(np.float32)
    offsets, row_of = bags(rng, 14, 20)
    out = device.from_host(np.full((7, 13), 5, np.float32))
    pool(device, cut([device], rows), 4, offsets, row_of, 2, out=out, column=3)
    got = device.to_host(out)
    np.testing.assert_array_equal(got[:, 3:11], twins.pooled(rows, 4, row_of, offsets).reshape(7, 8))
    assert (got[:, :3] == 5).all()
    assert (got[:, 11:] == 5).all()


def test_no_examples_and_only_empty_bags(node):
    device = node(1)[0]
    shards = cut([device], np.ones((1, 8), np.float32))
    none = np.zeros(0, np.int32)
    assert pool(device, shards, 8, np.zeros(1, np.int64), none, 4).shape == (0, 32)
    assert (pool(device, shards, 8, np.zeros(9, np.int64), none, 4, pooling="mean") == 0).all()


def test_threads_do_not_change_the_bits(rng):
    rows = rng.normal(size=(3000, 10)).astype(np.float32)
    offsets, row_of = bags(rng, 9000, 3000, longest=9)
    results = []
    for cores in range(1, 8):
        with ComputePool(cores) as threads:
            device = CpuDevice(0, threads)
            results.append(pool(device, cut([device], rows), 8, offsets, row_of, 9, pooling="sqrtn"))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim must be from 1 to 256"),
        ({"dim": 9}, "within a row of width 8, got 9"),
        ({"offsets": np.zeros(4, np.int64)}, r"offsets wants examples \* slots \+ 1 values, got 4 for 2 slots"),
        ({"offsets": np.zeros(5, np.int32)}, "offsets wants .* int64"),
        ({"row_of": np.zeros(3, np.int64)}, "row_of wants .* int32"),
        ({"weights": np.zeros(2, np.float32)}, r"weights wants .* \(3,\)"),
        ({"pooling": "max"}, "pooling must be one of"),
        ({"column": 1, "out": np.zeros((2, 16), np.float32)}, r"columns \[1, 17\) are not within out's 16 columns"),
        ({"out": np.zeros((2, 32), np.float32)[:, ::2]}, "ascontiguousarray"),
    ],
)
def test_wrong_arguments_are_explained(change, message):
    with ComputePool(1) as threads:
        device = CpuDevice(0, threads)
        good = {"dim": 8, "row_of": np.zeros(3, np.int32), "offsets": np.array([0, 1, 2, 3, 3]), "slots": 2}
        with pytest.raises(ArgumentError, match=message):
            pool_rows(device, shards=cut([device], np.ones((2, 8), np.float32)), **(good | change))
