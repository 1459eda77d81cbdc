"""Memory that comes when it is touched and can be given back: NumPy arrays over anonymous private pages."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


def anonymous(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A zeroed array whose pages the system hands out when they are touched, huge ones if it can."""
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # 4 KiB pages cost a second miss, in the TLB, for each random row
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def release(array: npt.NDArray[Any], keep: int) -> None:
    """Give the pages behind the first `keep` items of an `anonymous` array back; they read as zeros from then on."""
    memory: Any = array
    while not isinstance(memory, mmap.mmap):
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    start = -(-keep * array.strides[0] // mmap.PAGESIZE) * mmap.PAGESIZE
    if start < len(memory):
        memory.madvise(mmap.MADV_DONTNEED, start, len(memory) - start)
