"""Initial rows: a function of (seed, table, key) alone, so tiers, batches and nodes cannot change them.

In: keys, a layout and an `Initialiser` per field. Out: columns of given rows are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from daskps.backend.check import check_array
from daskps.backend.device import Array, Device
from daskps.errors import ArgumentError
from daskps.types import RowLayout

_KINDS = {"constant": 0, "uniform": 1, "normal": 2}
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Initialiser:
    """`constant`: the value a; `uniform`: from a up to b; `normal`: mean a, standard deviation b."""

    kind: Literal["constant", "uniform", "normal"]
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or not np.isfinite([self.a, self.b]).all():
            raise ArgumentError(f"an initialiser is constant, uniform or normal with finite numbers, got {self}")
        if (self.kind == "uniform" and self.a > self.b) or (self.kind == "normal" and self.b < 0):
            raise ArgumentError(f"uniform wants a <= b, and normal a standard deviation b >= 0, got {self}")


def initial_salt(seed: int, table: int) -> int:
    """One word that names (seed, table): their mix, as the kernels mix."""
    return _mix64((_mix64(seed & _MASK) + (table & _MASK) * 0x9E3779B97F4A7C15) & _MASK)


def initialise_columns(
    device: Device,
    *,
    keys: Array,
    rows: Array,
    columns: slice,
    initialiser: Initialiser,
    seed: int,
    table: int,
    positions: Array | None = None,
) -> None:
    """Write `columns` of the row of each key; row i, or row ``positions[i]``, belongs to ``keys[i]``."""
    check_array("initialise_columns", "keys", keys, device, np.uint64, (None,))
    check_array("initialise_columns", "rows", rows, device, np.float32, (None, None))
    if positions is not None:
        check_array("initialise_columns", "positions", positions, device, np.int32, (len(keys),))
    elif len(rows) < len(keys):
        raise ArgumentError(
            f"initialise_columns: {len(keys)} keys do not fit {len(rows)} rows; pass a row for each key"
        )
    width = rows.shape[1]
    if not 0 <= columns.start <= columns.stop <= width:
        raise ArgumentError(f"initialise_columns: columns {columns} are not within a row of width {width}")
    device.launch(
        "initial_rows",
        len(keys),
        tiles=True,
        keys=keys,
        positions=positions,
        n=len(keys),
        salt=initial_salt(seed, table),
        kind=_KINDS[initialiser.kind],
        a=initialiser.a,
        b=initialiser.b,
        column=columns.start,
        count=columns.stop - columns.start,
        width=width,
        rows=rows,
    )


def initialise_rows(
    device: Device,
    *,
    keys: Array,
    rows: Array,
    layout: RowLayout,
    initialisers: Mapping[str, Initialiser],
    seed: int,
    table: int,
    positions: Array | None = None,
) -> None:
    """Write whole rows, field by field; a field without an initialiser starts with zero bits."""
    unknown = initialisers.keys() - {field.name for field in layout.fields}
    if unknown:
        raise ArgumentError(f"initialise_rows: no fields {sorted(unknown)} in {[f.name for f in layout.fields]}")
    zero = Initialiser("constant", 0.0)
    for field in layout.fields:
        initialise_columns(
            device,
            keys=keys,
            rows=rows,
            columns=layout.place(field.name),
            initialiser=initialisers.get(field.name, zero),
            seed=seed,
            table=table,
            positions=positions,
        )


def _mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
