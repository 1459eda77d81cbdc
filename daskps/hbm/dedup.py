"""Deduplication: the working set of a batch in one table, which is its distinct keys and the row number of each
occurrence.

Input: the keys of a batch. Output: the distinct keys, grouped by owner and device. On a GPU, cuDF finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from daskps.device.device import Array, CpuDevice, Device, Workspace, check_array, check_int32_count
from daskps.device.native import library
from daskps.errors import ArgumentError
from daskps.hbm.hash_table import DEVICE_SALT
from daskps.storage.partition import KeyPartition, KeysByOwner
from daskps.types import Batch, Floats, Int32s, Int64s, Keys, WorkingSet

PART_KEYS = 8192  # target number of keys per part: its keys and hash table then stay in the L2 cache
MOST_PARTS_BITS = 9  # log2 of the most parts; scattering to 2^10 parts took 1.6 times as long, to 2^11 twice as long


@dataclass(frozen=True, slots=True)
class Unique:
    """Result of `unique`: the U distinct keys of n occurrences."""

    keys: Array  # (U,) uint64
    row_of: Array  # (n,) int32, keys[row_of] equals the input of `unique`


def unique(device: Device, *, keys: Array, workspace: Workspace | None = None) -> Unique:
    """Return the distinct keys of `keys`, and for each occurrence the position of its key among them."""
    check_array("unique", "keys", keys, device, np.uint64, (None,))
    check_int32_count("unique", "keys", len(keys))
    if isinstance(device, CpuDevice):
        return _unique_cpu(device, keys, workspace or Workspace(device))
    return _unique_cuda(device, keys)


def _unique_cpu(device: CpuDevice, keys: Array, scratch: Workspace) -> Unique:
    n, shares = len(keys), device.share_count(len(keys))
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
    table_cells = 1 << max(4 * largest, 64).bit_length()
    device.launch(
        "unique_parts",
        n,
        mixed=mixed,
        part_starts=part_starts,
        bits=bits,
        table_cells=table_cells,
        tables=scratch.take("tables", (shares, table_cells), np.int32),
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
    from daskps.device.cuda import distinct_keys
    from daskps.hbm.hash_table import Shard, build_table, find_rows, join_shards

    distinct = distinct_keys(device, keys)
    cells = build_table(device, keys=distinct)
    shards = join_shards([Shard(device, device.empty((len(distinct), 1), np.float32), cells)])
    return Unique(distinct, find_rows(device, shards=shards, keys=keys))


OWNER_SALT = 0x8EBC6AF09C88C6E3  # default hash salt; independent of the salts of the devices and of the disk tier


@dataclass(frozen=True, slots=True)
class Partition:
    """Keys grouped by part: part p holds ``keys[order[starts[p]:starts[p + 1]]]``, in their original order."""

    order: Array  # (n,) int32
    starts: np.ndarray[tuple[int], np.dtype[np.int64]]  # (parts + 1,) on the host


def parts_of(device: Device, *, keys: Array, parts: int, salt: int = OWNER_SALT, modulo: bool = False) -> Array:
    """Return the part of each key (n,), int32: by hash with `salt`, or with `modulo` by ``key % parts``."""
    _check("parts_of", device, keys, parts)
    part = device.empty(len(keys), np.int32)
    device.launch(
        "partition_parts", len(keys), keys=keys, n=len(keys), parts=parts, salt=salt, modulo=modulo, part=part
    )
    return part


def partition(device: Device, *, keys: Array, parts: int, salt: int = OWNER_SALT, modulo: bool = False) -> Partition:
    """Return the stable order of `keys` by part. The part is a hash with `salt`, or with `modulo` ``key % parts``."""
    _check("partition", device, keys, parts)
    n = len(keys)
    starts = np.zeros(parts + 1, np.int64)
    if not isinstance(device, CpuDevice):
        part = parts_of(device, keys=keys, parts=parts, salt=salt, modulo=modulo)
        with device.active():
            starts[1:] = np.cumsum(device.to_host(device.xp.bincount(part, minlength=parts)))
            return Partition(device.xp.argsort(part, kind="stable").astype(np.int32), starts)
    counts = np.zeros((device.share_count(n), parts), np.int32)
    values = {"keys": keys, "n": n, "parts": parts, "salt": salt, "modulo": modulo}
    device.launch("partition_count", n, **values, counts=counts)
    starts[1:] = np.cumsum(counts.sum(axis=0))
    before = np.zeros_like(counts)
    np.cumsum(counts[:-1], axis=0, out=before[1:])
    order = device.empty(n, np.int32)
    device.launch("partition_deal", n, **values, next=before + starts[:-1].astype(np.int32), order=order)
    return Partition(order, starts)


def _check(call: str, device: Device, keys: Array, parts: int) -> None:
    check_array(call, "keys", keys, device, np.uint64, (None,))
    check_int32_count(call, "keys", len(keys))
    if not 1 <= parts <= 2**16:
        raise ArgumentError(f"{call}: parts must be from 1 to 65536, got {parts}")


def find_working_set(
    batch: Batch,
    slots: tuple[int, ...],
    devices: Sequence[Device],
    scratch: Workspace | None = None,
    device_of: Callable[[Keys], Int32s] | None = None,
) -> WorkingSet:
    """Return the distinct keys of `slots`, distributed over `devices` by hash, or as `device_of` returns.

    `device_of` exists only to show worked examples: a later batch cannot find rows that it has distributed.
    """
    keys, offsets, weights = select_slots(batch, slots)
    first = devices[0]
    found = unique(first, keys=first.from_host(keys), workspace=scratch)
    distinct, row_of = first.to_host(found.keys), first.to_host(found.row_of)
    whole = np.array([0, len(distinct)], np.int64)
    if len(devices) == 1:
        return WorkingSet(distinct, row_of, offsets, weights, whole, None)
    if device_of is None:
        dealt = partition(first, keys=found.keys, parts=len(devices), salt=DEVICE_SALT)
        key_of, starts = first.to_host(dealt.order), dealt.starts
    else:
        part = device_of(distinct)
        key_of = np.argsort(part, kind="stable").astype(np.int32)
        starts = np.searchsorted(part[key_of], np.arange(len(devices) + 1)).astype(np.int64)
    row_at = np.empty(len(distinct), np.int32)
    row_at[key_of] = np.arange(len(distinct), dtype=np.int32)
    return WorkingSet(distinct, row_at[row_of], offsets, weights, starts, key_of)


def by_owner(working_set: WorkingSet, partition: KeyPartition) -> tuple[WorkingSet, KeysByOwner]:
    """Return the working set with its keys grouped by owner, and where each owner's keys begin. Pulls and pushes are
    then slices of the keys and need no copy."""
    found = partition.group(working_set.keys)
    if found.order is None:
        return working_set, found
    keys, place = partition.pool.buffers.empty(len(found.order), np.uint64), np.empty(len(found.order), np.int32)
    library().link_order(order=found.order, n=len(place), keys=working_set.keys, ordered=keys, place=place)
    ordered = KeysByOwner(None, found.starts)
    if working_set.key_of is not None:  # rows keep their numbers, which determine their device
        return replace(working_set, keys=keys, key_of=place[working_set.key_of]), ordered
    row_of, n = working_set.row_of, len(working_set.row_of)  # no other code has this array yet: change it in place

    def renumber(share: int, shares: int) -> None:
        library().link_renumber(first=n * share // shares, last=n * (share + 1) // shares, place=place, row_of=row_of)

    partition.pool.shares(renumber)
    return replace(working_set, keys=keys), ordered


def select_slots(batch: Batch, slots: tuple[int, ...]) -> tuple[Keys, Int64s, Floats | None]:
    """Return keys, offsets (examples * len(slots) + 1,) and weights of `slots`. If `slots` are all slots of the batch,
    these are the batch's own arrays, without a copy."""
    if slots == tuple(range(batch.slots)):
        return batch.keys, batch.offsets, batch.weights
    bags = (np.arange(batch.examples)[:, None] * batch.slots + np.array(slots, np.int64)).ravel()
    starts, lengths = batch.offsets[bags], batch.offsets[bags + 1] - batch.offsets[bags]
    offsets = np.zeros(len(bags) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return batch.keys[index], offsets, None if batch.weights is None else batch.weights[index]
