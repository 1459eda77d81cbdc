"""Initial rows depend on (seed, table, key) and column alone, have the bits of their NumPy twin and the right shape."""

from statistics import NormalDist

import numpy as np
import pytest

from daskps.errors import ArgumentError
from daskps.hbm.optimizer import Initialiser, initial_salt, initialise_columns, initialise_rows
from daskps.types import Field, RowLayout
from tests.kernels import kernel_twins as twins

KINDS = [Initialiser("constant", 0.25), Initialiser("uniform", -0.5, 2.0), Initialiser("normal", 1.0, 0.01)]


def make(device, keys, initialiser, columns=slice(0, 9), width=9, seed=3, table=1):
    rows = device.from_host(np.full((len(keys), width), 7, np.float32))
    initialise_columns(
        device, keys=device.from_host(keys), rows=rows, columns=columns, initialiser=initialiser, seed=seed, table=table
    )
    return device.to_host(rows)


@pytest.mark.parametrize("initialiser", KINDS, ids=lambda i: i.kind)
@pytest.mark.parametrize("columns", [slice(0, 9), slice(2, 7), slice(9, 9)])
def test_columns_have_the_bits_of_the_twin_and_others_stay(node, rng, initialiser, columns):
    keys = np.concatenate([twins.EDGE_KEYS, rng.integers(0, 2**64, 60, np.uint64)])
    want = np.full((65, 9), 7, np.float32)
    numbers = np.arange(columns.start, columns.stop)
    want[:, columns] = twins.initial_values(
        keys, numbers, initialiser.kind, initialiser.a, initialiser.b, initial_salt(3, 1)
    )
    np.testing.assert_array_equal(make(node(1)[0], keys, initialiser, columns), want)


def test_rows_go_to_their_positions(node, rng):
    device, keys = node(1)[0], rng.integers(0, 2**64, 5, np.uint64)
    layout = RowLayout((Field("embedding", 3), Field("accumulator", 1), Field("steps", 1, "uint32")))
    rows = device.from_host(np.full((8, 5), 7, np.float32))
    initialise_rows(
        device,
        keys=device.from_host(keys),
        rows=rows,
        layout=layout,
        initialisers={"embedding": KINDS[2], "accumulator": KINDS[0]},
        seed=1,
        table=2,
        positions=device.from_host(np.array([7, 1, 3, 0, 5], np.int32)),
    )
    got = device.to_host(rows)
    assert (got[[2, 4, 6]] == 7).all()
    want = twins.initial_values(keys, np.arange(3), "normal", 1.0, 0.01, initial_salt(1, 2))
    np.testing.assert_array_equal(got[[7, 1, 3, 0, 5], :3], want)
    assert (got[[7, 1, 3, 0, 5], 3] == 0.25).all()
    assert (got[[7, 1, 3, 0, 5], 4] == 0).all()


def test_seed_table_key_and_column_all_matter(pool):
    from daskps.device.device import CpuDevice

    device, keys = CpuDevice(0, pool), np.arange(1000, dtype=np.uint64)
    base = make(device, keys, KINDS[1])
    assert len(np.unique(base)) > 8990
    for other in (make(device, keys, KINDS[1], seed=4), make(device, keys, KINDS[1], table=0)):
        assert (other != base).mean() > 0.99
    np.testing.assert_array_equal(make(device, keys[::-1].copy(), KINDS[1]), base[::-1])


def test_the_distributions_are_what_they_say(pool):
    from daskps.device.device import CpuDevice

    device, keys = CpuDevice(0, pool), np.arange(100_000, dtype=np.uint64)
    uniform = make(device, keys, KINDS[1])
    assert uniform.min() >= -0.5
    assert uniform.max() < 2.0
    assert abs(uniform.mean() - 0.75) < 0.005
    normal = make(device, keys, Initialiser("normal", 0.0, 1.0)).ravel()
    wanted = [NormalDist().inv_cdf(p) for p in (0.0001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999)]
    np.testing.assert_allclose(np.quantile(normal, [0.0001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999]), wanted, atol=0.06)
    assert abs(normal.mean()) < 0.005
    assert abs(normal.std() - 1) < 0.005


def test_the_normal_quantile_is_accurate_to_the_tails():
    p = np.concatenate([np.linspace(0.001, 0.999, 777), 2.0 ** -np.arange(2, 33), 1 - 2.0 ** -np.arange(2, 33)])
    wanted = np.array([NormalDist().inv_cdf(value) for value in p])
    np.testing.assert_allclose(twins.normal_quantile(p), wanted, atol=2e-6)


def test_impossible_initialisers_are_refused():
    with pytest.raises(ArgumentError, match="uniform wants a <= b"):
        Initialiser("uniform", 2.0, 1.0)
    with pytest.raises(ArgumentError, match="finite"):
        Initialiser("normal", float("nan"))


def test_columns_outside_the_row_are_refused(node):
    with pytest.raises(ArgumentError, match=r"not within a row of width 9"):
        make(node(1)[0], twins.EDGE_KEYS, KINDS[0], slice(4, 10))
