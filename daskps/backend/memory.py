"""How the C library's allocator treats large arrays that come and go with every step and batch.

In: nothing. Out: a process that uses freed memory again. Dask's nanny starts workers with MALLOC_TRIM_THRESHOLD_=65536,
which also pins the size from which every array gets pages of its own at 128 KiB: the kernel then clears and takes back
each array's pages. A node of 50 slots x 2 keys spent a quarter of its time there (44 against 60 thousand examples/s).
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGEST_BYTES = 32 << 20  # larger arrays have pages of their own: the most that glibc allows
KEPT_BYTES = 256 << 20  # free at the end of the heap before it goes back to the system


def keep_freed_memory(budget_bytes: int | None = None) -> bool:
    """Let this process keep the memory of arrays that died, as much of it as a node of so many bytes can spare.

    False where the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    largest, kept = LARGEST_BYTES, KEPT_BYTES
    if budget_bytes is not None:
        largest = min(max(budget_bytes >> 7, 128 << 10), LARGEST_BYTES)
        kept = min(max(budget_bytes >> 4, 1 << 20), KEPT_BYTES)
    return bool(mallopt(_MMAP_THRESHOLD, largest) and mallopt(_TRIM_THRESHOLD, kept))
