"""Whole batches: gathering examples in another order, and putting batches one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskps.backend.device import MEMORY
from daskps.backend.native import library
from daskps.backend.pool import ComputePool
from daskps.types import Batch, Floats, Int64s


def gather(batch: Batch, order: Int64s, first_row: int, pool: ComputePool) -> Batch:
    """The examples of `batch` that `order` names, in its order."""
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
        first_row=first_row,
        slots=batch.slots,
        labels=batch.labels[order],
        keys=keys,
        offsets=offsets,
        weights=weights,
        dense=None if batch.dense is None else batch.dense[order],
        example_weights=None if batch.example_weights is None else batch.example_weights[order],
    )


def concatenate(batches: Sequence[Batch], first_row: int) -> Batch:
    """Batches of one data set, one behind the other."""
    if len(batches) == 1:
        return batches[0]
    return Batch(
        first_row=first_row,
        slots=batches[0].slots,
        labels=_behind([batch.labels for batch in batches]),
        keys=_behind([batch.keys for batch in batches]),
        offsets=_offsets(batches),
        weights=_joined([batch.weights for batch in batches]),
        dense=_joined([batch.dense for batch in batches]),
        example_weights=_example_weights(batches),
    )


def _behind(arrays: Sequence[Any]) -> Any:
    """Arrays one behind the other, in memory that is used again: on several nodes every batch is put together here."""
    out = MEMORY.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=out)


def _offsets(batches: Sequence[Batch]) -> Int64s:
    offsets: Int64s = MEMORY.empty(1 + sum(len(batch.offsets) - 1 for batch in batches), np.int64)
    offsets[0], at, base = 0, 1, 0
    for batch in batches:
        count = len(batch.offsets) - 1
        np.add(batch.offsets[1:], base, out=offsets[at : at + count])
        at, base = at + count, base + len(batch.keys)
    return offsets


def _joined(arrays: Sequence[Floats | None]) -> Floats | None:
    """All have it or none has."""
    there = [array for array in arrays if array is not None]
    return _behind(there) if there else None


def _example_weights(batches: Sequence[Batch]) -> Floats | None:
    """A batch without weights among others with weights weighs 1 each."""
    if all(batch.example_weights is None for batch in batches):
        return None
    ones = (np.ones(batch.examples, np.float32) for batch in batches)
    weights = (batch.example_weights for batch in batches)
    return np.concatenate([one if weight is None else weight for weight, one in zip(weights, ones, strict=True)])
