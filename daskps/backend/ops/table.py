"""The hash table from keys to row numbers, sharded over the devices of a node.

In: distinct keys of each device. Out: slots per device, joined with the devices' rows into `Shards`, which every device
can search and read in one launch. A key's shard is `partition(..., salt=DEVICE_SALT)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskps.backend.check import check_array, check_int32_count
from daskps.backend.device import Array, Device
from daskps.errors import ArgumentError, CapacityError

SLOT_BYTES = 16
BUCKET = 4  # slots of a cache line, as in kernels/shard.cuh
LOAD = 0.5  # keys per slot: 19 of 20 keys are in their own bucket
DEVICE_SALT = 0xD1B54A32D192ED03  # as in kernels/shard.cuh


def table_slots(keys: int) -> int:
    """The number of slots for so many keys."""
    return max(int(keys / LOAD / BUCKET) + 1, 2) * BUCKET


def build_table(device: Device, *, keys: Array, first_row: int = 0, slots: Array | None = None) -> Array:
    """Slots (capacity, 2) in which key i has row ``first_row + i``. `keys` must be distinct.

    `slots` gives memory to use, with any content; by default it is made in the size `table_slots` tells. Whole buckets
    of four slots count.
    """
    check_array("build_table", "keys", keys, device, np.uint64, (None,))
    check_int32_count("build_table", "rows", first_row + len(keys))
    if slots is None:
        slots = device.empty((table_slots(len(keys)), 2), np.uint64)
    check_array("build_table", "slots", slots, device, np.uint64, (None, 2))
    capacity = len(slots) // BUCKET * BUCKET
    if len(keys) > capacity:
        raise CapacityError(
            f"a hash table of {capacity:,} slots cannot hold {len(keys):,} keys; give it at least "
            f"{table_slots(len(keys)):,} slots ({table_slots(len(keys)) * SLOT_BYTES:,} bytes), or use a smaller batch"
        )
    failed = device.zeros(1, np.int32)
    device.launch("table_clear", capacity, slots=slots, capacity=capacity)
    device.launch(
        "table_build",
        len(keys),
        keys=keys,
        n=len(keys),
        first_row=first_row,
        slots=slots,
        capacity=capacity,
        failed=failed,
    )
    if device.to_host(failed)[0]:
        raise CapacityError(f"a hash table of {capacity:,} slots had no room for some of {len(keys):,} keys")
    return slots


@dataclass(frozen=True, slots=True)
class Shard:
    """What one device holds of a table: the rows that follow those of the shard before it, and their slots."""

    device: Device
    rows: Array  # (n, width) float32
    slots: Array | None = None  # (capacity, 2) uint64; None where nobody searches


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of a table with their descriptors on every device. Global row numbers run through the shards."""

    shards: tuple[Shard, ...]
    first_rows: tuple[int, ...]  # (M + 1,) global number of each shard's first row, and of the end
    width: int
    descriptors: tuple[Array, ...]  # (M,) of (M, 5) uint64

    def on(self, device: Device) -> Array:
        """The descriptors as `device` reads them."""
        for shard, descriptors in zip(self.shards, self.descriptors, strict=True):
            if shard.device.name == device.name:
                return descriptors
        raise ArgumentError(f"{device.name} is none of the table's devices: {[s.device.name for s in self.shards]}")


def join_shards(shards: Sequence[Shard]) -> Shards:
    """Descriptors of `shards`, in the order of their row numbers, on each of their devices."""
    if not shards:
        raise ArgumentError("join_shards: wants at least one shard, got none; pass one per device")
    for shard in shards:
        check_array("join_shards", "rows", shard.rows, shard.device, np.float32, (None, shards[0].rows.shape[1]))
        if shard.slots is not None:
            check_array("join_shards", "slots", shard.slots, shard.device, np.uint64, (None, 2))
    first_rows = [0]
    table = np.zeros((len(shards), 5), np.uint64)
    for m, shard in enumerate(shards):
        if shard.slots is not None:
            table[m, :2] = shard.device.pointer(shard.slots), len(shard.slots) // BUCKET * BUCKET
        table[m, 2:] = shard.device.pointer(shard.rows), first_rows[m], len(shard.rows)
        first_rows.append(first_rows[m] + len(shard.rows))
    check_int32_count("join_shards", "rows", first_rows[-1])
    for shard in shards:
        shard.device.enable_peers([other.device for other in shards])
    descriptors = tuple(shard.device.from_host(table) for shard in shards)
    return Shards(tuple(shards), tuple(first_rows), int(shards[0].rows.shape[1]), descriptors)


def find_rows(device: Device, *, shards: Shards, keys: Array, out: Array | None = None) -> Array:
    """The global row number of each key (int32), -1 for a key that is in no shard."""
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
