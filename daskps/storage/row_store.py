"""`RowStore`, the contract of the disk tier: rows by key. The memory tier reads and writes rows only through it.

Implementations: `daskps.ssd.TableStore` (disk), and in the tests a store in memory and a simulated one. All of them
pass the tests in tests/contracts/test_row_store.py.

Example: load rows 0 to 2 of a batch into places 5, 6 and 7 of a buffer, and do something else meanwhile.

    store.append(keys, rows)                                    # the arrays may be reused after the call
    positions = np.array([5, 6, 7], np.uint32)
    loading = store.start_load(keys[:3], positions, buffer)     # `buffer` belongs to the store ...
    ...
    found = loading.wait()                                      # ... until here; found[i]: the store had keys[i]
    store.prepare("000001-00000042")                            # durable, the first phase of a commit
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from daskps.types import Bools, Floats, Int64s, Keys

Positions: TypeAlias = npt.NDArray[np.uint32]


class Loading(Protocol):
    """A load that has begun."""

    def wait(self) -> Bools:
        """Wait until all rows are in `out`; return a mask (n,) of the keys that were found.

        Raises what went wrong, after the store has stopped to write to `out`.
        """
        ...


class RowStore(Protocol):
    """Rows by key. All rows have the same width; the row appended last replaces earlier ones of its key.

    Loads and changes may come from several threads at once. Changes (append, delete, prepare) wait for each other.
    """

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory in use: index, everything else that grows with the rows, and write buffers."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Return the part of `memory_bytes` that is write buffers. They are allocated when they are needed."""
        ...

    @property
    def disk_bytes(self) -> int:
        """Return the bytes on disk, of the current rows and of all kept snapshots."""
        ...

    @property
    def file_bytes(self) -> int:
        """Return the bytes of one full segment of each partition, summed: the unit of `buffer_bytes`."""
        ...

    def start_load(self, keys: Keys, positions: Positions, out: Floats) -> Loading:
        """Begin to copy the row of ``keys[i]`` to ``out[positions[i]]``, for all i.

        Positions are distinct; a key may occur more than once. Rows of keys that are not found, and all other rows of
        `out`, stay as they are. Until `wait` returns, `out` belongs to the store, and the caller does not append or
        delete any of these keys.
        """
        ...

    def append(self, keys: Keys, rows: Floats) -> None:
        """Insert or replace rows (n, width) of distinct keys. The caller may reuse the arrays after the call."""
        ...

    def delete(self, keys: Keys) -> Bools:
        """Delete keys; return a mask of those that existed. Snapshots that are prepared already keep their rows."""
        ...

    def prepare(self, snapshot_id: str) -> None:
        """Make the current rows durable as snapshot `snapshot_id`: the first phase of a commit."""
        ...

    def reading_order(self, keys: Keys) -> Int64s:
        """Return an order of the keys (n,) such that loads of consecutive pieces read few files each."""
        ...
