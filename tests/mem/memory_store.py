"""A row store in memory: what the tests put below MEM-PS. Prepared snapshots are whole copies, so leaks show."""

import bisect
import functools

import numpy as np

from daskps.budget import largest_cache
from daskps.errors import CapacityError
from daskps.types import Field, RowLayout


class EmptyStore:
    """A `RowStore` that has no row, keeps none and takes no memory; a base for stores of tests."""

    def __init__(self) -> None:
        self.memory_bytes = 0  # of an index it pretends to have
        self.buffer_bytes = self.disk_bytes = self.file_bytes = 0

    def start_load(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> "DelayedLoading":
        return DelayedLoading(self, keys, positions, out)

    def load(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        return np.zeros(len(keys), np.bool_)

    def append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        pass

    def delete(self, keys: np.ndarray) -> np.ndarray:
        return np.zeros(len(keys), np.bool_)

    def prepare(self, snapshot_id: str) -> None:
        pass

    def reading_order(self, keys: np.ndarray) -> np.ndarray:
        return np.arange(len(keys))


class DelayedLoading:
    """A load that copies nothing before `wait`: who reads `out` earlier is found out."""

    def __init__(self, store: EmptyStore, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> None:
        self._store, self._arguments = store, (keys, positions, out)

    def wait(self) -> np.ndarray:
        return self._store.load(*self._arguments)


class MemoryStore(EmptyStore):
    """Rows by key in a dictionary, and snapshots of it."""

    def __init__(self, width: int, rows: dict[int, bytes] | None = None) -> None:
        super().__init__()
        self.width = width
        self.rows = dict(rows or {})
        self.snapshots: dict[str, dict[int, bytes]] = {}
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

    def load(self, keys: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        self.loads += 1
        for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
            if key in self.rows:
                out[position] = np.frombuffer(self.rows[key], np.float32)
        return np.array([key in self.rows for key in keys.tolist()], np.bool_)

    def delete(self, keys: np.ndarray) -> np.ndarray:
        return np.array([self.rows.pop(key, None) is not None for key in keys.tolist()], np.bool_)

    def prepare(self, snapshot_id: str) -> None:
        self.snapshots[snapshot_id] = dict(self.rows)


def layout(width: int) -> RowLayout:
    """Return a layout with one field."""
    return RowLayout((Field("values", width),))


def initial(keys: np.ndarray, out: np.ndarray) -> None:
    """Fill rows with bits that depend only on the key, NaNs included: rows are opaque."""
    words = out.view(np.uint32)
    for column in range(out.shape[1]):
        mixed = (keys + np.uint64(column + 1)) * np.uint64(0x9E3779B97F4A7C15)
        words[:, column] = (mixed >> np.uint64(32)).astype(np.uint32)


def initial_rows(keys: np.ndarray, width: int) -> np.ndarray:
    """Return the rows that `initial` writes."""
    out = np.empty((len(keys), width), np.float32)
    initial(keys, out)
    return out


@functools.cache
def bytes_for(width: int, cache_rows: int = 1, flight_rows: int = 1, nodes: int = 1) -> int:
    """Return the smallest memory_bytes, in steps of 8, whose budget holds that many rows."""

    def fits(steps: int) -> bool:
        try:
            budget = largest_cache(8 * steps, store_bytes=0, row_bytes=4 * width, nodes=nodes)
        except CapacityError:
            return False
        return budget.cache_rows >= cache_rows and budget.flight_rows >= flight_rows

    return 8 * bisect.bisect_left(range(1 << 30), True, key=fits)


def keys_of(*values: int) -> np.ndarray:
    """Return the values as an array of keys."""
    return np.array(values, np.uint64)
