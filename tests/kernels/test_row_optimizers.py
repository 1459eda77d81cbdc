"""Every optimizer steps rows with the bits of its NumPy twin, with and without L2 and clipping, over several steps."""

import numpy as np
import pytest

from daskps.errors import ArgumentError
from daskps.hbm.gradient import Status, apply_sums
from daskps.hbm.optimizer import (
    OPTIMIZERS,
    Initialiser,
    Optimizer,
    initialise_rows,
    optimizer_fields,
    state_initialisers,
)
from daskps.types import RowLayout
from tests.kernels import kernel_twins as twins
from tests.kernels.kernel_inputs import PTXRUN


def run(device, optimizer, dim, rng, steps=3, count=20):
    layout = RowLayout(optimizer_fields(optimizer.kind, dim))
    rows = device.empty((count, layout.width), np.float32)
    keys = rng.integers(0, 2**64, count, np.uint64)
    initialisers = {"embedding": Initialiser("uniform", -1, 1), **state_initialisers(optimizer)}
    initialise_rows(
        device, keys=device.from_host(keys), rows=rows, layout=layout, initialisers=initialisers, seed=0, table=0
    )
    wanted, status = device.to_host(rows).copy(), Status(device)
    for _ in range(steps):
        touched = np.sort(rng.permutation(count)[: count - 3]).astype(np.int32)
        sums = rng.integers(-(2**38), 2**38, (count - 3, dim)) * (rng.random((count - 3, dim)) < 0.9)
        wanted[touched] = twins.stepped(optimizer, wanted[touched], sums, 16.0)
        apply_sums(
            device,
            touched=device.from_host(touched),
            sums=device.from_host(sums),
            optimizer=optimizer,
            weight=16.0,
            rows=rows,
            status=status,
        )
    status.check()
    return device.to_host(rows), wanted


@pytest.mark.parametrize(
    "more", [{}, {"l2": 0.01}, {"clip_norm": 0.5}, {"l2": 0.1, "clip_norm": 1.0, "l1": 0.05}], ids=str
)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_have_the_bits_of_the_twin(node, rng, kind, more):
    for dim in (8,) if PTXRUN else (1, 4, 8, 10, 16, 40):
        optimizer = Optimizer(kind, learning_rate=0.05, initial_accumulator=0.1, **more)
        got, wanted = run(node(1)[0], optimizer, dim, rng)
        np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("dim", [1, 3, 4, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_other_dimensions(node, rng, kind, dim):
    got, wanted = run(node(1)[0], Optimizer(kind, 0.05, clip_norm=2.0), dim, rng, steps=1, count=5)
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))


def test_adam_counts_the_steps_of_each_row_and_stops_at_the_largest_count(node):
    device = node(1)[0]
    rows = np.zeros((2, 4), np.float32)
    rows.view(np.uint32)[:, 3] = [5, 2**32 - 1]
    on_device = device.from_host(rows)
    apply_sums(
        device,
        touched=device.from_host(np.arange(2, dtype=np.int32)),
        sums=device.from_host(np.ones((2, 1), np.int64)),
        optimizer=Optimizer("adam", 0.1),
        weight=1,
        rows=on_device,
        status=Status(device),
    )
    assert device.to_host(on_device).view(np.uint32)[:, 3].tolist() == [6, 2**32 - 1]


def test_sgd_and_adagrad_against_their_formulas():
    """The twin itself against textbook formulas in double."""
    optimizer = Optimizer("adagrad", 0.1, epsilon=1e-6)
    rows = np.array([[1.0, 2.0, 0.5, 0.25]], np.float32)
    sums = np.array([[2**36, -(2**37)]])
    new = twins.stepped(optimizer, rows, sums, 2.0)
    g = np.array([0.5, -1.0])
    accumulator = np.array([0.5, 0.25]) + g * g
    np.testing.assert_allclose(new[0, :2], [1, 2] - 0.1 * g / (np.sqrt(accumulator) + 1e-6), rtol=1e-6)
    np.testing.assert_allclose(new[0, 2:], accumulator, rtol=1e-6)
    new = twins.stepped(Optimizer("sgd", 0.1, clip_norm=0.5), rows, sums, 2.0)
    np.testing.assert_allclose(new[0, :2], [1, 2] - 0.1 * g * 0.5 / np.sqrt(1.25), rtol=1e-6)


def test_layouts_begin_with_the_embedding():
    widths = {kind: RowLayout(optimizer_fields(kind, 8)).width for kind in OPTIMIZERS}
    assert widths == {"sgd": 8, "adagrad": 16, "rowwise_adagrad": 9, "adam": 25, "ftrl": 24}
    assert all(optimizer_fields(kind, 8)[0].name == "embedding" for kind in OPTIMIZERS)


@pytest.mark.parametrize(
    "wrong",
    [{"learning_rate": 0.0}, {"learning_rate": 0.1, "l2": -1.0}, {"learning_rate": 0.1, "beta1": 1.0}],
    ids=str,
)
def test_impossible_settings_are_named(wrong):
    with pytest.raises(ArgumentError, match=r"optimizer adam: .*wants"):
        Optimizer("adam", **wrong)
