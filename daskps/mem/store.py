"""What MEM-PS needs of the disk tier. SSD-PS has these operations; tests use a plain store in memory.

In: keys and rows. Out: rows by key, and prepared snapshots. Nothing here does work.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from daskps.types import Bools, Floats, Keys


class RowStore(Protocol):
    """Rows by key. The row appended last counts."""

    def append(self, keys: Keys, rows: Floats) -> object:
        """Store rows (n, width) of distinct keys. The arrays are the caller's again after the call."""
        ...

    def load(self, keys: Keys, out: Floats | None = None) -> tuple[Floats, Bools]:
        """Rows (n, width) of distinct keys, in `out` if given, and which were found; others are left as they are."""
        ...

    def prepare(self, snapshot_id: str) -> object:
        """Make what is stored now durable as snapshot `snapshot_id`; it counts once the cluster confirms it."""
        ...


def store_bytes(store: RowStore) -> int:
    """Bytes of memory the store itself uses (its index), where it says so: they count in the budget of MEM-PS."""
    return int(getattr(store, "memory_bytes", 0))


def in_reading_order(store: RowStore, keys: Keys, positions: npt.NDArray[np.uint32], run: int) -> None:
    """Order the positions, `run` of them at a time, so that pieces of ``keys[positions]`` come from different files.

    A store that has parts says how. With keys in any order, every piece of a large batch would read all files.
    """
    order = getattr(store, "reading_order", None)
    if order is None:
        return
    for start in range(0, len(positions), run):
        part = positions[start : start + run]
        part[:] = part[order(keys[part])]
