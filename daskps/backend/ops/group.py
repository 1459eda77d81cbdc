"""The occurrences of a step grouped by row, which the gradient needs and which can be made ahead of the step.

In: row numbers and bags of the step's occurrences, the rows that count (a shard's own). Out: `Groups`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskps.backend.check import check_array, check_int32_count
from daskps.backend.device import Array, CpuDevice, Device
from daskps.backend.native import library
from daskps.backend.ops.pool import POOLINGS, Pooling, check_bags
from daskps.backend.workspace import Workspace
from daskps.errors import ArgumentError

PART_SHIFT = 14  # 2^14 rows a part: 64 KiB of counters
MOST_PARTS = 1024
LINE_COUNTERS = 16  # of a cache line: the counters of two shares must not stand in one


@dataclass(frozen=True, slots=True)
class Groups:
    """T touched rows of one shard and their K occurrences, in the order of the step."""

    touched: Array  # (T,) int32, ascending, counted from the shard's first row
    starts: Array  # (T + 1,) int32: the occurrences of touched[t] are [starts[t], starts[t + 1])
    bags: Array  # (K,) int32: the bag of each occurrence
    coefficients: Array | None  # (K,) float32: what its bag's gradient is multiplied with; None: 1
    slots: int


def group_occurrences(
    device: Device,
    *,
    row_of: Array,
    offsets: Array,
    slots: int,
    first_row: int,
    row_count: int,
    pooling: Pooling = "sum",
    weights: Array | None = None,
    workspace: Workspace | None = None,
) -> Groups:
    """Group the occurrences whose row is in [first_row, first_row + row_count) by row."""
    check_bags("group_occurrences", device, offsets, slots)
    check_array("group_occurrences", "row_of", row_of, device, np.int32, (None,))
    check_int32_count("group_occurrences", "occurrences", len(row_of))
    if weights is not None:
        check_array("group_occurrences", "weights", weights, device, np.float32, (len(row_of),))
    if pooling not in POOLINGS:
        raise ArgumentError(f"group_occurrences: pooling must be one of {sorted(POOLINGS)}, got {pooling!r}")
    if first_row < 0 or row_count < 0 or first_row + row_count > 2**31 - 1:
        raise ArgumentError(f"group_occurrences: no such rows: {row_count} from {first_row} on")
    scaled = weights is not None or pooling != "sum"
    if isinstance(device, CpuDevice):
        scratch = workspace or Workspace(device)
        return _group_cpu(
            device, row_of, offsets, slots, first_row, row_count, POOLINGS[pooling], weights, scaled, scratch
        )
    return _group_cuda(device, row_of, offsets, slots, first_row, row_count, POOLINGS[pooling], weights, scaled)


def _group_cpu(
    device: CpuDevice,
    row_of: Array,
    offsets: Array,
    slots: int,
    first_row: int,
    row_count: int,
    pooling: int,
    weights: Array | None,
    scaled: bool,
    scratch: Workspace,
) -> Groups:
    n, shares = len(row_of), device.shares(len(row_of))
    shift = PART_SHIFT
    while (row_count >> shift) >= MOST_PARTS:
        shift += 1
    parts = -(-((row_count >> shift) + 1) // LINE_COUNTERS) * LINE_COUNTERS
    places = scratch.take("places", (shares, parts), np.int32)
    places.fill(0)
    part_starts = scratch.take("part_starts", parts + 1, np.int32)
    dealt = scratch.take("dealt", n, np.uint64)
    dealt_coefficients = scratch.take("dealt_coefficients", n, np.float32) if scaled else None
    values = {"row_of": row_of, "n": n, "first_row": first_row, "row_count": row_count, "shift": shift, "parts": parts}
    device.launch("group_count", n, **values, counts=places)
    kept = library().group_places(counts=places, shares=shares, parts=parts, part_starts=part_starts)
    device.launch(
        "group_deal",
        n,
        **values,
        offsets=offsets,
        bags=len(offsets) - 1,
        weights=weights,
        pooling=pooling,
        next=places,
        dealt=dealt,
        dealt_coefficients=dealt_coefficients,
    )
    counters = scratch.take("counters", (shares, 1 << shift), np.int32)
    counters.fill(0)
    marks = scratch.take("marks", (shares, 1 << (shift - 6)), np.uint64)
    marks.fill(0)
    touched = scratch.take("touched", n, np.int32)
    starts = scratch.take("starts", n, np.int32)
    touched_counts = scratch.take("touched_counts", parts, np.int32)
    bags = device.empty(kept, np.int32)
    coefficients = device.empty(kept, np.float32) if scaled else None
    device.launch(
        "group_sort",
        n,
        part_starts=part_starts,
        parts=parts,
        shift=shift,
        next_part=np.zeros(1, np.int64),
        counters=counters,
        marks=marks,
        dealt=dealt,
        dealt_coefficients=dealt_coefficients,
        touched=touched,
        starts=starts,
        touched_counts=touched_counts,
        bags=bags,
        coefficients=coefficients,
    )
    bases = np.zeros(parts + 1, np.int32)
    np.cumsum(touched_counts, out=bases[1:])
    found = int(bases[-1])
    groups = Groups(device.empty(found, np.int32), device.empty(found + 1, np.int32), bags, coefficients, slots)
    device.launch(
        "group_join",
        n,
        part_starts=part_starts,
        parts=parts,
        bases=bases,
        touched=touched,
        starts=starts,
        joined=groups.touched,
        joined_starts=groups.starts,
    )
    return groups


def _group_cuda(
    device: Device,
    row_of: Array,
    offsets: Array,
    slots: int,
    first_row: int,
    row_count: int,
    pooling: int,
    weights: Array | None,
    scaled: bool,
) -> Groups:
    """The same by CuPy's stable sort."""
    xp, n = device.xp, len(row_of)
    bag_of = device.empty(n, np.int32)
    scales = device.empty(n, np.float32) if scaled else None
    device.launch(
        "group_bags",
        len(offsets) - 1,
        tiles=True,
        offsets=offsets,
        bags=len(offsets) - 1,
        weights=weights,
        pooling=pooling,
        bag_of=bag_of,
        coefficients=scales,
    )
    with device.active():
        mine = xp.flatnonzero((row_of >= first_row) & (row_of < first_row + row_count))
        rows = row_of[mine] - np.int32(first_row)
        order = xp.argsort(rows, kind="stable")
        rows, occurrences = rows[order], mine[order]
        heads = xp.flatnonzero(xp.diff(rows, prepend=xp.full(1, -1, np.int32)))
        starts = xp.concatenate([heads, xp.full(1, len(rows), np.int64)]).astype(np.int32)
        coefficients = None if scales is None else scales[occurrences]
        return Groups(rows[heads], starts, bag_of[occurrences], coefficients, slots)
