"""Whole rows by number: gather, scatter, copy. Their bits are opaque. A negative number is left out."""

from __future__ import annotations

import numpy as np

from daskps.backend.check import check_array
from daskps.backend.device import Array, Device
from daskps.backend.ops.table import Shards
from daskps.errors import ArgumentError


def gather_rows(device: Device, *, rows: Array, index: Array, out: Array | None = None) -> Array:
    """``out[i] = rows[index[i]]`` of float32 rows (n, width); where index[i] < 0, out[i] stays as it was."""
    check_array("gather_rows", "rows", rows, device, np.float32, (None, None))
    check_array("gather_rows", "index", index, device, np.int32, (None,))
    if out is None:
        out = device.zeros((len(index), rows.shape[1]), np.float32)
    check_array("gather_rows", "out", out, device, np.float32, (len(index), rows.shape[1]))
    width = rows.shape[1]
    device.launch("rows_gather", len(index), tiles=True, rows=rows, width=width, index=index, n=len(index), out=out)
    return out


def scatter_rows(device: Device, *, rows: Array, index: Array, values: Array) -> None:
    """``rows[index[i]] = values[i]``, each number at most once; where index[i] < 0, nothing happens."""
    check_array("scatter_rows", "rows", rows, device, np.float32, (None, None))
    check_array("scatter_rows", "index", index, device, np.int32, (None,))
    check_array("scatter_rows", "values", values, device, np.float32, (len(index), rows.shape[1]))
    width = rows.shape[1]
    device.launch(
        "rows_scatter", len(index), tiles=True, values=values, width=width, index=index, n=len(index), rows=rows
    )


def copy_rows(device: Device, *, shards: Shards, source: Array, rows: Array, target: Array) -> None:
    """``rows[target[i]]`` becomes row ``source[i]`` of another table's shards, wherever it is; targets are distinct."""
    check_array("copy_rows", "rows", rows, device, np.float32, (None, None))
    check_array("copy_rows", "source", source, device, np.int32, (None,))
    check_array("copy_rows", "target", target, device, np.int32, (len(source),))
    if rows.shape[1] != shards.width:
        raise ArgumentError(f"copy_rows: rows of width {shards.width} do not fit rows of width {rows.shape[1]}")
    device.launch(
        "rows_copy",
        len(source),
        tiles=True,
        shards=shards.on(device),
        shard_count=len(shards.shards),
        **{"from": source, "to": target},
        n=len(source),
        width=shards.width,
        rows=rows,
    )
