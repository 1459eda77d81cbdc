"""OP+OSRP equals the dense textbook procedure: permute, cut into bins, project on signs, take the sign."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.data.osrp import Osrp
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DataError
from daskps.types import Batch

# --- The dense twin ---

MASK, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    x &= MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def permuted(column: int, columns: int, seed: int) -> int:
    key, bits = mix64(seed + GOLDEN), (columns - 1).bit_length()
    while True:
        for step in range(4):
            column = (column + mix64(key + (2 * step + 1) * GOLDEN)) * (mix64(key + (2 * step + 2) * GOLDEN) | 1)
            column &= 2**bits - 1
            column ^= column >> max((bits + 1) // 2, 1)
        if column < columns:
            return column


def sign_of(column: int, seed: int) -> int:
    return -1 if mix64(column ^ mix64(seed + 2 * GOLDEN)) >> 63 else 1


def dense_twin(matrix: list[list[Fraction]], osrp: Osrp) -> np.ndarray:
    """(examples, columns) values to (examples, 2k) bits."""
    columns, bins = osrp.columns, osrp.bins
    places = [permuted(column, columns, osrp.seed) for column in range(columns)]
    assert sorted(places) == list(range(columns))
    bits = np.zeros((len(matrix), 2 * bins), np.uint8)
    for example, row in enumerate(matrix):
        permuted_row = [Fraction(0)] * columns
        for column, value in enumerate(row):
            permuted_row[places[column]] = sign_of(column, osrp.seed) * value
        edges = [-(-bin_ * columns // bins) for bin_ in range(bins + 1)]
        for bin_ in range(bins):
            total = sum(permuted_row[edges[bin_] : edges[bin_ + 1]])
            bits[example, 2 * bin_ : 2 * bin_ + 2] = [total < 0, total > 0]
    return bits


def make_batch(bags: list[list[tuple[int, float]]], slots: int = 1, weighted: bool = True) -> Batch:
    flat = [pair for bag in bags for pair in bag]
    return Batch(
        first_example=70,
        slots=slots,
        labels=np.arange(len(bags) // slots, dtype=np.float32) % 2,
        keys=np.array([key for key, _ in flat], np.uint64),
        offsets=np.cumsum([0, *map(len, bags)], dtype=np.int64),
        weights=np.array([value for _, value in flat], np.float32) if weighted else None,
    )


def to_bits(batch: Batch, dimensions: int) -> np.ndarray:
    bits = np.zeros((batch.examples * batch.slots, dimensions), np.uint8)
    for bag in range(len(bits)):
        keys = batch.keys[batch.offsets[bag] : batch.offsets[bag + 1]]
        assert (np.diff(keys.astype(object)) > 0).all()
        bits[bag, keys.astype(np.int64)] = 1
    return bits


def floats() -> st.SearchStrategy[float]:
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 2.0**-149, -(2.0**-149), 2.0**100, 3.4028234663852886e38])
    return few | st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_sparse_hashing_is_the_dense_procedure(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 40))
    osrp = Osrp(data.draw(st.integers(1, columns)), columns, seed=data.draw(st.integers(0, MASK)))
    pair = st.tuples(st.integers(0, columns - 1), floats())
    bags = data.draw(st.lists(st.lists(pair, max_size=60), max_size=6))
    weighted = data.draw(st.booleans())
    matrix = [[Fraction(0)] * columns for _ in bags]
    for row, bag in zip(matrix, bags, strict=True):
        for column, value in bag:
            row[column] += Fraction(value) if weighted else 1
    with ComputePool(data.draw(st.integers(1, 3))) as pool:
        hashed = osrp.apply(make_batch(bags, weighted=weighted), pool)
    assert hashed.weights is None
    np.testing.assert_array_equal(to_bits(hashed, 2 * osrp.bins), dense_twin(matrix, osrp))


@pytest.mark.parametrize("bins", [1, 3, 1000, 2**32, 2**63])
@pytest.mark.parametrize("columns", [2**64, 2**64 - 1, 2**63, 10**19])
def test_huge_dimensions_put_each_column_into_its_bin(bins: int, columns: int) -> None:
    osrp = Osrp(bins, columns, seed=9)
    keys = [0, 1, 2, columns - 1, columns // 2, 12345678901234567]
    hashed = osrp.apply(make_batch([[(key, 1.0)] for key in keys], weighted=False))
    expected = [2 * (permuted(key, columns, 9) * bins // columns) + (sign_of(key, 9) > 0) for key in keys]
    assert hashed.keys.tolist() == expected


def random_batch(examples: int, slots: int, weighted: bool, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, 30, examples * slots))])
    return Batch(
        first_example=5,
        slots=slots,
        labels=random.integers(0, 2, examples).astype(np.float32),
        keys=random.integers(0, 2**64, offsets[-1], np.uint64),
        offsets=offsets,
        weights=random.normal(size=offsets[-1]).astype(np.float32) if weighted else None,
        dense=random.normal(size=(examples, 2)).astype(np.float32),
        example_weights=np.ones(examples, np.float32),
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("per_slot", [False, True])
def test_threads_ranges_and_key_order_do_not_change_a_bit(weighted: bool, per_slot: bool) -> None:
    batch = random_batch(101, 3, weighted)
    osrp = Osrp(50, per_slot=per_slot, seed=3)
    whole = osrp.apply(batch)
    for cores in (2, 7, 200):
        with ComputePool(cores) as pool:
            other = osrp.apply(batch, pool)
        np.testing.assert_array_equal(other.keys, whole.keys)
        np.testing.assert_array_equal(other.offsets, whole.offsets)
    part, expected = osrp.apply(batch.slice(30, 60)), whole.slice(30, 60)
    np.testing.assert_array_equal(part.keys, expected.keys)
    np.testing.assert_array_equal(part.offsets, expected.offsets)
    order = np.concatenate(
        [np.arange(b - 1, a - 1, -1) for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)]
    )
    turned = dataclasses.replace(
        batch, keys=batch.keys[order], weights=None if batch.weights is None else batch.weights[order]
    )
    np.testing.assert_array_equal(osrp.apply(turned).keys, whole.keys)


def test_what_is_not_hashed_is_passed_on() -> None:
    batch = random_batch(20, 3, True)
    hashed = Osrp(50).apply(batch)
    assert (hashed.first_example, hashed.slots, hashed.examples) == (5, 1, 20)
    assert hashed.labels is batch.labels
    assert hashed.dense is batch.dense
    assert hashed.example_weights is batch.example_weights


def test_slots_kept_apart_are_hashed_apart() -> None:
    batch = random_batch(20, 3, True)
    kept = Osrp(50, per_slot=True).apply(batch)
    assert kept.slots == 3
    assert Osrp(50, per_slot=True).dimensions(3) == 300
    for bag in range(60):
        start, stop = batch.offsets[bag], batch.offsets[bag + 1]
        alone = Batch(
            0, 1, batch.labels[:1], batch.keys[start:stop], np.array([0, stop - start]), batch.weights[start:stop]
        )
        keys = kept.keys[kept.offsets[bag] : kept.offsets[bag + 1]]
        np.testing.assert_array_equal(keys, Osrp(50).apply(alone).keys + np.uint64(100 * (bag % 3)))


def test_a_sum_beyond_doubles_keeps_its_sign() -> None:
    osrp = Osrp(1, columns=1)
    for tail, expected in ((2.0**-149, 1), (-(2.0**-149), 0)):
        bag = [(0, 2.0**127), (0, tail), (0, -(2.0**127))]
        assert (osrp.apply(make_batch([bag])).keys.tolist() == [1]) == (expected == (sign_of(0, 0) > 0))
    assert osrp.apply(make_batch([[(0, 2.0**127), (0, 1.0), (0, -(2.0**127)), (0, -1.0)]])).keys.tolist() == []


def test_numbers_below_the_smallest_normal_one_are_added_exactly() -> None:
    bag = [(0, 2.0**-126), (0, -(2.0**-127)), (0, -(2.0**-127))]
    assert Osrp(1, columns=1).apply(make_batch([bag])).keys.tolist() == []


def test_columns_spread_evenly_over_bins_and_signs() -> None:
    batch = make_batch([[(key, 1.0)] for key in range(100_000)], weighted=False)
    for columns in (2**64, 10**6 + 3):
        keys = Osrp(100, columns, seed=1).apply(batch).keys
        counts = np.bincount(keys.astype(np.int64), minlength=200)
        chi = ((counts - 500) ** 2 / 500).sum()
        assert chi < 200 + 5 * math.sqrt(400)


def test_seeds_hash_differently_and_golden_values_hold_for_ever() -> None:
    batch = make_batch([[(key, 1.0) for key in (0, 7, 2**40, 2**64 - 1)]], weighted=False)
    assert Osrp(2**20, seed=1).apply(batch).keys.tolist() == GOLDEN_KEYS
    assert Osrp(2**20, seed=2).apply(batch).keys.tolist() != GOLDEN_KEYS
    assert Osrp(5, columns=10, seed=1).apply(make_batch([[(k, 1.0)] for k in range(10)])).keys.tolist() == GOLDEN_SMALL


GOLDEN_KEYS = [780942, 1118329, 1165118, 1538368]
GOLDEN_SMALL = [2, 1, 9, 3, 1, 7, 4, 7, 4, 9]


def test_an_empty_batch_stays_empty(pool: ComputePool) -> None:
    hashed = Osrp(4).apply(make_batch([]), pool)
    assert (hashed.examples, hashed.offsets.tolist(), len(hashed.keys)) == (0, [0], 0)
    assert Osrp(4).apply(make_batch([[], [], []]), pool).offsets.tolist() == [0, 0, 0, 0]


def test_a_key_that_is_no_column_is_named(pool: ComputePool) -> None:
    batch = make_batch([[(1, 1.0)], [(2, 1.0)], [(3, 1.0)], [(4, 1.0), (10, 1.0)]], slots=2)
    with pytest.raises(DataError, match="key 10 in slot 1 of example 71 is no column of 10; declare more"):
        Osrp(4, columns=10).apply(batch, pool)


def test_a_weight_that_is_no_number_is_named() -> None:
    with pytest.raises(DataError, match="the weight of key 2 in slot 0 of example 71 is nan"):
        Osrp(4).apply(make_batch([[(1, 1.0)], [(2, math.nan)]]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bins": 0}, "got 0 bins"),
        ({"bins": 2**63 + 1}, "bins"),
        ({"bins": 11, "columns": 10}, "got 11 bins of 10 columns"),
        ({"bins": 1, "columns": 2**64 + 1}, "1 to 2\\*\\*64 columns"),
        ({"bins": 1, "seed": -1}, "64-bit"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Osrp(**settings)


def test_slots_that_overflow_the_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="more than 2\\*\\*64 keys"):
        Osrp(2**63, per_slot=True).apply(random_batch(2, 2, False))
