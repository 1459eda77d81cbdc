"""Memory of dead arrays is used again, memory of living ones never."""

import gc

import numpy as np

from daskps.data.recycle import Recycler

MIB = 1 << 20


def test_memory_is_used_again_only_after_its_last_view_died() -> None:
    recycler = Recycler(64 * MIB)
    first = recycler.empty(MIB, np.uint64)
    place = first.ctypes.data
    view = first[5:10].view(np.uint8)[3:7]
    del first
    gc.collect()
    second = recycler.empty(MIB, np.uint64)
    assert second.ctypes.data != place
    del view
    gc.collect()
    third = recycler.empty(MIB, np.uint64)
    assert third.ctypes.data == place


def test_arrays_have_the_asked_shape_and_can_be_written() -> None:
    recycler = Recycler(64 * MIB)
    array = recycler.empty((1000, 300), np.float32)
    array[:] = 7
    assert array.shape == (1000, 300)
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    small = recycler.empty((0, 3), np.float32)
    assert small.shape == (0, 3)


def test_no_more_is_kept_than_allowed() -> None:
    recycler = Recycler(5 * MIB)
    arrays = [recycler.empty(2 * MIB, np.uint8) for _ in range(4)]
    assert recycler.free_bytes == 0
    arrays.clear()
    gc.collect()
    assert recycler.free_bytes == 4 * MIB
    assert recycler.empty(6 * MIB, np.uint8).base is None


def test_memory_much_too_large_is_not_used() -> None:
    recycler = Recycler(64 * MIB)
    large = recycler.empty(8 * MIB, np.uint8)
    place = large.ctypes.data
    del large
    gc.collect()
    assert recycler.empty(2 * MIB, np.uint8).ctypes.data != place
    assert recycler.empty(7 * MIB, np.uint8).ctypes.data == place
