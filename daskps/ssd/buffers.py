"""Memory for one file after another: a buffer is used again once nothing looks at it any more.

In: sizes. Out: uninitialised arrays. A fresh array of 10 MB costs its page faults, a third of the time it takes to fill
it from the page cache.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt


class Buffers:
    """At most `spare` arrays of a size wait for their next use; they go with this object."""

    def __init__(self, spare: int) -> None:
        self._most = spare
        self._spare: dict[int, list[memoryview]] = {}

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array whose memory comes back here when it and all its views are gone."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        spare = self._spare.setdefault(size, [])
        memory = spare.pop() if spare else np.empty(size, np.uint8).data
        # All views of an array over foreign memory have that array, not the memory, as their base, and keep it alive.
        owner = np.frombuffer(memory, np.uint8)
        weakref.finalize(owner, self._return, spare, memory, self._most)
        return owner.view(dtype).reshape(shape)

    @staticmethod
    def _return(spare: list[memoryview], memory: memoryview, most: int) -> None:
        if len(spare) < most:
            spare.append(memory)
