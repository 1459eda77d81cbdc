"""The gradient of a row is one associative sum: the same bits for any order, threads, devices and split, and exact
against its NumPy twin. What does not fit fixed point is reported, never wrapped."""

import numpy as np
import pytest

from daskps.device.device import CpuDevice
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, NonFiniteError
from daskps.hbm.gradient import Status, add_sums, apply_sums, join_sources, sum_gradients, update_rows
from daskps.hbm.optimizer import Optimizer
from daskps.hbm.pooling import group_occurrences
from tests.kernels import kernel_twins as twins
from tests.kernels.kernel_inputs import ALL_DIMS, bags, wait_for_each_other

ADAGRAD = Optimizer("rowwise_adagrad", learning_rate=0.1)


def step(devices, rows, dim, row_of, offsets, slots, gradient, *, weights=None, pooling="sum", split=False, column=0):
    """One step on `rows` cut evenly over `devices`, examples too; the new rows, and the sums where split."""
    edges = [len(rows) * m // len(devices) for m in range(len(devices) + 1)]
    examples = [len(gradient) * m // len(devices) for m in range(len(devices) + 1)]
    pieces = [d.from_host(gradient[examples[m] : examples[m + 1]].copy()) for m, d in enumerate(devices)]
    sources = join_sources(devices, pieces, slots=slots, dim=dim, column=column)
    wait_for_each_other(devices)
    new, all_sums = [], []
    for m, device in enumerate(devices):
        device.enable_peers(devices)
        groups = group_occurrences(
            device,
            row_of=device.from_host(row_of),
            offsets=device.from_host(offsets),
            slots=slots,
            first_row=edges[m],
            row_count=edges[m + 1] - edges[m],
            pooling=pooling,
            weights=None if weights is None else device.from_host(weights),
        )
        status, mine = Status(device), device.from_host(rows[edges[m] : edges[m + 1]].copy())
        if split:
            sums = sum_gradients(device, groups=groups, sources=sources, status=status)
            all_sums.append(device.to_host(sums))
            apply_sums(device, touched=groups.touched, sums=sums, optimizer=ADAGRAD, weight=7, rows=mine, status=status)
        else:
            update_rows(device, groups=groups, sources=sources, optimizer=ADAGRAD, weight=7, rows=mine, status=status)
        status.check()
        new.append(device.to_host(mine))
    return np.concatenate(new), (np.concatenate(all_sums) if split else None)


@pytest.mark.parametrize("dim", ALL_DIMS)
def test_sums_and_rows_of_any_dimension(node, rng, dim):
    rows = rng.normal(size=(30, dim + 2)).astype(np.float32)
    rows[:, dim] = np.abs(rows[:, dim])
    offsets, row_of = bags(rng, 24, 30)
    gradient = rng.normal(size=(8, 3 * dim)).astype(np.float32)
    touched, starts, occurrences, coefficients = twins.grouped(row_of, offsets, 0, 30)
    wanted_sums = twins.fixed_sums(gradient.reshape(24, dim), starts, occurrences, coefficients)
    wanted = rows.copy()
    wanted[touched] = twins.stepped(ADAGRAD, rows[touched], wanted_sums, 7)
    got, sums = step(node(1), rows, dim, row_of, offsets, 3, gradient, split=True)
    np.testing.assert_array_equal(sums, wanted_sums)
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(step(node(1), rows, dim, row_of, offsets, 3, gradient)[0], wanted)


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_devices_do_not_change_the_bits(node, rng, pooling, weighted):
    rows = np.abs(rng.normal(size=(60, 5))).astype(np.float32)
    offsets, row_of = bags(rng, 75, 60, longest=12)
    weights = rng.normal(size=len(row_of)).astype(np.float32) if weighted else None
    gradient = rng.normal(size=(15, 23)).astype(np.float32)  # 5 slots of 4 from column 2 on
    more = {"weights": weights, "pooling": pooling, "column": 2}
    one, _ = step(node(1), rows, 4, row_of, offsets, 5, gradient, **more)
    touched, starts, occurrences, coefficients = twins.grouped(row_of, offsets, 0, 60, pooling, weights)
    sums = twins.fixed_sums(gradient[:, 2:22].reshape(75, 4), starts, occurrences, coefficients)
    np.testing.assert_array_equal(one[touched], twins.stepped(ADAGRAD, rows[touched], sums, 7))
    for count in (2, 3):
        np.testing.assert_array_equal(step(node(count), rows, 4, row_of, offsets, 5, gradient, **more)[0], one)
        np.testing.assert_array_equal(
            step(node(count), rows, 4, row_of, offsets, 5, gradient, split=True, **more)[0], one
        )


def test_threads_do_not_change_the_bits(rng):
    rows = np.abs(rng.normal(size=(3000, 9))).astype(np.float32)
    offsets, row_of = bags(rng, 8000, 3000)
    row_of[rng.random(len(row_of)) < 0.3] = 17  # one hot row
    gradient = rng.normal(size=(2000, 32)).astype(np.float32)
    results = []
    for cores in range(1, 8):
        with ComputePool(cores) as pool:
            devices = [CpuDevice(index, pool) for index in range(1 + cores % 4)]
            results.append(step(devices, rows, 8, row_of, offsets, 4, gradient, split=cores % 2 == 0)[0])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_sums_of_other_nodes_are_added(node, rng):
    device = node(1)[0]
    sums = rng.integers(-(2**40), 2**40, (20, 6))
    received = rng.integers(-(2**40), 2**40, (7, 6))
    positions = rng.permutation(20)[:7].astype(np.int32)
    on_device, status = device.from_host(sums.copy()), Status(device)
    add_sums(
        device,
        sums=on_device,
        positions=device.from_host(positions),
        received=device.from_host(received),
        status=status,
    )
    status.check()
    sums[positions] += received
    np.testing.assert_array_equal(device.to_host(on_device), sums)


def test_no_occurrences(node):
    rows = np.ones((4, 9), np.float32)
    got, sums = step(
        node(2), rows, 8, np.zeros(0, np.int32), np.zeros(5, np.int64), 2, np.ones((2, 16), np.float32), split=True
    )
    assert sums.shape == (0, 8)
    np.testing.assert_array_equal(got, rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 32768.0, -40000.0, 3e38, -1e20])
@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_outside_fixed_point_is_reported(node, bad, split):
    gradient = np.zeros((3, 8), np.float32)
    gradient[1, 5] = bad
    with pytest.raises(NonFiniteError, match="a gradient was NaN, infinite or at least 32768 in magnitude"):
        step(
            node(1),
            np.ones((3, 9), np.float32),
            8,
            np.arange(3, dtype=np.int32),
            np.arange(4),
            1,
            gradient,
            split=split,
        )


@pytest.mark.parametrize("value", [32767.99, -32767.99, 1e-12, -0.0, 2.0**-37, 1.5 * 2.0**-36])
def test_every_gradient_inside_is_rounded_to_the_nearest(node, value):
    gradient = np.full((1, 8), value, np.float32)
    _, sums = step(
        node(1), np.ones((1, 9), np.float32), 8, np.zeros(1, np.int32), np.arange(2), 1, gradient, split=True
    )
    assert (sums == int(np.rint(np.float64(np.float32(value)) * 2.0**36))).all()


def overflow(status):
    """Add two sums that are out of range together, which sets the status."""
    device = status.device
    add_sums(
        device,
        sums=device.from_host(np.full((1, 1), 2**60)),
        positions=device.zeros(1, np.int32),
        received=device.from_host(np.full((1, 1), 2**60 + 1)),
        status=status,
    )


def test_a_sum_that_leaves_its_range_is_reported_before_it_can_wrap(node):
    examples = 3000  # times 30000 is more than 2^25, and far less than where 64 bits would wrap
    gradient = np.full((examples, 1), 30_000, np.float32)
    with pytest.raises(NonFiniteError, match="the sum of a row's gradients passed 33,554,432"):
        step(
            node(1),
            np.ones((1, 2), np.float32),
            1,
            np.zeros(examples, np.int32),
            np.arange(examples + 1),
            1,
            gradient,
            split=True,
        )
    device = node(1)[0]
    status = Status(device)
    overflow(status)
    with pytest.raises(NonFiniteError):
        status.check()
    status.check()  # reported once


def test_every_device_clears_its_own_status(node):
    for device in node(2):
        status = Status(device)
        for _ in range(2):
            overflow(status)
            with pytest.raises(NonFiniteError):
                status.check()
        status.check()


def test_a_row_that_becomes_infinite_is_reported(node):
    rows = np.full((1, 9), 3.4e38, np.float32)
    rows[0, 8] = 0
    gradient = np.full((1, 8), -30_000, np.float32)
    device = node(1)[0]
    status = Status(device)
    apply_sums(
        device,
        touched=device.zeros(1, np.int32),
        sums=device.from_host(np.rint(gradient.astype(np.float64) * 2.0**36).astype(np.int64)),
        optimizer=Optimizer("sgd", learning_rate=1e38),
        weight=1.0,
        rows=device.from_host(rows),
        status=status,
    )
    with pytest.raises(NonFiniteError, match="an embedding became NaN or infinite"):
        status.check()


def test_rows_too_narrow_for_the_optimizer_are_refused(node):
    device = node(1)[0]
    with pytest.raises(ArgumentError, match="adam on 4 dimensions wants rows of at least 13 values, got 12"):
        apply_sums(
            device,
            touched=device.zeros(1, np.int32),
            sums=device.zeros((1, 4), np.int64),
            optimizer=Optimizer("adam", 0.1),
            weight=1,
            rows=device.zeros((1, 12), np.float32),
            status=Status(device),
        )
