"""The working set of a batch in one table: distinct keys, their rows numbered by device.

In: a batch, the numbers of the table's slots. Out: a `WorkingSet`. Distinct keys are found on the node's first device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from daskps.backend.device import MEMORY, Device
from daskps.backend.native import library
from daskps.backend.ops.partition import partition
from daskps.backend.ops.table import DEVICE_SALT
from daskps.backend.ops.unique import unique
from daskps.backend.workspace import Workspace
from daskps.cluster.partition import Grouped, KeyPartition
from daskps.types import Batch, Floats, Int32s, Int64s, Keys, WorkingSet


def find_working_set(
    batch: Batch,
    slots: tuple[int, ...],
    devices: Sequence[Device],
    scratch: Workspace | None = None,
    device_of: Callable[[Keys], Int32s] | None = None,
) -> WorkingSet:
    """The distinct keys of `slots`, dealt over `devices` by mixed bits, or as `device_of` says.

    Rows that `device_of` has dealt cannot be searched for by a later batch: it is there to show worked examples.
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


def by_owner(working_set: WorkingSet, partition: KeyPartition) -> tuple[WorkingSet, Grouped]:
    """The same with its keys in the order of their owners: pulls and pushes are runs of it, and need no copy."""
    found = partition.group(working_set.keys)
    if found.order is None:
        return working_set, found
    keys, place = MEMORY.empty(len(found.order), np.uint64), np.empty(len(found.order), np.int32)
    library().link_order(order=found.order, n=len(place), keys=working_set.keys, ordered=keys, place=place)
    ordered = Grouped(None, found.starts)
    if working_set.key_of is not None:  # rows keep their numbers, which say on which device they are
        return replace(working_set, keys=keys, key_of=place[working_set.key_of]), ordered
    row_of, n = working_set.row_of, len(working_set.row_of)  # nobody else has seen it: it is changed where it is

    def renumber(share: int, shares: int) -> None:
        library().link_renumber(first=n * share // shares, last=n * (share + 1) // shares, place=place, row_of=row_of)

    partition.pool.shares(renumber)
    return replace(working_set, keys=keys), ordered


def select_slots(batch: Batch, slots: tuple[int, ...]) -> tuple[Keys, Int64s, Floats | None]:
    """Keys, offsets (examples * len(slots) + 1) and weights of `slots`; the batch's own arrays where all are wanted."""
    if slots == tuple(range(batch.slots)):
        return batch.keys, batch.offsets, batch.weights
    bags = (np.arange(batch.examples)[:, None] * batch.slots + np.array(slots, np.int64)).ravel()
    starts, lengths = batch.offsets[bags], batch.offsets[bags + 1] - batch.offsets[bags]
    offsets = np.zeros(len(bags) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    return batch.keys[index], offsets, None if batch.weights is None else batch.weights[index]
