"""Pooled forward: the embeddings of every bag, added up.

In: the table's shards, row number of each occurrence, bag offsets, optional weights. Out: a (examples, stride) matrix
in whose columns [column, column + slots * D) the pooled embeddings stand.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from daskps.backend.check import check_array
from daskps.backend.device import Array, Device
from daskps.backend.ops.table import Shards
from daskps.errors import ArgumentError

Pooling: TypeAlias = Literal["sum", "mean", "sqrtn"]
POOLINGS: dict[str, int] = {"sum": 0, "mean": 1, "sqrtn": 2}
MAX_DIM = 256


def check_dim(call: str, dim: int, width: int) -> None:
    """An embedding has 1 to 256 dimensions, within the row."""
    if not 1 <= dim <= min(width, MAX_DIM):
        raise ArgumentError(f"{call}: dim must be from 1 to {MAX_DIM} and within a row of width {width}, got {dim}")


def check_bags(call: str, device: Device, offsets: Array, slots: int) -> int:
    """The number of examples that offsets (examples * slots + 1,) describe."""
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
    """Pool the first `dim` values of each occurrence's row over bags.

    `offsets` starts at 0. With weights, each embedding is multiplied by its own; `mean` then divides by the number of
    occurrences, `sqrtn` by its root. A negative row number adds nothing (but counts). An empty bag gives zeros.
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
