"""Pooling of embeddings over bags, and grouping of a step's occurrences by row.

A bag is the keys of one example in one slot. Input: rows on the devices and the row number of each occurrence. Output:
pooled values per example and slot; occurrences grouped by row, which the gradient needs. Equal input gives groups in
the same order in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from daskps.device.device import Array, CpuDevice, Device, Workspace, check_array, check_int32_count
from daskps.device.native import library
from daskps.errors import ArgumentError
from daskps.hbm.hash_table import Shards

Pooling: TypeAlias = Literal["sum", "mean", "sqrtn"]
POOLINGS: dict[str, int] = {"sum": 0, "mean": 1, "sqrtn": 2}
MAX_DIM = 256  # the largest embedding dimension that kernels are compiled for


def check_dim(call: str, dim: int, width: int) -> None:
    """Raise ArgumentError unless `dim` is from 1 to 256 and at most the row's `width`."""
    if not 1 <= dim <= min(width, MAX_DIM):
        raise ArgumentError(f"{call}: dim must be from 1 to {MAX_DIM} and within a row of width {width}, got {dim}")


def check_bags(call: str, device: Device, offsets: Array, slots: int) -> int:
    """Check offsets (examples * slots + 1,) and return the number of examples that they describe."""
    check_array(call, "offsets", offsets, device, np.int64, (None,))
    if slots < 1 or len(offsets) < 1 or (len(offsets) - 1) % slots:
        raise ArgumentError(
            f"{call}: offsets wants examples * slots + 1 values, got {len(offsets)} for {slots} slots; "
            "pass the batch's own offsets"
        )
    if len(offsets) - 1 >= 2**31:
        raise ArgumentError(
            f"{call}: {len(offsets) - 1:,} bags are too many for one call (2^31 - 1); use smaller steps"
        )
    return (len(offsets) - 1) // slots


def pool_rows(
    device: Device,
    *,
    shards: Shards,
    dim: int,
    row_of: Array,
    offsets: Array,
    slots: int,
    pooling: Pooling = "sum",
    weights: Array | None = None,
    out: Array | None = None,
    column: int = 0,
) -> Array:
    """Pool the first `dim` values of each occurrence's row over bags, into columns of `out` from `column` on.

    `offsets` starts at 0. With weights, each embedding is multiplied by the weight of its occurrence. `mean` divides
    the sum by the number of occurrences, `sqrtn` by its square root. An occurrence with a negative row number adds
    nothing to the sum, but counts as an occurrence. An empty bag gives zeros.
    """
    check_dim("pool_rows", dim, shards.width)
    examples = check_bags("pool_rows", device, offsets, slots)
    check_array("pool_rows", "row_of", row_of, device, np.int32, (None,))
    if weights is not None:
        check_array("pool_rows", "weights", weights, device, np.float32, (len(row_of),))
    if pooling not in POOLINGS:
        raise ArgumentError(f"pool_rows: pooling must be one of {sorted(POOLINGS)}, got {pooling!r}")
    if out is None:
        out = device.empty((examples, column + slots * dim), np.float32)
    check_array("pool_rows", "out", out, device, np.float32, (examples, None))
    if column < 0 or column + slots * dim > out.shape[1]:
        raise ArgumentError(
            f"pool_rows: columns [{column}, {column + slots * dim}) are not within out's {out.shape[1]} columns; "
            "make it wider"
        )
    device.launch(
        "pool_forward",
        examples * slots,
        tiles=True,
        dim=dim,
        shards=shards.on(device),
        shard_count=len(shards.shards),
        width=shards.width,
        row_of=row_of,
        offsets=offsets,
        bags=examples * slots,
        slots=slots,
        weights=weights,
        pooling=POOLINGS[pooling],
        out=out,
        stride=out.shape[1],
        column=column,
    )
    return out


PART_SHIFT = 14  # log2 of the rows per part: 2^14 counters take 64 KiB
MOST_PARTS = 1024  # with more rows, parts get larger instead
LINE_COUNTERS = 16  # int32 counters per cache line: the counters of two shares must not be in the same line


