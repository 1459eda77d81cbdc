"""A buffer is used again when, and only when, nothing looks at it any more."""

import numpy as np

from daskps.ssd.buffers import Buffers


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_that_nobody_sees_is_used_again() -> None:
    buffers = Buffers(1)
    first = buffers.empty((1000, 3), np.float32)
    where = address(first)
    del first
    assert address(buffers.empty((3000,), np.float32)) == where


def test_a_view_of_a_view_keeps_its_memory() -> None:
    buffers = Buffers(4)
    first = buffers.empty((1000, 3), np.float32)
    first[:] = 7
    part = first[10:][:5].reshape(-1)
    del first
    buffers.empty((1000, 3), np.float32)[:] = 8
    np.testing.assert_array_equal(part, np.full(15, 7, np.float32))


def test_no_more_is_kept_than_asked_for() -> None:
    buffers = Buffers(2)
    several = [buffers.empty((100,), np.uint8) for _ in range(5)]
    del several[:]
    assert sum(map(len, buffers._spare.values())) == 2
