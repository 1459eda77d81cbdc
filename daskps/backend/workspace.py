"""Scratch memory that is kept between calls, because fresh pages cost more than most kernels.

In: a name, a shape and a dtype. Out: an array with any content, valid until the same name is taken again. A workspace
belongs to one caller at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.backend.device import Array, Device


class Workspace:
    """Named buffers of one device; each grows to the largest size it was taken in."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._buffers: dict[str, Array] = {}

    def take(self, name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array with any content; what was taken by this name before is no longer valid."""
        kind: np.dtype[Any] = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        size_bytes = math.prod(shape) * kind.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size_bytes:
            self._buffers[name] = buffer = self.device.empty(size_bytes + size_bytes // 4 + 64, np.uint8)
        return buffer[:size_bytes].view(kind).reshape(shape)

    @property
    def size_bytes(self) -> int:
        """What all buffers take."""
        return sum(int(buffer.size) for buffer in self._buffers.values())
