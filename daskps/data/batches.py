"""Assembly of batches: memory for consecutive parsed examples (pieces), joining pieces, and gathering examples in
another order.

Input: pieces that parsers fill, or batches. Output: one `Batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.types import Batch, Bools, Floats, Int32s, Int64s, Keys

Empty: TypeAlias = Callable[..., Any]  # numpy.empty, or `empty` of a buffer pool


@dataclass(frozen=True, slots=True)
class Shape:
    """Arrays that the examples of a data set need, and their sizes per example."""

    slots: int
    dense: int  # number of dense features
    weighted: bool  # keys carry weights
    example_weighted: bool
    fixed: bool  # every good example has exactly one key per slot
    log_columns: tuple[int, ...] = ()  # dense features to scale after parsing


@dataclass(slots=True, eq=False)
class Piece:
    """Arrays for n consecutive examples, which a parser fills. There may be space for more keys than are used."""

    labels: Floats  # (n,)
    keys: Keys  # (space,)
    offsets: Int64s  # (n * S + 1,) bounds of the bags; the first one belongs to the previous piece, or is 0
    dense: Floats  # (n, D)
    weights: Floats | None  # (space,)
    example_weights: Floats | None  # (n,)
    status: Int32s  # (n,) reason and column as in data/bad.py, 0 for a good example
    key_base: int = 0  # `offsets` count keys from this number
    used: int = 0  # keys written

    @property
    def examples(self) -> int:
        """Number of examples, n."""
        return len(self.labels)

    @property
    def ends(self) -> Int64s:
        """End of every bag (n * S,), a view of `offsets`."""
        return self.offsets[1:]

    def view(self, start: int, stop: int, shape: Shape) -> Piece:
        """Return examples [start, stop) of a piece of fixed shape, without a copy."""
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


def allocate(examples: int, keys: int, shape: Shape, empty: Empty = np.empty) -> Piece:
    """Allocate a piece for `examples` examples and `keys` keys. Too large a number of keys costs nothing: the system
    allocates a page only when it is written."""
    offsets = empty(examples * shape.slots + 1, np.int64)
    offsets[0] = 0
    return Piece(
        labels=empty(examples, np.float32),
        keys=empty(keys, np.uint64),
        offsets=offsets,
        dense=empty((examples, shape.dense), np.float32),
        weights=empty(keys, np.float32) if shape.weighted else None,
        example_weights=empty(examples, np.float32) if shape.example_weighted else None,
        status=np.empty(examples, np.int32),
    )


def scale_logs(dense: Floats, columns: Sequence[int]) -> None:
    """Replace x by sign(x) log(1 + |x|) in the given columns, in place."""
    for column in columns:
        values = dense[:, column].astype(np.float64)
        dense[:, column] = np.copysign(np.log1p(np.abs(values)), values)


def as_batch(piece: Piece, shape: Shape, first_example: int) -> Batch:
    """Return a complete piece as a batch, without a copy. The piece comes from `allocate` and was filled as a whole or
    through views."""
    return Batch(
        first_example=first_example,
        slots=shape.slots,
        labels=piece.labels,
        keys=piece.keys[: piece.used],
        offsets=piece.offsets,
        weights=None if piece.weights is None else piece.weights[: piece.used],
        dense=piece.dense if shape.dense else None,
        example_weights=_piece_example_weights(piece),
        bad=_piece_bad(piece),
    )


def _piece_bad(piece: Piece) -> Bools | None:
    """Return which examples could not be read; None if all could. A bad label that is not needed (NaN) is ignored."""
    bad = (piece.status != 0) & ~np.isnan(piece.labels)
    return bad if bad.any() else None


def _piece_example_weights(piece: Piece) -> Floats | None:
    """Return the example weights, 0 for bad examples; None if there are neither weights nor bad examples."""
    bad = piece.status != 0
    if not bad.any():
        return piece.example_weights
    weights = np.ones(piece.examples, np.float32) if piece.example_weights is None else piece.example_weights
    weights[bad] = 0
    return weights


def join(
    pieces: Sequence[Piece], shape: Shape, first_example: int, pool: ComputePool, empty: Empty = np.empty
) -> Batch:
    """Join pieces in order to one batch. Each piece is copied once, in parallel; a single piece is not copied."""
    if len(pieces) == 1 and pieces[0].key_base == 0:
        return as_batch(pieces[0], shape, first_example)
    examples = np.cumsum([0, *(piece.examples for piece in pieces)]).tolist()
    keys = np.cumsum([0, *(piece.used for piece in pieces)]).tolist()
    whole = allocate(examples[-1], keys[-1], shape, empty)
    whole.used = keys[-1]

    def copy(number: int) -> None:
        piece = pieces[number]
        at, keys_at = slice(examples[number], examples[number + 1]), slice(keys[number], keys[number + 1])
        bags = slice(examples[number] * shape.slots, examples[number + 1] * shape.slots)
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
    return as_batch(whole, shape, first_example)


def gather(batch: Batch, order: Int64s, first_example: int, pool: ComputePool) -> Batch:
    """Return the examples `order` of `batch` as a new batch, in this order."""
    offsets = np.empty(len(order) * batch.slots + 1, np.int64)
    offsets[0] = 0
    total = library().data_gather_ends(
        order=order, n=len(order), slots=batch.slots, offsets=batch.offsets, ends=offsets[1:]
    )
    keys = np.empty(total, np.uint64)
    weights = None if batch.weights is None else np.empty(total, np.float32)

    def share(index: int, count: int) -> None:
        library().data_gather_keys(
            order=order,
            start=len(order) * index // count,
            stop=len(order) * (index + 1) // count,
            slots=batch.slots,
            offsets=batch.offsets,
            keys=batch.keys,
            weights=batch.weights,
            new_offsets=offsets,
            new_keys=keys,
            new_weights=weights,
        )

    pool.shares(share)
    return Batch(
        first_example=first_example,
        slots=batch.slots,
        labels=batch.labels[order],
        keys=keys,
        offsets=offsets,
        weights=weights,
        dense=None if batch.dense is None else batch.dense[order],
        example_weights=None if batch.example_weights is None else batch.example_weights[order],
        bad=None if batch.bad is None else batch.bad[order],
    )


def concatenate(batches: Sequence[Batch], first_example: int, empty: Empty = np.empty) -> Batch:
    """Concatenate batches of one data set. With several nodes every batch is assembled here, in arrays from `empty`."""
    if len(batches) == 1:
        return batches[0]
    return Batch(
        first_example=first_example,
        slots=batches[0].slots,
        labels=_concatenated([batch.labels for batch in batches], empty),
        keys=_concatenated([batch.keys for batch in batches], empty),
        offsets=_offsets(batches, empty),
        weights=_joined([batch.weights for batch in batches], empty),
        dense=_joined([batch.dense for batch in batches], empty),
        example_weights=_example_weights(batches),
        bad=_bad(batches),
    )


def _concatenated(arrays: Sequence[Any], empty: Empty) -> Any:
    out = empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=out)


def _offsets(batches: Sequence[Batch], empty: Empty) -> Int64s:
    offsets: Int64s = empty(1 + sum(len(batch.offsets) - 1 for batch in batches), np.int64)
    offsets[0], at, base = 0, 1, 0
    for batch in batches:
        count = len(batch.offsets) - 1
        np.add(batch.offsets[1:], base, out=offsets[at : at + count])
        at, base = at + count, base + len(batch.keys)
    return offsets


def _joined(arrays: Sequence[Floats | None], empty: Empty) -> Floats | None:
    """Concatenate arrays of which either all or none are None."""
    there = [array for array in arrays if array is not None]
    return _concatenated(there, empty) if there else None


def _bad(batches: Sequence[Batch]) -> Bools | None:
    if all(batch.bad is None for batch in batches):
        return None
    return np.concatenate([np.zeros(batch.examples, np.bool_) if batch.bad is None else batch.bad for batch in batches])


def _example_weights(batches: Sequence[Batch]) -> Floats | None:
    """Concatenate example weights; examples of a batch without weights get 1. Return None if no batch has weights."""
    if all(batch.example_weights is None for batch in batches):
        return None
    ones = (np.ones(batch.examples, np.float32) for batch in batches)
    weights = (batch.example_weights for batch in batches)
    return np.concatenate([one if weight is None else weight for weight, one in zip(weights, ones, strict=True)])
