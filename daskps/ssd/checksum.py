"""CRC-32C of buffers, natively and without the GIL; google-crc32c and Zarr's crc32c codec give the same numbers.

In: anything contiguous. Out: one sum, or one per block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library


def crc32c(*pieces: Any) -> int:
    """The sum of the pieces' bytes, one after the other."""
    total = 0
    for piece in pieces:
        data = _bytes(piece)
        total = library().ssd_crc32c(data=data, n=len(data), before=total)
    return total


def block_sums(piece: Any, total_bytes: int, block_bytes: int) -> npt.NDArray[np.uint32]:
    """Sums of the blocks of `piece`, continued by zeros to `total_bytes`."""
    data = _bytes(piece)
    sums = np.empty(-(-total_bytes // block_bytes), np.uint32)
    library().ssd_block_sums(data=data, n=len(data), total=total_bytes, block_bytes=block_bytes, sums=sums)
    return sums


def _bytes(piece: Any) -> npt.NDArray[np.uint8]:
    if isinstance(piece, np.ndarray):
        return piece.reshape(-1).view(np.uint8)
    return np.frombuffer(piece, np.uint8)
