"""Room for a run of parsed rows, and the joining of such runs into one `Batch`.

Where every row gives exactly one key per slot, all pieces are views of the final arrays and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.types import Batch, Floats, Int32s, Int64s, Keys

Empty: TypeAlias = Callable[..., Any]  # numpy.empty, or one that uses memory again


@dataclass(frozen=True, slots=True)
class Shape:
    """What the examples of a data set have."""

    slots: int
    dense: int
    weighted: bool  # keys carry weights
    example_weighted: bool
    fixed: bool  # every good row gives exactly one key per slot
    log_columns: tuple[int, ...] = ()  # dense features to scale after parsing


@dataclass(slots=True, eq=False)
class Piece:
    """n rows with room for some keys; `ends` counts from `key_base`."""

    labels: Floats  # (n,)
    keys: Keys  # (room,)
    offsets: Int64s  # (n * S + 1,) bounds of the bags; the first one is the piece before's, or 0
    dense: Floats  # (n, D)
    weights: Floats | None  # (room,)
    example_weights: Floats | None  # (n,)
    status: Int32s  # (n,)
    key_base: int = 0
    used: int = 0  # keys written

    @property
    def rows(self) -> int:
        """n."""
        return len(self.labels)

    @property
    def ends(self) -> Int64s:
        """(n * S,) the end of every bag."""
        return self.offsets[1:]

    def view(self, start: int, stop: int, shape: Shape) -> Piece:
        """Rows [start, stop) of a piece of fixed shape."""
        S = shape.slots
        return Piece(
            labels=self.labels[start:stop],
            keys=self.keys[start * S : stop * S],
            offsets=self.offsets[start * S : stop * S + 1],
            dense=self.dense[start:stop],
            weights=None if self.weights is None else self.weights[start * S : stop * S],
            example_weights=None if self.example_weights is None else self.example_weights[start:stop],
            status=self.status[start:stop],
            key_base=self.key_base + start * S,
        )


def allocate(rows: int, keys: int, shape: Shape, empty: Empty = np.empty) -> Piece:
    """Room for `rows` rows and `keys` keys. Pages that are never written are never there."""
    offsets = empty(rows * shape.slots + 1, np.int64)
    offsets[0] = 0
    return Piece(
        labels=empty(rows, np.float32),
        keys=empty(keys, np.uint64),
        offsets=offsets,
        dense=empty((rows, shape.dense), np.float32),
        weights=empty(keys, np.float32) if shape.weighted else None,
        example_weights=empty(rows, np.float32) if shape.example_weighted else None,
        status=np.empty(rows, np.int32),
    )


def scale_logs(dense: Floats, columns: Sequence[int]) -> None:
    """sign(x) log(1 + |x|) of the named columns, in place."""
    for column in columns:
        values = dense[:, column].astype(np.float64)
        dense[:, column] = np.copysign(np.log1p(np.abs(values)), values)


def as_batch(piece: Piece, shape: Shape, first_row: int) -> Batch:
    """A whole piece, as `allocate` made it and one parse or many views filled it, as a batch; nothing is copied."""
    return Batch(
        first_row=first_row,
        slots=shape.slots,
        labels=piece.labels,
        keys=piece.keys[: piece.used],
        offsets=piece.offsets,
        weights=None if piece.weights is None else piece.weights[: piece.used],
        dense=piece.dense if shape.dense else None,
        example_weights=_example_weights(piece),
    )


def _example_weights(piece: Piece) -> Floats | None:
    """Bad rows weigh nothing; without weights and bad rows there is no array."""
    bad = piece.status != 0
    if not bad.any():
        return piece.example_weights
    weights = np.ones(piece.rows, np.float32) if piece.example_weights is None else piece.example_weights
    weights[bad] = 0
    return weights


def join(pieces: Sequence[Piece], shape: Shape, first_row: int, pool: ComputePool, empty: Empty = np.empty) -> Batch:
    """Pieces in order as one batch; each is copied once, in parallel."""
    if len(pieces) == 1 and pieces[0].key_base == 0:
        return as_batch(pieces[0], shape, first_row)
    rows = np.cumsum([0, *(piece.rows for piece in pieces)]).tolist()
    keys = np.cumsum([0, *(piece.used for piece in pieces)]).tolist()
    whole = allocate(rows[-1], keys[-1], shape, empty)
    whole.used = keys[-1]

    def copy(number: int) -> None:
        piece = pieces[number]
        at, keys_at = slice(rows[number], rows[number + 1]), slice(keys[number], keys[number + 1])
        bags = slice(rows[number] * shape.slots, rows[number + 1] * shape.slots)
        whole.labels[at] = piece.labels
        whole.status[at] = piece.status
        whole.dense[at] = piece.dense
        whole.keys[keys_at] = piece.keys[: piece.used]
        np.add(piece.ends, keys[number] - piece.key_base, out=whole.ends[bags])
        if whole.weights is not None and piece.weights is not None:
            whole.weights[keys_at] = piece.weights[: piece.used]
        if whole.example_weights is not None and piece.example_weights is not None:
            whole.example_weights[at] = piece.example_weights

    pool.map(copy, range(len(pieces)))
    return as_batch(whole, shape, first_row)