@dataclass(frozen=True, slots=True)
class Groups:
    """Occurrences grouped by row: the T touched rows of one shard and their K occurrences. Within a row, occurrences
    stay in the order of the step."""

    touched: Array  # (T,) int32, ascending, counted from the shard's first row
    starts: Array  # (T + 1,) int32: the occurrences of touched[t] are [starts[t], starts[t + 1])
    bags: Array  # (K,) int32: the bag of each occurrence
    coefficients: Array | None  # (K,) float32: factor of the bag's gradient for each occurrence; None: all 1
    slots: int


@dataclass(frozen=True, slots=True)
class _Occurrences:
    """The occurrences to group: checked arguments of `group_occurrences`."""

    row_of: Array
    offsets: Array
    slots: int
    first_row: int
    row_count: int
    pooling: int  # number of the kernels
    weights: Array | None

    @property
    def scaled(self) -> bool:
        """True if an occurrence has a coefficient, False if all coefficients are 1."""
        return self.weights is not None or self.pooling != POOLINGS["sum"]


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
    """Group the occurrences whose row is in [first_row, first_row + row_count) by row. Others are left out."""
    check_bags("group_occurrences", device, offsets, slots)
    check_array("group_occurrences", "row_of", row_of, device, np.int32, (None,))
    check_int32_count("group_occurrences", "occurrences", len(row_of))
    if weights is not None:
        check_array("group_occurrences", "weights", weights, device, np.float32, (len(row_of),))
    if pooling not in POOLINGS:
        raise ArgumentError(f"group_occurrences: pooling must be one of {sorted(POOLINGS)}, got {pooling!r}")
    if first_row < 0 or row_count < 0 or first_row + row_count > 2**31 - 1:
        raise ArgumentError(f"group_occurrences: no such rows: {row_count} from {first_row} on")
    found = _Occurrences(row_of, offsets, slots, first_row, row_count, POOLINGS[pooling], weights)
    if isinstance(device, CpuDevice):
        return _group_cpu(device, found, workspace or Workspace(device))
    return _group_cuda(device, found)


def _group_cpu(device: CpuDevice, occurrences: _Occurrences, scratch: Workspace) -> Groups:
    row_of, offsets, scaled = occurrences.row_of, occurrences.offsets, occurrences.scaled
    first_row, row_count = occurrences.first_row, occurrences.row_count
    n, shares = len(row_of), device.share_count(len(row_of))
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
        weights=occurrences.weights,
        pooling=occurrences.pooling,
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
    groups = Groups(
        device.empty(found, np.int32), device.empty(found + 1, np.int32), bags, coefficients, occurrences.slots
    )
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


def _group_cuda(device: Device, occurrences: _Occurrences) -> Groups:
    """Group as `_group_cpu` does, with CuPy's stable sort."""
    xp, row_of, offsets, first_row = device.xp, occurrences.row_of, occurrences.offsets, occurrences.first_row
    bag_of = device.empty(len(row_of), np.int32)
    scales = device.empty(len(row_of), np.float32) if occurrences.scaled else None
    device.launch(
        "group_bags",
        len(offsets) - 1,
        tiles=True,
        offsets=offsets,
        bags=len(offsets) - 1,
        weights=occurrences.weights,
        pooling=occurrences.pooling,
        bag_of=bag_of,
        coefficients=scales,
    )
    with device.active():
        mine = xp.flatnonzero((row_of >= first_row) & (row_of < first_row + occurrences.row_count))
        rows = row_of[mine] - np.int32(first_row)
        order = xp.argsort(rows, kind="stable")
        rows, kept = rows[order], mine[order]
        heads = xp.flatnonzero(xp.diff(rows, prepend=xp.full(1, -1, np.int32)))
        starts = xp.concatenate([heads, xp.full(1, len(rows), np.int64)]).astype(np.int32)
        coefficients = None if scales is None else scales[kept]
        return Groups(rows[heads], starts, bag_of[kept], coefficients, occurrences.slots)
