"""Memory of dead arrays is used again, memory of living ones never."""

from __future__ import annotations

import gc

import numpy as np

from daskps.device.device import CpuDevice
from daskps.device.memory import KEPT_BYTES, PEAK_LOANS, BufferPool
from daskps.device.pool import ComputePool

SIZE = 3 << 20


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_lent_again_when_its_last_view_is_gone() -> None:
    recycler = BufferPool()
    first = recycler.lend(SIZE)
    view, place = first[100:200], address(first)
    del first
    gc.collect()
    second = recycler.lend(SIZE)
    assert address(second) != place  # the view is still alive
    del view
    gc.collect()
    assert address(recycler.lend(SIZE - 1000)) == place


def test_two_loans_never_share_bytes() -> None:
    recycler, rng = BufferPool(), np.random.default_rng(1)
    loans: list[np.ndarray] = []
    for turn in range(300):
        loan = recycler.lend(int(rng.integers(1 << 18, SIZE)))
        loan[:] = turn % 251
        loans.append(loan)
        if len(loans) > 6:
            loans.pop(int(rng.integers(len(loans))))
        assert all((loan == loan[0]).all() for loan in loans)
        assert len({int(loan[0]) for loan in loans}) == len(loans)


def test_what_was_lent_at_once_is_kept_for_a_while_and_then_a_small_rest() -> None:
    recycler = BufferPool()
    loans = [recycler.lend(KEPT_BYTES // 4) for _ in range(16)]
    loans.clear()
    gc.collect()
    keep = recycler.lend(SIZE)
    assert KEPT_BYTES < recycler.free_bytes <= 4 * KEPT_BYTES
    for _ in range(8 * PEAK_LOANS):
        recycler.lend(SIZE)
    assert recycler.free_bytes <= KEPT_BYTES
    del keep


def test_what_is_kept_can_be_bounded() -> None:
    recycler = BufferPool(5 << 20)
    loans = [recycler.empty(2 << 20, np.uint8) for _ in range(4)]
    assert recycler.free_bytes == 0
    loans.clear()
    gc.collect()
    assert recycler.free_bytes == 4 << 20


def test_nothing_is_kept_that_would_go_over_a_budget_with_what_is_lent() -> None:
    recycler = BufferPool(total_bytes=10 << 20)
    loans = [recycler.empty(2 << 20, np.uint8) for _ in range(6)]
    del loans[0]
    gc.collect()
    assert recycler.free_bytes == 0  # 10 MiB are lent
    del loans[:2]
    gc.collect()
    assert recycler.free_bytes == 4 << 20
    more = recycler.empty(3 << 20, np.uint8)  # room is made before it is
    assert recycler.free_bytes == 0
    del more


def test_a_closed_pool_returns_free_buffers_at_once_and_used_ones_when_they_are_freed() -> None:
    recycler = BufferPool()
    kept, gone = recycler.empty(100 << 20, np.uint8), recycler.empty(100 << 20, np.uint8)
    kept[:] = 7
    del gone
    gc.collect()
    assert recycler.free_bytes == 100 << 20
    recycler.close()
    assert recycler.free_bytes == 0
    assert kept.min() == 7
    del kept
    gc.collect()
    assert recycler.free_bytes == 0


def test_memory_much_too_large_is_not_used() -> None:
    recycler = BufferPool()
    large = recycler.empty((1 << 20, 2), np.float32)
    place = address(large)
    del large
    gc.collect()
    assert address(recycler.empty(2 << 20, np.uint8)) != place
    assert address(recycler.empty(7 << 20, np.uint8)) == place


def test_small_arrays_and_large_ones_begin_at_a_cache_line() -> None:
    with ComputePool(1) as pool:
        device = CpuDevice(0, pool)
        for rows in (0, 1, 1000, 100_000):
            for make in (device.empty, device.zeros):
                array = make((rows, 9), np.float32)
                assert array.shape == (rows, 9)
                assert array.dtype == np.float32
                assert rows == 0 or address(array) % 64 == 0
