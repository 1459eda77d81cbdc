"""Synthetic CTR data with a known answer: examples of any number, made in parallel, without files and without state.

In: a `Synthetic`, the description. Out: `Batch` values of any range of rows, the true click probability of each row,
and the AUC and log loss that no model can beat but by luck, because labels are drawn from a hidden model:

    logit = bias + sum of w(key) over all keys
                 + sum of <v_s, v_t> over pairs of slots s < t, where v_s is the sum of v(key) over the keys of slot s
                 + sum of b_j * dense_j

w(key) is bell-shaped and v(key) has 4 dimensions; both are hashes of (seed, key) times a strength by popularity, so
nothing is stored, and what can be learned sits mostly in keys that a modest sample shows often. The scales are standard
deviations of the three terms, whatever the number of slots. Without interactions a logistic regression has the right
form; with them a factorisation machine of 4 or more dimensions has.

Example i depends only on i and the description without `examples`: bits are equal for any threads, ranges, machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from daskps.backend.native import library
from daskps.backend.pool import ComputePool
from daskps.data.zipf import OCTAVES, ZipfTable, zipf_strength, zipf_table
from daskps.errors import ArgumentError, ConfigError
from daskps.types import Batch, Floats, Int32s, Int64s, Keys

VECTOR_DIMENSIONS = 4
_BLOCK_ROWS = 1 << 20  # `best` holds 12 bytes a row, and the keys of no row

Float64s = npt.NDArray[np.float64]


class Best(NamedTuple):
    """What the true probabilities reach on a sample."""

    auc: float
    log_loss: float


@dataclass(frozen=True, slots=True)
class Synthetic:
    """The description of a data set. A number that may differ by slot is one number for all, or a tuple of S."""

    examples: int
    slots: int = 16
    keys_per_slot: int | tuple[int | tuple[int, int], ...] = 1  # in one example; (low, high) is uniform, both included
    key_space: int | tuple[int, ...] = 100_000  # distinct keys a slot draws from, 1 .. 2**64
    zipf_exponent: float = 1.1  # P(k-th most popular key) ~ k**-exponent; 0 is uniform
    head_keys: int = 16  # keys less popular than these matter less, as popularity ** 0.5; 0: all keys matter alike
    dense: int = 0  # dense features, each of mean 0 and variance 1
    bias: float = -2.0
    weight_scale: float = 1.2
    interaction_scale: float = 0.7  # 0: logistic regression is the true form
    dense_scale: float = 0.5
    drift_rows: int = 0  # rows in which every w(key) turns from itself to another number and back; 0: no drift
    raw_keys: bool = False  # keys are popularity ranks 0, 1, ... shared by all slots, not hashes that include the slot
    seed: int = 0

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigError(f"synthetic data needs at least one slot, got slots={self.slots}")
        for name in ("examples", "dense", "drift_rows", "head_keys"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"the seed is a 64-bit number without a sign, got {self.seed}")
        scales = (self.bias, self.weight_scale, self.interaction_scale, self.dense_scale)
        if not all(map(math.isfinite, scales)) or min(scales[1:]) < 0:
            raise ConfigError(f"bias and scales must be finite, and scales not negative; got {scales}")
        for name in ("keys_per_slot", "key_space"):  # job files have lists where Python has tuples
            value = getattr(self, name)
            if not isinstance(value, int):
                value = tuple(item if isinstance(item, int) else tuple(item) for item in value)
                object.__setattr__(self, name, value)
                if len(value) != self.slots:
                    raise ConfigError(f"{name} names {len(value)} slots, but there are {self.slots}")
        for low, high in self.bag_sizes:
            if not 0 <= low <= high < 2**31:
                raise ConfigError(f"keys per slot go from low to high, 0 <= low <= high, got ({low}, {high})")
        for ranks in self.key_spaces:
            zipf_table(ranks, self.zipf_exponent)  # refuses what it cannot lay out

    @property
    def bag_sizes(self) -> tuple[tuple[int, int], ...]:
        """(lowest, highest) number of keys of each slot."""
        if isinstance(self.keys_per_slot, int):
            return ((self.keys_per_slot, self.keys_per_slot),) * self.slots
        return tuple((item, item) if isinstance(item, int) else item for item in self.keys_per_slot)

    @property
    def key_spaces(self) -> tuple[int, ...]:
        """Distinct keys of each slot."""
        return (self.key_space,) * self.slots if isinstance(self.key_space, int) else self.key_space

    @property
    def keys_per_example(self) -> float:
        """Expected number of keys of an example."""
        return sum(low + high for low, high in self.bag_sizes) / 2

    def read(self, start_row: int, stop_row: int, pool: ComputePool | None = None) -> Batch:
        """Examples [start_row, stop_row)."""
        self._check(start_row, stop_row)
        generator = _Generator(self)
        rows = stop_row - start_row
        offsets = generator.offsets(start_row, rows, pool)
        keys = np.empty(int(offsets[-1]), np.uint64)
        dense = np.empty((rows, self.dense), np.float32) if self.dense else None
        labels, _ = generator.fill(start_row, rows, pool, offsets, keys, dense)
        return Batch(start_row, self.slots, labels, keys, offsets, dense=dense)

    def truth(self, start_row: int, stop_row: int, pool: ComputePool | None = None) -> tuple[Floats, Float64s]:
        """Labels of rows [start_row, stop_row), and the probabilities that they were drawn with."""
        self._check(start_row, stop_row)
        generator = _Generator(self)
        blocks = [
            generator.fill(first, min(_BLOCK_ROWS, stop_row - first), pool)
            for first in range(start_row, max(stop_row, start_row + 1), _BLOCK_ROWS)
        ]
        return np.concatenate([labels for labels, _ in blocks]), np.concatenate([truth for _, truth in blocks])

    def best(self, start_row: int, stop_row: int, pool: ComputePool | None = None) -> Best:
        """Exact AUC and log loss of the true probabilities on rows [start_row, stop_row); NaN where undefined."""
        labels, truth = self.truth(start_row, stop_row, pool)
        if not len(labels):
            return Best(math.nan, math.nan)
        clicked = labels > 0
        log_loss = -(np.log(truth[clicked]).sum() + np.log1p(-truth[~clicked]).sum()) / len(labels)
        return Best(_exact_auc(truth, clicked), float(log_loss))

    def write_parquet(self, path: str | Path, row_group_rows: int = 1 << 17, pool: ComputePool | None = None) -> None:
        """One file: `label`, `slot0` ... (uint64, or a list of them where a bag may hold another number than one key),
        `dense0` ..."""
        if row_group_rows < 1:
            raise ArgumentError(f"a row group has at least one row, got row_group_rows={row_group_rows}")
        with pq.ParquetWriter(str(path), self._schema(), compression="zstd") as writer:
            for start in range(0, self.examples, row_group_rows):
                batch = self.read(start, min(start + row_group_rows, self.examples), pool)
                writer.write_table(self._table(batch), row_group_rows)

    def _schema(self) -> pa.Schema:
        kinds = [pa.uint64() if sizes == (1, 1) else pa.list_(pa.uint64()) for sizes in self.bag_sizes]
        return pa.schema(
            [("label", pa.uint8())]
            + [(f"slot{slot}", kind) for slot, kind in enumerate(kinds)]
            + [(f"dense{feature}", pa.float32()) for feature in range(self.dense)]
        )

    def _table(self, batch: Batch) -> pa.Table:
        columns = [pa.array(batch.labels.astype(np.uint8))]
        for slot, sizes in enumerate(self.bag_sizes):
            keys, offsets = _slot_column(batch, slot)
            values = pa.array(keys)
            columns.append(values if sizes == (1, 1) else pa.ListArray.from_arrays(pa.array(offsets), values))
        if batch.dense is not None:
            columns += [pa.array(np.ascontiguousarray(column)) for column in batch.dense.T]
        return pa.Table.from_arrays(columns, schema=self._schema())

    def _check(self, start_row: int, stop_row: int) -> None:
        if not 0 <= start_row <= stop_row <= self.examples:
            raise ArgumentError(f"rows [{start_row}, {stop_row}) are not within the {self.examples} examples described")


class _Generator:
    """The description as the native code takes it."""

    def __init__(self, config: Synthetic) -> None:
        self.config = config
        low, high = zip(*config.bag_sizes, strict=True)
        tables = [zipf_table(ranks, config.zipf_exponent) for ranks in config.key_spaces]
        dense_weights = np.empty(config.dense, np.float64)
        library().synth_normals(seed=config.seed, count=config.dense, normals=dense_weights)
        if config.dense:
            dense_weights *= config.dense_scale / math.sqrt(config.dense)
        self.bags = {
            "seed": config.seed,
            "slots": config.slots,
            "low": np.array(low, np.int32),
            "high": np.array(high, np.int32),
        }
        self.model = {
            **self.bags,
            **_stacked(tables),
            "strength": np.stack(
                [zipf_strength(ranks, config.zipf_exponent, config.head_keys) for ranks in config.key_spaces]
            ),
            "exponent": config.zipf_exponent,
            "raw": config.raw_keys,
            "bias": config.bias,
            "weight_scale": config.weight_scale / math.sqrt(max(config.keys_per_example, 1.0)),
            "pair_scale": _pair_scale(config),
            "turns_per_row": 1.0 / config.drift_rows if config.drift_rows else 0.0,
            "dense_features": config.dense,
            "dense_weights": dense_weights,
        }

    def offsets(self, start_row: int, rows: int, pool: ComputePool | None) -> Int64s:
        """(rows * S + 1,) where each bag begins."""
        slots = self.config.slots
        offsets = np.zeros(rows * slots + 1, np.int64)

        def count(first: int, stop: int) -> None:
            library().synth_count(
                **self.bags,
                first_row=start_row + first,
                rows=stop - first,
                counts=offsets[1 + first * slots : 1 + stop * slots],
            )

        _in_shares(pool, rows, count)
        np.cumsum(offsets, out=offsets)
        return offsets

    def fill(
        self,
        start_row: int,
        rows: int,
        pool: ComputePool | None,
        offsets: Int64s | None = None,
        keys: Keys | None = None,
        dense: Floats | None = None,
    ) -> tuple[Floats, Float64s]:
        """Labels (rows,) and true probabilities (rows,); keys and dense features too if there is room for them."""
        slots = self.config.slots
        labels = np.empty(rows, np.float32)
        probabilities = np.empty(rows, np.float64)

        def fill(first: int, stop: int) -> None:
            library().synth_fill(
                **self.model,
                first_row=start_row + first,
                rows=stop - first,
                offsets=None if offsets is None else offsets[first * slots : stop * slots + 1],
                keys=keys,
                dense=None if dense is None else dense[first:stop],
                labels=labels[first:stop],
                probabilities=probabilities[first:stop],
            )

        _in_shares(pool, rows, fill)
        return labels, probabilities


def _in_shares(pool: ComputePool | None, rows: int, call: Callable[[int, int], None]) -> None:
    """``call(first, stop)`` over [0, rows), one share per core."""
    if pool is None:
        call(0, rows)
    else:
        pool.shares(lambda index, count: call(rows * index // count, rows * (index + 1) // count))


def _stacked(tables: list[ZipfTable]) -> dict[str, Keys | npt.NDArray[np.uint8] | Int32s]:
    return {
        "upper": np.stack([table.upper for table in tables]).reshape(-1, OCTAVES),
        "guide": np.stack([table.guide for table in tables]),
        "last": np.array([table.last_octave for table in tables], np.int32),
        "last_ranks": np.array([table.last_ranks for table in tables], np.uint64),
    }


def _pair_scale(config: Synthetic) -> float:
    """What makes the sum over pairs of slots one of standard deviation `interaction_scale`."""
    means = [(low + high) / 2 for low, high in config.bag_sizes]
    pairs = (sum(means) ** 2 - sum(mean**2 for mean in means)) / 2
    return config.interaction_scale / math.sqrt(VECTOR_DIMENSIONS * pairs) if pairs > 0 else 0.0


def _slot_column(batch: Batch, slot: int) -> tuple[Keys, Int32s]:
    """The keys of one slot, example after example, and where each example's begin (B + 1)."""
    starts = batch.offsets[slot : -1 : batch.slots]
    counts = batch.offsets[slot + 1 :: batch.slots] - starts
    offsets = np.zeros(batch.examples + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    places = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
    return batch.keys[places], offsets.astype(np.int32)


def _exact_auc(scores: Float64s, clicked: npt.NDArray[np.bool_]) -> float:
    """Share of (clicked, not clicked) pairs in the right order, ties half; counted in integers."""
    distinct, place = np.unique(scores, return_inverse=True)
    positives = np.bincount(place[clicked], minlength=len(distinct))
    negatives = np.bincount(place[~clicked], minlength=len(distinct))
    if not positives.sum() or not negatives.sum():
        return math.nan
    below = np.cumsum(negatives) - negatives
    twice = int((positives * (2 * below + negatives)).sum())
    return twice / (2 * int(positives.sum()) * int(negatives.sum()))
