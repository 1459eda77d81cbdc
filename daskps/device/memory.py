"""Host memory: arrays whose pages are allocated on first use, a buffer pool, and settings of the C library's malloc.

Input: sizes. Output: NumPy arrays. A fresh page costs more than the copy into it, so large buffers come from a pool,
return to it when their last view is freed, and are used again.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt


def anonymous(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a zeroed array in an anonymous memory map: the system allocates each page on first use, as a huge page
    (2 MiB) if it can."""
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # with 4 KiB pages every random row also costs a TLB miss
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def release(array: npt.NDArray[Any], keep: int) -> None:
    """Return the pages after the first `keep` items of an `anonymous` array to the system. They read as zeros later."""
    memory: Any = array
    while not isinstance(memory, mmap.mmap):
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    start = -(-keep * array.strides[0] // mmap.PAGESIZE) * mmap.PAGESIZE
    if start < len(memory):
        memory.madvise(mmap.MADV_DONTNEED, start, len(memory) - start)


# Settings of glibc's malloc (M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h). They hold for the whole process.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
DEFAULT_THRESHOLD_BYTES = 128 << 10  # glibc's default for both
MMAP_FRACTION = 1 / 128  # of a node's memory: larger arrays get a memory map of their own
MAX_MMAP_BYTES = 32 << 20  # the largest mmap threshold that glibc accepts
KEPT_FRACTION = 1 / 16  # of a node's memory: free bytes at the end of the heap that malloc keeps
MIN_KEPT_BYTES, MAX_KEPT_BYTES = 1 << 20, 256 << 20  # limits of these free bytes


def keep_freed_memory(budget_bytes: int | None = None) -> bool:
    """Let malloc keep the memory of freed arrays in this process. Return False if the C library has no such setting.

    `budget_bytes` is the memory of the node. Arrays above MMAP_FRACTION of it get a memory map of their own, which
    returns to the system as soon as the array is freed. Without it, malloc keeps as much as it may.
    """
    mmap_bytes, kept_bytes = MAX_MMAP_BYTES, MAX_KEPT_BYTES
    if budget_bytes is not None:
        mmap_bytes = min(max(int(budget_bytes * MMAP_FRACTION), DEFAULT_THRESHOLD_BYTES), MAX_MMAP_BYTES)
        kept_bytes = min(max(int(budget_bytes * KEPT_FRACTION), MIN_KEPT_BYTES), MAX_KEPT_BYTES)
    return _set_thresholds(mmap_bytes, kept_bytes)


def return_freed_memory() -> bool:
    """Undo `keep_freed_memory`: restore the trim threshold that Dask's nanny set for its worker, else glibc's default.
    Return False if the C library has no such setting."""
    kept = os.environ.get("MALLOC_TRIM_THRESHOLD_", "")
    return _set_thresholds(DEFAULT_THRESHOLD_BYTES, int(kept) if kept.isdecimal() else DEFAULT_THRESHOLD_BYTES)


def _set_thresholds(mmap_bytes: int, kept_bytes: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mmap_bytes) and mallopt(_TRIM_THRESHOLD, kept_bytes))


MIN_POOLED_BYTES = 1 << 18  # smaller arrays come from malloc, not from the pool
SPARE_BYTES = 64 << 20  # free bytes that the pool may keep in addition to (recent peak - bytes in use)
PEAK_ALLOCATIONS = 4096  # allocations until a peak that did not recur has decayed to about a third (1/e)
HUGE_PAGE_BYTES = 2 << 20
FEW_HUGE_PAGES = 2 * HUGE_PAGE_BYTES  # up to this size (bytes), rounding up to whole huge pages would waste too much


class _PooledBuffer:
    """A buffer in use. The array made of it and all its views keep it alive; when it dies, its memory is returned."""

    def __init__(self, pool: BufferPool, memory: npt.NDArray[np.uint8], size_bytes: int) -> None:
        self.pool, self.memory = pool, memory
        self.__array_interface__ = memory[:size_bytes].__array_interface__

    def __del__(self) -> None:
        if not self.pool.closed:
            self.pool.returned.append(self.memory)  # the garbage collector may call this in any thread: take no lock


