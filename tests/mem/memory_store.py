"""A row store in memory: what the tests put below MEM-PS. Prepared snapshots are whole copies, so leaks show."""

import bisect
import functools

import numpy as np

from daskps.budget import split
from daskps.errors import CapacityError
from daskps.types import Field, RowLayout


class MemoryStore:
    """Rows by key in a dictionary, and snapshots of it."""

    def __init__(self, width: int, rows: dict[int, bytes] | None = None) -> None:
        self.width = width
        self.rows = dict(rows or {})
        self.snapshots: dict[str, dict[int, bytes]] = {}
        self.memory_bytes = 0  # of an index it pretends to have
        self.appends = 0
        self.appended_rows = 0
        self.loads = 0

    def append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        assert rows.shape == (len(keys), self.width)
        assert len(set(keys.tolist())) == len(keys)
        self.appends += 1
        self.appended_rows += len(keys)
        for key, row in zip(keys.tolist(), rows, strict=True):
            self.rows[key] = row.tobytes()

    def load(self, keys: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        self.loads += 1
        out = np.empty((len(keys), self.width), np.float32) if out is None else out
        found = np.zeros(len(keys), np.bool_)
        for i, key in enumerate(keys.tolist()):
            if key in self.rows:
                out[i] = np.frombuffer(self.rows[key], np.float32)
                found[i] = True
        return out, found

    def prepare(self, snapshot_id: str) -> None:
        self.snapshots[snapshot_id] = dict(self.rows)


def layout(width: int) -> RowLayout:
    """Rows of one field."""
    return RowLayout((Field("values", width),))


def initial(keys: np.ndarray, out: np.ndarray) -> None:
    """A row that depends on its key alone; arbitrary bits, NaNs among them, because rows are opaque."""
    words = out.view(np.uint32)
    for column in range(out.shape[1]):
        mixed = (keys + np.uint64(column + 1)) * np.uint64(0x9E3779B97F4A7C15)
        words[:, column] = (mixed >> np.uint64(32)).astype(np.uint32)


def initial_rows(keys: np.ndarray, width: int) -> np.ndarray:
    """`initial` as a value."""
    out = np.empty((len(keys), width), np.float32)
    initial(keys, out)
    return out


@functools.cache
def bytes_for(width: int, cache_rows: int = 1, flight_rows: int = 1, nodes: int = 1, lru_share: float = 0.5) -> int:
    """The smallest memory_bytes (in steps of 8) whose budget has room for so many rows."""

    def fits(steps: int) -> bool:
        try:
            budget = split(8 * steps, store_bytes=0, row_bytes=4 * width, nodes=nodes, lru_share=lru_share)
        except CapacityError:
            return False
        return budget.cache_rows >= cache_rows and budget.flight_rows >= flight_rows

    return 8 * bisect.bisect_left(range(1 << 30), True, key=fits)


def keys_of(*values: int) -> np.ndarray:
    """A working set."""
    return np.array(values, np.uint64)
