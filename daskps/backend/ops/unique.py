"""Distinct keys, and for each occurrence the number of its key among them.

In: uint64 keys on a device. Out: `Unique`. The order of the distinct keys is a function of the keys alone: on the CPU
by part and first occurrence, on a GPU ascending.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskps.backend.check import check_array, check_int32_count
from daskps.backend.device import Array, CpuDevice, Device
from daskps.backend.native import library
from daskps.backend.workspace import Workspace

PART_KEYS = 8192  # wanted keys of a part: its table and its keys stay in the second-level cache
MOST_PARTS_BITS = 9  # a pass that deals into 2^10 streams took 1.6 times as long, into 2^11 twice


@dataclass(frozen=True, slots=True)
class Unique:
    """U distinct keys of n occurrences."""

    keys: Array  # (U,) uint64
    row_of: Array  # (n,) int32, keys[row_of] gives the occurrences back


def unique(device: Device, *, keys: Array, workspace: Workspace | None = None) -> Unique:
    """The distinct keys of `keys` and the number of each occurrence."""
    check_array("unique", "keys", keys, device, np.uint64, (None,))
    check_int32_count("unique", "keys", len(keys))
    if isinstance(device, CpuDevice):
        return _unique_cpu(device, keys, workspace or Workspace(device))
    return _unique_cuda(device, keys)


def _unique_cpu(device: CpuDevice, keys: Array, scratch: Workspace) -> Unique:
    n, shares = len(keys), device.shares(len(keys))
    bits = min(max((n // PART_KEYS).bit_length(), 0), MOST_PARTS_BITS)
    parts = 1 << bits
    places = scratch.take("places", (shares, parts), np.int32)
    places.fill(0)
    cursors = scratch.take("cursors", (shares, parts), np.int32)
    part_starts = scratch.take("part_starts", parts + 1, np.int32)
    counts = scratch.take("counts", parts, np.int32)
    bases = scratch.take("bases", parts + 1, np.int32)
    mixed = scratch.take("mixed", n, np.uint64)
    local = scratch.take("local", n, np.int32)
    device.launch("unique_count", n, keys=keys, n=n, bits=bits, counts=places)
    largest = library().unique_places(counts=places, shares=shares, bits=bits, part_starts=part_starts)
    device.launch("unique_deal", n, keys=keys, n=n, bits=bits, places=places, cursors=cursors, mixed=mixed)
    table_slots = 1 << max(4 * largest, 64).bit_length()
    device.launch(
        "unique_parts",
        n,
        mixed=mixed,
        part_starts=part_starts,
        bits=bits,
        table_slots=table_slots,
        tables=scratch.take("tables", (shares, table_slots), np.int32),
        next_part=np.zeros(1, np.int64),
        local=local,
        distinct_counts=counts,
    )
    found = library().unique_bases(distinct_counts=counts, bits=bits, bases=bases)
    result = Unique(device.empty(found, np.uint64), device.empty(n, np.int32))
    device.launch(
        "unique_number",
        n,
        keys=keys,
        n=n,
        bits=bits,
        places=places,
        cursors=cursors,
        mixed=mixed,
        part_starts=part_starts,
        local=local,
        bases=bases,
        distinct=result.keys,
        row_of=result.row_of,
    )
    return result


def _unique_cuda(device: Device, keys: Array) -> Unique:
    from daskps.backend.cuda import distinct_keys
    from daskps.backend.ops.table import Shard, build_table, find_rows, join_shards

    distinct = distinct_keys(device, keys)
    slots = build_table(device, keys=distinct)
    shards = join_shards([Shard(device, device.empty((len(distinct), 1), np.float32), slots)])
    return Unique(distinct, find_rows(device, shards=shards, keys=keys))