class BufferPool:
    """Buffer pool. Keeps freed buffers up to the recent peak of bytes in use, and returns the others to the system.

    `max_free_bytes`, if given, bounds the free buffers instead of the peak. `total_bytes`, if given, bounds free and
    used buffers together. The peak matters because the bytes in use rise and fall with every batch: a pool that kept
    only as much as is in use returned up to 180 MB per batch, which the system then had to clear again.
    """

    def __init__(self, max_free_bytes: int | None = None, total_bytes: int | None = None) -> None:
        self.returned: deque[npt.NDArray[np.uint8]] = deque()
        self.total_bytes = total_bytes  # limit of free and used bytes; None: no limit
        self.closed = False  # buffers that are freed from now on go back to the system
        self._max_free_bytes = max_free_bytes
        self._free: list[npt.NDArray[np.uint8]] = []
        self._used_bytes = 0
        self._peak_bytes = 0  # recent peak of _used_bytes; decays with every allocation
        self._lock = threading.Lock()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array with undefined content, like numpy.empty. Arrays below MIN_POOLED_BYTES come from malloc."""
        kind: np.dtype[Any] = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        size_bytes = math.prod(shape) * kind.itemsize
        if size_bytes < MIN_POOLED_BYTES:
            return np.empty(shape, kind)
        return self.allocate(size_bytes).view(kind).reshape(shape)

    def allocate(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return `size_bytes` bytes with undefined content, aligned to a page."""
        with self._lock:
            self._take_back()
            unit = HUGE_PAGE_BYTES if size_bytes > FEW_HUGE_PAGES else MIN_POOLED_BYTES
            largest = size_bytes + max(size_bytes // 2, unit)
            fitting = [memory for memory in self._free if size_bytes <= memory.nbytes <= largest]
            memory = min(fitting, key=len, default=None)
            if memory is not None:
                self._free = [other for other in self._free if other is not memory]
            buffer_bytes = -(-size_bytes // unit) * unit if memory is None else memory.nbytes
            self._used_bytes += buffer_bytes
            self._trim()  # before new memory is allocated
        if memory is None:
            try:
                memory = anonymous((buffer_bytes,), np.uint8)
            except BaseException:
                with self._lock:
                    self._used_bytes -= buffer_bytes
                raise
        array: npt.NDArray[Any] = np.asarray(_PooledBuffer(self, memory, size_bytes))
        return array

    @property
    def free_bytes(self) -> int:
        """Return the bytes of the free buffers."""
        with self._lock:
            self._take_back()
            self._trim()
            return sum(memory.nbytes for memory in self._free)

    def close(self) -> None:
        """Return all free buffers to the system, and buffers in use as soon as their last view is freed."""
        self.closed = True
        with self._lock:
            self._take_back()
            self._free.clear()

    def _take_back(self) -> None:
        """Add the buffers that were freed to the free ones."""
        while self.returned:
            memory = self.returned.popleft()
            self._used_bytes -= memory.nbytes
            self._free.append(memory)

    def _trim(self) -> None:
        """Return free buffers to the system, oldest first, until the pool is within its limits."""
        self._peak_bytes = max(self._used_bytes, self._peak_bytes - self._peak_bytes // PEAK_ALLOCATIONS)
        allowed = max(self._used_bytes, SPARE_BYTES + self._peak_bytes - self._used_bytes)
        if self._max_free_bytes is not None:
            allowed = self._max_free_bytes
        if self.total_bytes is not None:
            allowed = min(allowed, max(0, self.total_bytes - self._used_bytes))
        excess = sum(memory.nbytes for memory in self._free) - allowed
        while excess > 0:
            excess -= self._free.pop(0).nbytes
