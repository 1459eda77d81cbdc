"""The index is an exact map from every 64-bit key to a place, in at most 12 bytes a key.

``pytest -m slow tests/ssd/test_index.py`` measures it with 50 million keys.
"""

import tracemalloc
from copy import deepcopy
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.device.pool import ComputePool
from daskps.ssd.index import ABSENT, PLACES, KeyIndex

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
    base=st.sampled_from([0, 2**24 - 200, 2**31]),  # narrow cells, those that widen on the way, wide ones
)
def test_keys_with_close_hashes_are_told_apart(pool: ComputePool, batches: list, absent: list[int], base: int) -> None:
    index, model, place = KeyIndex(pool), {}, base
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
    again = KeyIndex.from_image(pool, deepcopy(index.image()))
    np.testing.assert_array_equal(again.find(keys), index.find(keys))
    assert len(again) == len(index)
    again.insert(keys, np.arange(len(keys), dtype=np.uint32))
    np.testing.assert_array_equal(again.find(keys), np.arange(len(keys)))


# Of an index, beside 12 bytes a key: counts and addresses of its 256 groups, and the last few free cells of each.
FIXED_BYTES = 40_000


def grow(pool: ComputePool, count: int, batch: int, base: int = 0) -> tuple[float, KeyIndex]:
    """The largest bytes a key, from the first key on, while keys come in batches; one in ten comes again."""
    index, worst = KeyIndex(pool), 0.0
    for first in range(0, count, batch):
        keys = np.arange(first, first + batch, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        places = np.arange(base + first, base + first + batch, dtype=np.uint32)
        index.insert(keys, places)
        index.insert(keys[: batch // 10], places[: batch // 10])
        worst = max(worst, (index.memory_bytes - FIXED_BYTES) / len(index))
    return worst, index


@pytest.mark.parametrize(("count", "batch"), [(30_000, 100), (300_000, 7000), (3_000_000, 100_000)])
def test_a_key_costs_at_most_twelve_bytes_while_the_index_grows(pool: ComputePool, count: int, batch: int) -> None:
    worst, index = grow(pool, count, batch)
    assert len(index) == -(-count // batch) * batch
    assert worst <= 12


def test_the_fixed_cost_of_an_index_is_small(pool: ComputePool) -> None:
    assert KeyIndex(pool).memory_bytes <= FIXED_BYTES


def test_room_for_keys_that_do_not_come_is_given_back(pool: ComputePool) -> None:
    index = KeyIndex(pool)
    keys = np.arange(100_000, dtype=np.uint64)
    index.insert(
        np.concatenate([keys, np.tile(keys, 20)]), np.arange(2_100_000, dtype=np.uint32), expected_more=3_000_000
    )
    index.insert(keys[:10], np.arange(10, dtype=np.uint32))
    assert index.memory_bytes <= 12 * len(index) + FIXED_BYTES
    index.remove(keys[20_000:])
    assert index.memory_bytes <= 12 * len(index) + FIXED_BYTES
    np.testing.assert_array_equal(index.find(keys[10:20_000]), np.arange(2_000_010, 2_020_000))


def test_growing_holds_little_more_than_the_index(pool: ComputePool) -> None:
    index, batch = KeyIndex(pool), 10_000
    index.insert(np.arange(1_000_000, dtype=np.uint64), np.arange(1_000_000, dtype=np.uint32))
    tracemalloc.start()
    try:
        held = index.memory_bytes
        for first in range(1_000_000, 1_500_000, batch):
            index.insert(np.arange(first, first + batch, dtype=np.uint64), np.arange(batch, dtype=np.uint32))
        grown, (_, peak) = index.memory_bytes, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Slots that were there before are not traced, so the peak is over what was added since; moved groups and scratch.
    assert grown - held > 5_000_000
    assert peak <= grown + 4 * 2**20


def test_places_of_any_size_fit(pool: ComputePool) -> None:
    index = KeyIndex(pool)
    keys = np.random.default_rng(0).integers(0, 2**64, 50_000, np.uint64)
    places = np.arange(50_000, dtype=np.uint32)
    index.insert(keys, places)
    index.remove(keys[:1000])
    for base in (2**24 - 25_002, 2**24 - 25_000, 2**31, PLACES - 50_000):  # the first still fits 24 bits
        replaced = index.insert(keys[1000:], places[1000:] + np.uint32(base))
        assert len(replaced) == 49_000
        assert (replaced != ABSENT).all()
        np.testing.assert_array_equal(index.find(keys[1000:]), places[1000:] + np.uint32(base))
        assert (index.find(keys[:1000]) == ABSENT).all()
    again = KeyIndex.from_image(pool, deepcopy(index.image()))
    np.testing.assert_array_equal(again.find(keys), index.find(keys))


def resident(memory: np.ndarray) -> int:
    """Bytes of an array that are in memory."""
    first, last = -(-memory.ctypes.data // PAGESIZE), (memory.ctypes.data + memory.nbytes) // PAGESIZE
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first)), np.uint64)
    return PAGESIZE * int((entries >> np.uint64(63)).sum())


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs Linux' /proc/self/pagemap")
def test_an_opened_index_that_grows_gives_its_first_memory_back(pool: ComputePool) -> None:
    keys = np.arange(1_000_000, dtype=np.uint64)
    index = KeyIndex(pool)
    index.insert(keys, np.arange(len(keys), dtype=np.uint32))
    image = index.image()
    memory = np.concatenate(image.cells)  # as `recovery.read_index` reads it
    ends = np.cumsum([cells.nbytes for cells in image.cells])
    cells = [memory[end - old.nbytes : end] for end, old in zip(ends, image.cells, strict=True)]
    opened = KeyIndex.from_image(pool, replace(deepcopy(image), cells=cells))
    assert resident(memory) > 10_000_000
    opened.insert(keys + np.uint64(len(keys)), np.arange(len(keys), 2 * len(keys), dtype=np.uint32))
    assert resident(memory) < 3_000_000  # the odd pages between two groups
    np.testing.assert_array_equal(opened.find(keys), np.arange(len(keys)))


@pytest.mark.parametrize("base", [0, 2**24])
def test_keys_that_crowd_at_the_end_of_a_group_all_fit(pool: ComputePool, base: int) -> None:
    keys = keys_of_hashes([2**64 - 1 - i for i in range(3000)])
    index = KeyIndex(pool)
    for first in range(0, len(keys), 50):
        index.insert(keys[first : first + 50], np.arange(base + first, base + first + 50, dtype=np.uint32))
    np.testing.assert_array_equal(index.find(keys), np.arange(base, base + len(keys)))


@pytest.mark.slow
def test_fifty_million_keys_cost_at_most_twelve_bytes_each(pool: ComputePool) -> None:
    worst, index = grow(pool, 50_000_000, 500_000)
    print(f"50 M keys: at most {worst:.2f} bytes a key while growing, {index.memory_bytes / len(index):.2f} at the end")
    assert len(index) == 50_000_000
    assert worst <= 12
    keys = np.arange(0, 50_000_000, 7, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    np.testing.assert_array_equal(index.find(keys), np.arange(0, 50_000_000, 7))
