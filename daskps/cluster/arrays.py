"""A dictionary of NumPy arrays as the files of a plain Zarr v3 group, and back.

In: arrays by name; a `/` in a name makes a subgroup. Out: file contents by relative path, to be written by whoever
decides what is durable; `zarr.open_group` reads the folder without daskps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import MemoryStore

Arrays = Mapping[str, npt.NDArray[Any]]


def to_files(arrays: Arrays) -> dict[str, bytes]:
    """The files of a Zarr group that holds `arrays`, one uncompressed chunk each."""
    contents: dict[str, Buffer] = {}
    group = zarr.open_group(MemoryStore(contents), mode="w", zarr_format=3)
    for name, array in arrays.items():
        made = group.create_array(
            name,
            shape=array.shape,
            dtype=array.dtype,
            chunks=tuple(max(1, count) for count in array.shape),
            compressors=None,
            config={"write_empty_chunks": True},  # else a chunk of zeros is left out and reads as zeros when lost
        )
        if array.size:
            made[...] = array
    return {path: contents[path].to_bytes() for path in sorted(contents)}


def from_files(contents: Mapping[str, bytes]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a group's files, in the order of their names."""
    make = default_buffer_prototype().buffer.from_bytes
    group = zarr.open_group(MemoryStore({path: make(data) for path, data in contents.items()}), mode="r")
    found = {
        name: np.asarray(item[...]) for name, item in group.members(max_depth=None) if isinstance(item, zarr.Array)
    }
    return dict(sorted(found.items()))
