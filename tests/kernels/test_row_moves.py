"""Rows move whole and bit for bit, and negative numbers are left out."""

import numpy as np
import pytest

from daskps.errors import ArgumentError
from daskps.hbm.hash_table import Shard, join_shards
from daskps.hbm.table import copy_rows, gather_rows, scatter_rows
from tests.kernels.kernel_inputs import wait_for_each_other


@pytest.mark.parametrize("width", [1, 2, 8, 9, 17, 40, 300])
def test_gather_then_scatter_keeps_every_bit(node, rng, width):
    device = node(1)[0]
    rows = rng.integers(0, 2**32, (50, width), np.uint32).view(np.float32)  # NaNs with payloads among them
    index = rng.permutation(50)[:30].astype(np.int32)
    taken = gather_rows(device, rows=device.from_host(rows), index=device.from_host(index))
    np.testing.assert_array_equal(device.to_host(taken).view(np.uint32), rows[index].view(np.uint32))
    target = device.zeros((50, width), np.float32)
    scatter_rows(device, rows=target, index=device.from_host(index), values=taken)
    want = np.zeros((50, width), np.uint32)
    want[index] = rows.view(np.uint32)[index]
    np.testing.assert_array_equal(device.to_host(target).view(np.uint32), want)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_rows_are_copied_from_whichever_device_holds_them(node, rng, devices):
    group = node(devices)
    pieces = [rng.integers(0, 2**32, (n, 9), np.uint32).view(np.float32) for n in (20, 0, 11)[:devices]]
    shards = join_shards([Shard(device, device.from_host(rows)) for device, rows in zip(group, pieces, strict=True)])
    wait_for_each_other(group)
    whole = np.concatenate(pieces).view(np.uint32)
    source = rng.permutation(len(whole))[:15].astype(np.int32)
    target = rng.permutation(40)[:15].astype(np.int32)
    for device in group:
        rows = device.zeros((40, 9), np.float32)
        copy_rows(device, shards=shards, source=device.from_host(source), rows=rows, target=device.from_host(target))
        want = np.zeros((40, 9), np.uint32)
        want[target] = whole[source]
        np.testing.assert_array_equal(device.to_host(rows).view(np.uint32), want)


def test_negative_numbers_are_left_out(node):
    device = node(1)[0]
    rows = device.from_host(np.arange(6, dtype=np.float32).reshape(3, 2))
    index = device.from_host(np.array([-1, 2, -1], np.int32))
    out = device.from_host(np.full((3, 2), 9, np.float32))
    gather_rows(device, rows=rows, index=index, out=out)
    assert device.to_host(out).tolist() == [[9, 9], [4, 5], [9, 9]]
    scatter_rows(device, rows=rows, index=index, values=device.zeros((3, 2), np.float32))
    assert device.to_host(rows).tolist() == [[0, 1], [2, 3], [0, 0]]


def test_no_rows(node):
    device = node(1)[0]
    index = device.zeros(0, np.int32)
    taken = gather_rows(device, rows=device.zeros((0, 4), np.float32), index=index)
    assert taken.shape == (0, 4)
    scatter_rows(device, rows=device.zeros((3, 4), np.float32), index=index, values=taken)


def test_values_of_another_width_are_refused(node):
    device = node(1)[0]
    with pytest.raises(
        ArgumentError, match=r"values wants a C-contiguous float32 array \(2, 4\) .* got shape \(2, 3\)"
    ):
        scatter_rows(
            device,
            rows=device.zeros((3, 4), np.float32),
            index=device.zeros(2, np.int32),
            values=device.zeros((2, 3), np.float32),
        )
