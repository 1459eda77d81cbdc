"""Division of MEM-PS's `memory_bytes`: how many rows fit together with the bookkeeping that they need.

Input: a budget in bytes, the size of a row, the number of nodes. Output: a `Budget`, the size of every array of MEM-PS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from daskps.errors import CapacityError, ConfigError

ENTRY_BYTES = 16  # one `Entry` of cache.cpp
BUCKET_BYTES = 8  # one bucket of the cache's hash table
BUCKETS_PER_ROW = 4 / 3  # load factor 0.75: a search reads 1.5 adjacent buckets for a hit, 8.5 for a miss
CELL_BYTES = 4  # one cell of the LRU list's ring
CELLS_PER_RECENT_ROW = 2  # a row that is visited again leaves a stale cell in the ring
STAGING_PER_ROW = 1 / 16  # staging rows for reads from and writes to disk, per cached row; more rows go in pieces
COPIES_PER_ROW = 1 / 32  # old values of rows that are pushed while a snapshot is being written, per cached row
STAGING_EXTRA_BYTES = 40  # per staging row, beside the row: its key, position, cache entry, and NumPy's masks
ORDERED_PIECES = 4  # the keys of so many pieces of staging are sorted by their place on disk before the first is read
ORDER_BYTES = 20  # per key that is sorted
FIXED_BYTES = 16 << 10  # histograms, small arrays, Python objects

# Bytes per row in flight. One node keeps 4 bytes (the number of the cache entry) and needs 5 more to work. With several
# nodes: a table of holders with key 8, holders 8, cache entry 4, hash table 16; positions and deferred rows about 28.
FLIGHT_BYTES_ONE_NODE = 9
FLIGHT_BYTES_MORE_NODES = 64
# Rows in flight per cached row.
FLIGHT_ROWS_ONE_NODE = 1.25
FLIGHT_ROWS_MORE_NODES = 0.5


@dataclass(frozen=True, slots=True)
class Budget:
    """Division of `memory_bytes`. Counts are in rows, buckets and cells."""

    memory_bytes: int
    store_bytes: int  # the disk tier's own index, subtracted first
    row_bytes: int
    cache_rows: int
    recent_rows: int  # how many of them the LRU list may hold
    bucket_count: int
    ring_cells: int
    staging_rows: int
    copy_rows: int
    flight_rows: int  # rows of all batches in flight; a row in two batches counts twice
    flight_row_bytes: int

    @property
    def used_bytes(self) -> int:
        """Sum of all parts in bytes; never above `memory_bytes`."""
        return (
            self.store_bytes
            + FIXED_BYTES
            + self.cache_rows * (self.row_bytes + ENTRY_BYTES)
            + self.bucket_count * BUCKET_BYTES
            + self.ring_cells * CELL_BYTES
            + (self.staging_rows + self.copy_rows) * (self.row_bytes + STAGING_EXTRA_BYTES)
            + self.staging_rows * ORDERED_PIECES * ORDER_BYTES
            + self.flight_rows * self.flight_row_bytes
        )

    def shrunk(self, rows: int, copy_rows: int | None = None) -> Budget:
        """Return the budget with a cache of only `rows` rows.

        Staging and copies shrink in proportion. Rows in flight do too, but only if they are at least as many as cached
        rows, because then they are no tighter limit than the cache. Buckets and ring stay. `copy_rows`, if given, is
        used instead of the proportional number.
        """

        def part(count: int) -> int:
            return max(1, count * rows // self.cache_rows)

        return replace(
            self,
            cache_rows=rows,
            staging_rows=part(self.staging_rows),
            copy_rows=part(self.copy_rows) if copy_rows is None else copy_rows,
            flight_rows=part(self.flight_rows) if self.flight_rows >= self.cache_rows else self.flight_rows,
        )

    @property
    def freed_row_bytes(self) -> int:
        """Bytes that a shrinking cache frees per row, on average."""
        given_back = self.used_bytes - self.shrunk(1).used_bytes
        return max(given_back // max(1, self.cache_rows - 1), self.row_bytes + ENTRY_BYTES)


def _budget(rows: int, memory_bytes: int, store_bytes: int, row_bytes: int, nodes: int, lru_share: float) -> Budget:
    """Return the budget with a cache of `rows` rows; it may exceed `memory_bytes`."""
    recent = max(1, int(rows * lru_share))
    flight = FLIGHT_ROWS_ONE_NODE if nodes == 1 else FLIGHT_ROWS_MORE_NODES
    return Budget(
        memory_bytes=memory_bytes,
        store_bytes=store_bytes,
        row_bytes=row_bytes,
        cache_rows=rows,
        recent_rows=recent,
        bucket_count=int(rows * BUCKETS_PER_ROW) + 8,
        ring_cells=max(64, CELLS_PER_RECENT_ROW * recent),
        staging_rows=max(1, int(rows * STAGING_PER_ROW)),
        copy_rows=max(1, int(rows * COPIES_PER_ROW)),
        flight_rows=max(1, int(rows * flight)),
        flight_row_bytes=FLIGHT_BYTES_ONE_NODE if nodes == 1 else FLIGHT_BYTES_MORE_NODES,
    )


def split(memory_bytes: int, *, store_bytes: int, row_bytes: int, nodes: int, lru_share: float) -> Budget:
    """Return the budget with the largest cache that fits `memory_bytes`; CapacityError if not even one row does."""
    if not 0 < lru_share <= 1:
        raise ConfigError(f"lru_share is the LRU list's part of the cached rows: above 0, at most 1; got {lru_share}")

    def fits(rows: int) -> bool:
        return _budget(rows, memory_bytes, store_bytes, row_bytes, nodes, lru_share).used_bytes <= memory_bytes

    low, high = 0, min(memory_bytes // row_bytes + 1, 2**32 - 2)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if low == 0:
        least = _budget(1, memory_bytes, store_bytes, row_bytes, nodes, lru_share).used_bytes
        raise CapacityError(
            f"memory_bytes={memory_bytes:,} holds no row: the disk tier's index takes {store_bytes:,} bytes, and one "
            f"row of {row_bytes} bytes with its bookkeeping needs {least:,} bytes in all; raise memory_bytes"
        )
    return _budget(low, memory_bytes, store_bytes, row_bytes, nodes, lru_share)
