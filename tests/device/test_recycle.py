"""Memory of dead arrays is used again, memory of living ones never."""

from __future__ import annotations

import gc

import numpy as np

from daskps.device.device import CpuDevice
from daskps.device.memory import PEAK_ALLOCATIONS, SPARE_BYTES, BufferPool
from daskps.device.pool import ComputePool

SIZE = 3 << 20


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.allocate(SIZE)
    view, place = first[100:200], address(first)
    del first
    gc.collect()
    second = pool.allocate(SIZE)
    assert address(second) != place  # the view is still alive
    del view
    gc.collect()
    assert address(pool.allocate(SIZE - 1000)) == place


def test_two_arrays_in_use_never_share_bytes() -> None:
    pool, rng = BufferPool(), np.random.default_rng(1)
    arrays: list[np.ndarray] = []
    for turn in range(300):
        array = pool.allocate(int(rng.integers(1 << 18, SIZE)))
        array[:] = turn % 251
        arrays.append(array)
        if len(arrays) > 6:
            arrays.pop(int(rng.integers(len(arrays))))
        assert all((array == array[0]).all() for array in arrays)
        assert len({int(array[0]) for array in arrays}) == len(arrays)


def test_the_recent_peak_is_kept_for_a_while_and_then_a_small_rest() -> None:
    pool = BufferPool()
    arrays = [pool.allocate(SPARE_BYTES // 4) for _ in range(16)]
    arrays.clear()
    gc.collect()
    keep = pool.allocate(SIZE)
    assert SPARE_BYTES < pool.free_bytes <= 4 * SPARE_BYTES
    for _ in range(8 * PEAK_ALLOCATIONS):
        pool.allocate(SIZE)
    assert pool.free_bytes <= SPARE_BYTES
    del keep


def test_free_buffers_can_be_bounded() -> None:
    pool = BufferPool(5 << 20)
    arrays = [pool.empty(2 << 20, np.uint8) for _ in range(4)]
    assert pool.free_bytes == 0
    arrays.clear()
    gc.collect()
    assert pool.free_bytes == 4 << 20


def test_free_and_used_buffers_together_stay_within_the_total() -> None:
    pool = BufferPool(total_bytes=10 << 20)
    arrays = [pool.empty(2 << 20, np.uint8) for _ in range(6)]
    del arrays[0]
    gc.collect()
    assert pool.free_bytes == 0  # 10 MiB are in use
    del arrays[:2]
    gc.collect()
    assert pool.free_bytes == 4 << 20
    more = pool.empty(3 << 20, np.uint8)  # room is made before it is
    assert pool.free_bytes == 0
    del more


def test_a_closed_pool_returns_free_buffers_at_once_and_used_ones_when_they_are_freed() -> None:
    pool = BufferPool()
    kept, gone = pool.empty(100 << 20, np.uint8), pool.empty(100 << 20, np.uint8)
    kept[:] = 7
    del gone
    gc.collect()
    assert pool.free_bytes == 100 << 20
    pool.close()
    assert pool.free_bytes == 0
    assert kept.min() == 7
    del kept
    gc.collect()
    assert pool.free_bytes == 0


def test_memory_much_too_large_is_not_used() -> None:
    pool = BufferPool()
    large = pool.empty((1 << 20, 2), np.float32)
    place = address(large)
    del large
    gc.collect()
    assert address(pool.empty(2 << 20, np.uint8)) != place
    assert address(pool.empty(7 << 20, np.uint8)) == place


def test_small_arrays_and_large_ones_begin_at_a_cache_line() -> None:
    with ComputePool(1) as pool:
        device = CpuDevice(0, pool)
        for rows in (0, 1, 1000, 100_000):
            for make in (device.empty, device.zeros):
                array = make((rows, 9), np.float32)
                assert array.shape == (rows, 9)
                assert array.dtype == np.float32
                assert rows == 0 or address(array) % 64 == 0
