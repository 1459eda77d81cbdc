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


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
LARGEST_BYTES = 32 << 20  # the largest mmap threshold that glibc accepts; larger arrays get a memory map of their own
OWN_PAGES_BYTES = 128 << 10  # glibc's default for both thresholds
MALLOC_KEPT_BYTES = 256 << 20  # upper limit of the free bytes at the end of the heap that glibc keeps


def keep_freed_memory(budget_bytes: int | None = None) -> bool:
    """Let malloc keep the memory of freed arrays in this process. Return False if the C library has no such setting.

    Malloc keeps at most 1/16 of `budget_bytes`, a node's memory (1 to 256 MiB). Arrays above 1/128 of it (128 KiB to
    32 MiB) get a memory map of their own, which returns to the system as soon as the array is freed.
    """
    largest, kept = LARGEST_BYTES, MALLOC_KEPT_BYTES
    if budget_bytes is not None:
        largest = min(max(budget_bytes >> 7, OWN_PAGES_BYTES), LARGEST_BYTES)
        kept = min(max(budget_bytes >> 4, 1 << 20), MALLOC_KEPT_BYTES)
    return _set_thresholds(largest, kept)


def return_freed_memory() -> bool:
    """Undo `keep_freed_memory`: restore the trim threshold that Dask's nanny set for its worker, else glibc's default.
    Return False if the C library has no such setting."""
    kept = os.environ.get("MALLOC_TRIM_THRESHOLD_", "")
    return _set_thresholds(OWN_PAGES_BYTES, int(kept) if kept.isdecimal() else OWN_PAGES_BYTES)


def _set_thresholds(largest: int, kept: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, largest) and mallopt(_TRIM_THRESHOLD, kept))


LEAST_BYTES = 1 << 18  # smaller arrays come from malloc, not from the pool
KEPT_BYTES = 64 << 20  # free bytes that the pool may keep in addition to (recent peak - bytes in use)
PEAK_LOANS = 4096  # buffers handed out until a peak that did not recur has decayed to about a third (1/e)
HUGE_PAGE_BYTES = 2 << 20
FEW_HUGE_PAGES = 2 * HUGE_PAGE_BYTES  # up to this size (bytes), rounding up to whole huge pages would waste too much


class _PooledBuffer:
    """A buffer in use. The array handed out and all its views keep it alive; when it dies, its memory is returned."""

    def __init__(self, recycler: BufferPool, memory: npt.NDArray[np.uint8], size_bytes: int) -> None:
        self.recycler, self.memory = recycler, memory
        self.__array_interface__ = memory[:size_bytes].__array_interface__

    def __del__(self) -> None:
        if not self.recycler.closed:
            self.recycler.returned.append(
                self.memory
            )  # the garbage collector may call this in any thread: take no lock


class BufferPool:
    """Buffer pool. Keeps freed buffers up to the recent peak of bytes in use, and returns the others to the system.

    `most_bytes`, if given, bounds the free buffers instead of the peak. `total_bytes`, if given, bounds free and used
    buffers together. The peak matters because the bytes in use rise and fall with every batch: a pool that kept
    only as much as is in use gave back up to 180 MB per batch, which the system then had to clear again.
    """

    def __init__(self, most_bytes: int | None = None, total_bytes: int | None = None) -> None:
        self.returned: deque[npt.NDArray[np.uint8]] = deque()
        self.total_bytes = total_bytes  # limit of free and used bytes; None: no limit
        self.closed = False  # buffers that are freed from now on go back to the system
        self._most_bytes = most_bytes
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lent_bytes = 0  # in use
        self._peak_bytes = 0  # recent peak of _lent_bytes; decays with every buffer handed out
        self._lock = threading.Lock()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array with undefined content, like numpy.empty. Arrays below LEAST_BYTES come from malloc."""
        kind: np.dtype[Any] = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        size_bytes = math.prod(shape) * kind.itemsize
        if size_bytes < LEAST_BYTES:
            return np.empty(shape, kind)
        return self.lend(size_bytes).view(kind).reshape(shape)

    def lend(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return `size_bytes` bytes with undefined content, aligned to a page."""
        with self._lock:
            self._take_back()
            unit = HUGE_PAGE_BYTES if size_bytes > FEW_HUGE_PAGES else LEAST_BYTES
            most = size_bytes + max(size_bytes // 2, unit)
            fitting = [memory for memory in self._free if size_bytes <= memory.nbytes <= most]
            memory = min(fitting, key=len, default=None)
            if memory is not None:
                self._free = [other for other in self._free if other is not memory]
            fresh = -(-size_bytes // unit) * unit if memory is None else memory.nbytes
            self._lent_bytes += fresh
            self._trim()  # before new memory is allocated
        if memory is None:
            try:
                memory = anonymous((fresh,), np.uint8)
            except BaseException:
                with self._lock:
                    self._lent_bytes -= fresh
                raise
        lent: npt.NDArray[Any] = np.asarray(_PooledBuffer(self, memory, size_bytes))
        return lent

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
        while self.returned:
            memory = self.returned.popleft()
            self._lent_bytes -= memory.nbytes
            self._free.append(memory)

    def _trim(self) -> None:
        """Return free buffers to the system, oldest first, until the pool is within its limits."""
        self._peak_bytes = max(self._lent_bytes, self._peak_bytes - self._peak_bytes // PEAK_LOANS)
        lately = max(self._lent_bytes, KEPT_BYTES + self._peak_bytes - self._lent_bytes)
        most = lately if self._most_bytes is None else self._most_bytes
        if self.total_bytes is not None:
            most = min(most, max(0, self.total_bytes - self._lent_bytes))
        excess = sum(memory.nbytes for memory in self._free) - most
        while excess > 0:
            excess -= self._free.pop(0).nbytes
