"""The index is an exact map from every 64-bit key to a place, in at most 12 bytes a key.

``pytest -m slow tests/ssd/test_index.py`` measures it with 50 million keys.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.backend.pool import ComputePool
from daskps.ssd.index import ABSENT, KeyIndex

MASK = 2**64 - 1


def unmix(x: int) -> int:
    """The inverse of mix64: keys for hashes that are wanted."""

    def shift_back(x: int, by: int) -> int:
        result = x
        for _ in range(64 // by + 1):
            result = x ^ (result >> by)
        return result

    x = shift_back(x, 31)
    x = x * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    x = shift_back(x, 27)
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return shift_back(x, 30)


def keys_of_hashes(hashes: list[int]) -> np.ndarray:
    return np.array([unmix(value) ^ 0x9E3779B97F4A7C15 for value in hashes], np.uint64)


def check(index: KeyIndex, model: dict[int, int], absent: np.ndarray) -> None:
    keys = np.array(list(model), np.uint64)
    assert index.find(keys).tolist() == list(model.values())
    assert (index.find(absent) == ABSENT).all()
    assert len(index) == len(model)
    requests, found = index.request(np.concatenate([keys, absent]))
    assert found.tolist() == [True] * len(keys) + [False] * len(absent)
    assert sorted(requests.tolist()) == sorted(place << 32 | i for i, place in enumerate(model.values()))


# Hashes that agree in all but a few bits: same group, same bucket, same home, as bad as it gets.
CLOSE = st.builds(
    lambda high, low: high << 56 | low,
    st.sampled_from([0, 1, 255]),
    st.one_of(st.integers(0, 300), st.integers(2**56 - 300, 2**56 - 1), st.integers(2**48 - 5, 2**48 + 5)),
)


@settings(max_examples=100, deadline=None)
@given(
    batches=st.lists(st.tuples(st.booleans(), st.lists(CLOSE, min_size=1, max_size=120)), max_size=12),
    absent=st.lists(CLOSE, max_size=30),
)
def test_keys_with_close_hashes_are_told_apart(pool: ComputePool, batches: list, absent: list[int]) -> None:
    index, model, place = KeyIndex(pool), {}, 0
    for insert, hashes in batches:
        keys = keys_of_hashes(hashes)
        if insert:
            places = np.arange(place, place + len(keys), dtype=np.uint32)
            place += len(keys)
            before = [model.get(int(key), ABSENT) for key in keys]
            replaced = index.insert(keys, places)
            if len(set(hashes)) == len(hashes):
                assert sorted(replaced.tolist()) == sorted(before)
            model |= dict(zip(keys.tolist(), places.tolist(), strict=True))
        else:
            previous = index.remove(keys)
            for key, was in zip(keys.tolist(), previous.tolist(), strict=True):
                assert was == model.pop(key, ABSENT)
        others = keys_of_hashes(absent)
        check(index, model, others[[int(key) not in model for key in others]] if len(others) else others)


@pytest.mark.parametrize("batch", [100, 5000, 70_000])
def test_growing_keeps_every_key(pool: ComputePool, batch: int) -> None:
    keys = np.random.default_rng(0).permutation(70_000).astype(np.uint64)
    index = KeyIndex(pool)
    for first in range(0, len(keys), batch):
        part = keys[first : first + batch]
        assert (index.insert(part, np.arange(first, first + len(part), dtype=np.uint32)) == ABSENT).all()
    np.testing.assert_array_equal(index.find(keys), np.arange(len(keys)))
    assert (index.find(keys + np.uint64(70_000)) == ABSENT).all()


def test_an_image_is_the_index(pool: ComputePool) -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 30_000, np.uint64)
    index = KeyIndex(pool)
    index.insert(keys, np.arange(len(keys), dtype=np.uint32))
    index.remove(keys[:500])
    again = KeyIndex.from_image(pool, [replace(group, slots=group.slots.copy()) for group in index.image()])
    np.testing.assert_array_equal(again.find(keys), index.find(keys))
    assert len(again) == len(index)
    again.insert(keys, np.arange(len(keys), dtype=np.uint32))
    np.testing.assert_array_equal(again.find(keys), np.arange(len(keys)))


def grow(pool: ComputePool, count: int, batch: int) -> tuple[float, KeyIndex]:
    """The largest bytes a key, from 1.5 million keys on, while `count` keys come in batches; one in ten comes again."""
    index, worst = KeyIndex(pool), 0.0
    for first in range(0, count, batch):
        keys = np.arange(first, first + batch, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        index.insert(keys, np.arange(first, first + batch, dtype=np.uint32))
        index.insert(keys[: batch // 10], np.arange(first, first + batch // 10, dtype=np.uint32))
        if first + batch >= 1_500_000:
            worst = max(worst, index.memory_bytes / len(index))
    return worst, index


def test_a_key_costs_at_most_twelve_bytes_while_the_index_grows(pool: ComputePool) -> None:
    worst, index = grow(pool, 3_000_000, 50_000)
    assert len(index) == 3_000_000
    assert worst <= 12


@pytest.mark.slow
def test_fifty_million_keys_cost_at_most_twelve_bytes_each(pool: ComputePool) -> None:
    worst, index = grow(pool, 50_000_000, 1_000_000)
    print(f"50 M keys: at most {worst:.2f} bytes a key while growing, {index.memory_bytes / len(index):.2f} at the end")
    assert len(index) == 50_000_000
    assert worst <= 12
    keys = np.arange(0, 50_000_000, 7, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    np.testing.assert_array_equal(index.find(keys), np.arange(0, 50_000_000, 7))
