"""Hash table from keys to row numbers, sharded over the devices of a node.

Input: the distinct keys of each device. Output: one array of hash cells per device. `Shards` joins the cells
and the rows of all devices, so that each device can search and read all of them in one launch. The shard of a key is
`partition(..., salt=DEVICE_SALT)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskps.device.device import Array, Device, check_array, check_int32_count
from daskps.errors import ArgumentError, CapacityError

CELL_BYTES = 16  # of one hash cell: key, row number and 4 unused bytes (kernels/shard.cuh)
BUCKET = 4  # hash cells per cache line, as in kernels/shard.cuh
LOAD = 0.5  # keys per hash cell: at this load 19 of 20 keys are in their home bucket
DEVICE_SALT = 0xD1B54A32D192ED03  # hash salt that assigns keys to devices, SHARD_SALT in kernels/shard.cuh


def table_cells(keys: int) -> int:
    """Return the number of hash cells for `keys` keys: whole buckets at load LOAD."""
    return max(int(keys / LOAD / BUCKET) + 1, 2) * BUCKET


def build_table(device: Device, *, keys: Array, first_row: int = 0, cells: Array | None = None) -> Array:
    """Build a hash table and return its cells (capacity, 2). Key i gets row ``first_row + i``; keys must be distinct.

    `cells` is memory to build it in, with any content; only whole buckets of four cells are used. By default the memory
    is allocated with `table_cells` cells.
    """
    check_array("build_table", "keys", keys, device, np.uint64, (None,))
    check_int32_count("build_table", "rows", first_row + len(keys))
    if cells is None:
        cells = device.empty((table_cells(len(keys)), 2), np.uint64)
    check_array("build_table", "cells", cells, device, np.uint64, (None, 2))
    capacity = len(cells) // BUCKET * BUCKET
    if len(keys) > capacity:
        raise CapacityError(
            f"a hash table of {capacity:,} cells cannot hold {len(keys):,} keys; give it at least "
            f"{table_cells(len(keys)):,} cells ({table_cells(len(keys)) * CELL_BYTES:,} bytes), or use a smaller batch"
        )
    failed = device.zeros(1, np.int32)
    device.launch("table_clear", capacity, cells=cells, capacity=capacity)
    device.launch(
        "table_build",
        len(keys),
        keys=keys,
        n=len(keys),
        first_row=first_row,
        cells=cells,
        capacity=capacity,
        failed=failed,
    )
    if device.to_host(failed)[0]:
        raise CapacityError(f"a hash table of {capacity:,} cells had no room for some of {len(keys):,} keys")
    return cells


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a table on one device: its rows, numbered after those of the previous shard, and their hash cells."""

    device: Device
    rows: Array  # (n, width) float32
    cells: Array | None = None  # (capacity, 2) uint64 hash cells; None if the shard is not searched


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards of a table, with their descriptors on every device. Global row numbers run through all shards in order."""

    shards: tuple[Shard, ...]
    first_rows: tuple[int, ...]  # (M + 1,) global number of each shard's first row; last: number of rows
    width: int  # float32 values per row
    descriptors: tuple[Array, ...]  # per device (M, 5) uint64: struct Shard of kernels/shard.cuh

    def on(self, device: Device) -> Array:
        """Return the descriptors in the memory of `device`."""
        for shard, descriptors in zip(self.shards, self.descriptors, strict=True):
            if shard.device.name == device.name:
                return descriptors
        raise ArgumentError(f"{device.name} is none of the table's devices: {[s.device.name for s in self.shards]}")


def join_shards(shards: Sequence[Shard]) -> Shards:
    """Join `shards`, given in the order of their row numbers, and put their descriptors on each of their devices."""
    if not shards:
        raise ArgumentError("join_shards: wants at least one shard, got none; pass one per device")
    for shard in shards:
        check_array("join_shards", "rows", shard.rows, shard.device, np.float32, (None, shards[0].rows.shape[1]))
        if shard.cells is not None:
            check_array("join_shards", "cells", shard.cells, shard.device, np.uint64, (None, 2))
    first_rows = [0]
    table = np.zeros((len(shards), 5), np.uint64)
    for m, shard in enumerate(shards):
        if shard.cells is not None:
            table[m, :2] = shard.device.pointer(shard.cells), len(shard.cells) // BUCKET * BUCKET
        table[m, 2:] = shard.device.pointer(shard.rows), first_rows[m], len(shard.rows)
        first_rows.append(first_rows[m] + len(shard.rows))
    check_int32_count("join_shards", "rows", first_rows[-1])
    for shard in shards:
        shard.device.enable_peers([other.device for other in shards])
    descriptors = tuple(shard.device.from_host(table) for shard in shards)
    return Shards(tuple(shards), tuple(first_rows), int(shards[0].rows.shape[1]), descriptors)


def find_rows(device: Device, *, shards: Shards, keys: Array, out: Array | None = None) -> Array:
    """Return the global row number of each key (int32), -1 for a key that is in no shard."""
    check_array("find_rows", "keys", keys, device, np.uint64, (None,))
    if out is None:
        out = device.empty(len(keys), np.int32)
    check_array("find_rows", "out", out, device, np.int32, (len(keys),))
    device.launch(
        "table_find",
        len(keys),
        keys=keys,
        n=len(keys),
        shards=shards.on(device),
        shard_count=len(shards.shards),
        rows=out,
    )
    return out
