"""Read a run of bytes with the checksums of its blocks, each taken while the block is in the processor's cache.

In: a file's name and an array to fill. Out: the CRC-32C of every block, for the caller to compare.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.errors import CorruptionError, StoreError
from daskps.ssd.checksum import block_sums
from daskps.ssd.files import Files


def read_sums(files: Files, name: str, offset: int, data: npt.NDArray[Any], block_bytes: int) -> npt.NDArray[np.uint32]:
    """Fill `data` from `offset` on; returns the sums of its blocks, the last one maybe shorter."""
    fd = files.descriptor(name)
    if fd is None:
        files.read_into(name, offset, [data])
        return block_sums(data, data.nbytes, block_bytes)
    sums, what = np.empty(-(-data.nbytes // block_bytes), np.uint32), np.zeros(2, np.int64)
    try:
        library().ssd_read_sums(
            fd=fd, offset=offset, n=data.nbytes, block_bytes=block_bytes, out=data, sums=sums, what=what
        )
    finally:
        os.close(fd)
    if what[0]:
        raise read_error(files, name, int(what[0]), int(what[1]))
    return sums


def first_difference(sums: npt.NDArray[np.uint32], expected: npt.NDArray[np.uint32]) -> int | None:
    """The first block whose sum is not the expected one."""
    wrong = np.flatnonzero(sums != expected[: len(sums)])
    return int(wrong[0]) if len(wrong) else None


def read_error(files: Files, name: str, kind: int, value: int) -> StoreError:
    """What to raise when a native read failed: 1 with errno, 2 with the byte at which the file ends (read.cpp)."""
    if kind == 1:
        return StoreError(f"{files.url}/{name}: cannot read: {os.strerror(value)}")
    array = name.split("/")[0]
    return CorruptionError(f"{files.url}/{name} (array {array}): the file ends at byte {value}, too early")
