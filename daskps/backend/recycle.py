"""Memory that is lent, comes back when its last array is gone, and is lent again, as CuPy's pool does on a GPU.

In: shapes. Out: arrays of any content. Fresh pages must be cleared by the system, which took a sixth of a training run
and a third of reading before large arrays came from here.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.backend.arena import anonymous

LEAST_BYTES = 1 << 18  # smaller arrays are malloc's business
KEPT_BYTES = 64 << 20  # of free memory, even if little is lent
PEAK_LOANS = 4096  # so many loans later a third of a peak counts, if it did not come again
HUGE_PAGE_BYTES = 2 << 20
FEW_HUGE_PAGES = 2 * HUGE_PAGE_BYTES  # below, whole huge pages could take many times what was asked for


class _Loan:
    """What an array lent out, and every view of it, keeps alive."""

    def __init__(self, recycler: Recycler, memory: npt.NDArray[np.uint8], size_bytes: int) -> None:
        self.recycler, self.memory = recycler, memory
        self.__array_interface__ = memory[:size_bytes].__array_interface__

    def __del__(self) -> None:
        self.recycler.returned.append(self.memory)  # may run anywhere, so it takes no lock


class Recycler:
    """Lends memory. It keeps what lately was lent at once, but never more free than `most_bytes` if given, and nothing
    free that with what is lent would be more than `total_bytes`.

    What is lent goes up and down with every batch: if only as much was kept as is lent, up to 180 MB of a node's memory
    were given back and cleared again in each of them.
    """

    def __init__(self, most_bytes: int | None = None, total_bytes: int | None = None) -> None:
        self.returned: deque[npt.NDArray[np.uint8]] = deque()
        self.total_bytes = total_bytes  # a budget; None: there is none
        self._most_bytes = most_bytes
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lent_bytes = 0
        self._peak_bytes = 0  # lent at once, lately
        self._lock = threading.Lock()

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of any content, like numpy.empty's."""
        kind: np.dtype[Any] = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        size_bytes = math.prod(shape) * kind.itemsize
        if size_bytes < LEAST_BYTES:
            return np.empty(shape, kind)
        return self.lend(size_bytes).view(kind).reshape(shape)

    def lend(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Bytes of any content, from the start of a page."""
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
            self._trim()  # before more is made
        if memory is None:
            try:
                memory = anonymous((fresh,), np.uint8)
            except BaseException:
                with self._lock:
                    self._lent_bytes -= fresh
                raise
        lent: npt.NDArray[Any] = np.asarray(_Loan(self, memory, size_bytes))
        return lent

    @property
    def free_bytes(self) -> int:
        """What is kept for the next."""
        with self._lock:
            self._take_back()
            self._trim()
            return sum(memory.nbytes for memory in self._free)

    def forget(self) -> None:
        """Give all that is free back to the system: what was lent lately says nothing about what comes."""
        with self._lock:
            self._take_back()
            self._free.clear()
            self._peak_bytes = self._lent_bytes

    def _take_back(self) -> None:
        while self.returned:
            memory = self.returned.popleft()
            self._lent_bytes -= memory.nbytes
            self._free.append(memory)

    def _trim(self) -> None:
        """Let go of what was returned first."""
        self._peak_bytes = max(self._lent_bytes, self._peak_bytes - self._peak_bytes // PEAK_LOANS)
        lately = max(self._lent_bytes, KEPT_BYTES + self._peak_bytes - self._lent_bytes)
        most = lately if self._most_bytes is None else self._most_bytes
        if self.total_bytes is not None:
            most = min(most, max(0, self.total_bytes - self._lent_bytes))
        excess = sum(memory.nbytes for memory in self._free) - most
        while excess > 0:
            excess -= self._free.pop(0).nbytes
