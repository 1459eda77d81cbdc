"""Synthetic CTR data with known true probabilities, and a reader for it with the same methods as `Reader`.

Input: a `Synthetic` (the description of the data), the number of passes, the steps. Output: this node's slices of
steps, as batches. Examples are computed when they are read; there are no files.

Keys of a slot are drawn by rank from a Zipf distribution. Ranks are grouped in octaves: octave j has ranks 2^j to
2^(j+1) - 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from daskps.data.batches import concatenate
from daskps.data.order import Steps
from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, ConfigError, DataError
from daskps.types import Batch, Floats, Int32s, Int64s, Keys

OCTAVES = 65  # ranks go up to 2^64
_DIRECT_OCTAVES = 8  # up to rank 255 terms are added one by one; above, the Euler-Maclaurin error is below 1e-25
_DIGITS = 60  # decimal digits of the computation


@dataclass(frozen=True, slots=True)
class ZipfTable:
    """Tables of a Zipf distribution, for the native sampler."""

    upper: Keys  # (OCTAVES,) 2**64 * P(octave <= j); not read from the last octave on
    guide: npt.NDArray[np.uint8]  # (256,) lowest possible octave of a random number, by its top 8 bits
    shares: npt.NDArray[np.float64]  # (OCTAVES,) P(octave)
    last_octave: int
    last_ranks: int  # ranks in the last octave


@functools.lru_cache(maxsize=1024)
def zipf_table(ranks: int, exponent: float) -> ZipfTable:
    """Return the table of `ranks` ranks with `exponent`. It is cached: equal arguments return the same object."""
    if not 1 <= ranks <= 2**64:
        raise ConfigError(f"a slot has 1 to 2**64 keys to draw from, got {ranks}")
    if not 0 <= exponent <= 16:
        raise ConfigError(f"the Zipf exponent lies in 0 .. 16, got {exponent}; 0 is uniform, 1 is Zipf's own law")
    last = ranks.bit_length() - 1
    with localcontext() as context:
        context.prec = _DIGITS
        masses = [
            _octave_mass(2**octave, min(2 ** (octave + 1) - 1, ranks), Decimal(exponent)) for octave in range(last + 1)
        ]
        total = sum(masses)
        upper, below = [], Decimal(0)
        for mass in masses:
            below += mass
            upper.append(min(int(below / total * 2**64), 2**64 - 1))
        shares = [float(mass / total) for mass in masses]
    guide = [sum(bound <= top << 56 for bound in upper[:last]) for top in range(256)]
    table = ZipfTable(
        np.array(upper + [2**64 - 1] * (OCTAVES - len(upper)), np.uint64),
        np.array(guide, np.uint8),
        np.array(shares + [0.0] * (OCTAVES - len(shares)), np.float64),
        last,
        ranks - 2**last + 1,
    )
    for array in (table.upper, table.guide, table.shares):
        array.flags.writeable = False  # all callers share the cached table
    return table


@functools.lru_cache(maxsize=1024)
def zipf_strength(ranks: int, exponent: float, head_keys: int) -> npt.NDArray[np.float64]:
    """Return the strength of a key's influence on the label, by octave (OCTAVES,): constant up to rank `head_keys` (0:
    for all ranks), then proportional to popularity**0.5. The mean square over occurrences is 1.
    """
    with localcontext() as context:
        context.prec = _DIGITS
        head, half = Decimal(head_keys or 2**64), Decimal(exponent) / 2
        strength = [float(min(Decimal(1), (head / 2**octave)) ** half) for octave in range(OCTAVES)]
    shares = zipf_table(ranks, exponent).shares
    scale = math.sqrt(math.fsum(share * value * value for share, value in zip(shares, strength, strict=True)))
    normalised = np.array(strength) / scale
    normalised.flags.writeable = False
    return normalised


def _power(rank: int, exponent: Decimal) -> Decimal:
    return (-exponent * Decimal(rank).ln()).exp()


def _octave_mass(first: int, last: int, exponent: Decimal) -> Decimal:
    """Return the sum of rank**-exponent over ranks first to last, inclusive."""
    if first < 2**_DIRECT_OCTAVES:
        return sum((_power(rank, exponent) for rank in range(first, last + 1)), Decimal(0))
    start, end = _power(first, exponent), _power(last, exponent)
    mass = (Decimal(last) / first).ln() if exponent == 1 else (last * end - first * start) / (1 - exponent)
    mass += (start + end) / 2
    rising = Decimal(1)  # exponent * (exponent + 1) * ..., the factor of the odd derivatives
    for order, coefficient in ((1, 12), (3, -720), (5, 30240), (7, -1209600)):  # (2k)! / Bernoulli(2k)
        rising *= exponent if order == 1 else (exponent + order - 2) * (exponent + order - 1)
        mass += rising * (start / Decimal(first) ** order - end / Decimal(last) ** order) / coefficient
    return mass


VECTOR_DIMENSIONS = 4  # of the hidden vector of a key, for interactions; as in synthetic.cpp
_BLOCK_EXAMPLES = 1 << 20  # examples per call of `truth`; `best` keeps 12 bytes per example, and no keys

Float64s = npt.NDArray[np.float64]


class Best(NamedTuple):
    """AUC and log loss of the true probabilities on a sample; a model is not expected to do better."""

    auc: float
    log_loss: float


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Description of a synthetic data set. A setting that may differ by slot is one number for all slots, or a tuple
    with one entry per slot."""

    examples: int
    slots: int = 16
    keys_per_bag: int | tuple[int | tuple[int, int], ...] = 1  # keys of a slot in one example; (low, high): uniform
    keys_per_slot: int | tuple[int, ...] = 100_000  # number of distinct keys of a slot, 1 .. 2**64
    zipf_exponent: float = 1.1  # P(k-th most popular key) ~ k**-exponent; 0 is uniform
    head_keys: int = 16  # beyond this rank, a key's influence falls as popularity ** 0.5; 0: all keys have the same
    dense: int = 0  # dense features, each of mean 0 and variance 1
    bias: float = -2.0
    weight_scale: float = 1.2
    interaction_scale: float = 0.7  # of pairs of slots; 0: logistic regression can reach the true probabilities
    dense_scale: float = 0.5
    drift_rows: int = 0  # examples in which each key's weight changes to another value and back; 0: no drift
    raw_keys: bool = False  # keys are popularity ranks 0, 1, ..., shared by all slots, not hashes that include the slot
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
        for name in ("keys_per_bag", "keys_per_slot"):  # job files have lists where Python has tuples
            value = getattr(self, name)
            if not isinstance(value, int):
                value = tuple(item if isinstance(item, int) else tuple(item) for item in value)
                object.__setattr__(self, name, value)
                if len(value) != self.slots:
                    raise ConfigError(f"{name} names {len(value)} slots, but there are {self.slots}")
        for low, high in self.bag_sizes:
            if not 0 <= low <= high < 2**31:
                raise ConfigError(f"keys_per_bag goes from low to high, 0 <= low <= high, got ({low}, {high})")
        for ranks in self.distinct_keys:
            zipf_table(ranks, self.zipf_exponent)  # raises ConfigError for wrong settings

    @property
    def bag_sizes(self) -> tuple[tuple[int, int], ...]:
        """Return the (lowest, highest) number of keys per example of each slot."""
        if isinstance(self.keys_per_bag, int):
            return ((self.keys_per_bag, self.keys_per_bag),) * self.slots
        return tuple((item, item) if isinstance(item, int) else item for item in self.keys_per_bag)

    @property
    def distinct_keys(self) -> tuple[int, ...]:
        """Return the number of distinct keys of each slot."""
        return (self.keys_per_slot,) * self.slots if isinstance(self.keys_per_slot, int) else self.keys_per_slot

    @property
    def keys_per_example(self) -> float:
        """Return the expected number of keys of an example."""
        return sum(low + high for low, high in self.bag_sizes) / 2

    def read(self, start: int, stop: int, pool: ComputePool | None = None) -> Batch:
        """Return examples [start, stop) as one batch."""
        self._check(start, stop)
        generator = _Generator(self)
        examples = stop - start
        offsets = generator.offsets(start, examples, pool)
        keys = np.empty(int(offsets[-1]), np.uint64)
        dense = np.empty((examples, self.dense), np.float32) if self.dense else None
        labels, _ = generator.fill(start, examples, pool, offsets, keys, dense)
        return Batch(start, self.slots, labels, keys, offsets, dense=dense)

    def truth(self, start: int, stop: int, pool: ComputePool | None = None) -> tuple[Floats, Float64s]:
        """Return the labels of examples [start, stop), and the probabilities that they were drawn with."""
        self._check(start, stop)
        generator = _Generator(self)
        blocks = [
            generator.fill(first, min(_BLOCK_EXAMPLES, stop - first), pool)
            for first in range(start, max(stop, start + 1), _BLOCK_EXAMPLES)
        ]
        return np.concatenate([labels for labels, _ in blocks]), np.concatenate([truth for _, truth in blocks])

    def best(self, start: int, stop: int, pool: ComputePool | None = None) -> Best:
        """Return the exact AUC and log loss of the true probabilities on examples [start, stop).

        They are NaN if undefined.
        """
        labels, truth = self.truth(start, stop, pool)
        if not len(labels):
            return Best(math.nan, math.nan)
        clicked = labels > 0
        log_loss = -(np.log(truth[clicked]).sum() + np.log1p(-truth[~clicked]).sum()) / len(labels)
        return Best(_exact_auc(truth, clicked), float(log_loss))

    def write_parquet(self, path: str | Path, row_group_rows: int = 1 << 17, pool: ComputePool | None = None) -> None:
        """Write the data to one Parquet file, with columns `label`, `slot0` ..., `dense0` ... A slot is uint64, or a
        list of uint64 if an example may have more or fewer keys than one."""
        if row_group_rows < 1:
            raise ArgumentError(f"a row group has at least one example, got row_group_rows={row_group_rows}")
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

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.examples:
            raise ArgumentError(f"examples [{start}, {stop}) are not within the {self.examples} examples described")


class _Generator:
    """Generator of examples: a `Synthetic` as arguments of the native functions."""

    def __init__(self, config: Synthetic) -> None:
        self.config = config
        low, high = zip(*config.bag_sizes, strict=True)
        tables = [zipf_table(ranks, config.zipf_exponent) for ranks in config.distinct_keys]
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
                [zipf_strength(ranks, config.zipf_exponent, config.head_keys) for ranks in config.distinct_keys]
            ),
            "exponent": config.zipf_exponent,
            "raw": config.raw_keys,
            "bias": config.bias,
            "weight_scale": config.weight_scale / math.sqrt(max(config.keys_per_example, 1.0)),
            "pair_scale": _pair_scale(config),
            "turns_per_example": 1.0 / config.drift_rows if config.drift_rows else 0.0,
            "dense_features": config.dense,
            "dense_weights": dense_weights,
        }

    def offsets(self, start: int, examples: int, pool: ComputePool | None) -> Int64s:
        """Return where each bag begins (examples * S + 1,)."""
        slots = self.config.slots
        offsets = np.zeros(examples * slots + 1, np.int64)

        def count(first: int, stop: int) -> None:
            library().synth_count(
                **self.bags,
                first_example=start + first,
                examples=stop - first,
                counts=offsets[1 + first * slots : 1 + stop * slots],
            )

        _in_shares(pool, examples, count)
        np.cumsum(offsets, out=offsets)
        return offsets

    def fill(
        self,
        start: int,
        examples: int,
        pool: ComputePool | None,
        offsets: Int64s | None = None,
        keys: Keys | None = None,
        dense: Floats | None = None,
    ) -> tuple[Floats, Float64s]:
        """Return labels and true probabilities, (examples,) each. Fill `keys` and `dense` too, if they are given."""
        slots = self.config.slots
        labels = np.empty(examples, np.float32)
        probabilities = np.empty(examples, np.float64)

        def fill(first: int, stop: int) -> None:
            library().synth_fill(
                **self.model,
                first_example=start + first,
                examples=stop - first,
                offsets=None if offsets is None else offsets[first * slots : stop * slots + 1],
                keys=keys,
                dense=None if dense is None else dense[first:stop],
                labels=labels[first:stop],
                probabilities=probabilities[first:stop],
            )

        _in_shares(pool, examples, fill)
        return labels, probabilities


def _in_shares(pool: ComputePool | None, examples: int, call: Callable[[int, int], None]) -> None:
    """Call ``call(first, stop)`` for consecutive shares of [0, examples), one per core."""
    if pool is None:
        call(0, examples)
    else:
        pool.shares(lambda index, count: call(examples * index // count, examples * (index + 1) // count))


def _stacked(tables: list[ZipfTable]) -> dict[str, Keys | npt.NDArray[np.uint8] | Int32s]:
    return {
        "upper": np.stack([table.upper for table in tables]).reshape(-1, OCTAVES),
        "guide": np.stack([table.guide for table in tables]),
        "last": np.array([table.last_octave for table in tables], np.int32),
        "last_ranks": np.array([table.last_ranks for table in tables], np.uint64),
    }


def _pair_scale(config: Synthetic) -> float:
    """Return the factor that gives the sum over pairs of slots the standard deviation `interaction_scale`."""
    means = [(low + high) / 2 for low, high in config.bag_sizes]
    pairs = (sum(means) ** 2 - sum(mean**2 for mean in means)) / 2
    return config.interaction_scale / math.sqrt(VECTOR_DIMENSIONS * pairs) if pairs > 0 else 0.0


def _slot_column(batch: Batch, slot: int) -> tuple[Keys, Int32s]:
    """Return the keys of one slot, example by example, and where each example's keys begin (B + 1,)."""
    starts = batch.offsets[slot : -1 : batch.slots]
    counts = batch.offsets[slot + 1 :: batch.slots] - starts
    offsets = np.zeros(batch.examples + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    places = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
    return batch.keys[places], offsets.astype(np.int32)


def _exact_auc(scores: Float64s, clicked: npt.NDArray[np.bool_]) -> float:
    """Return the fraction of (clicked, not clicked) pairs in the right order; ties count half. Counted in integers."""
    distinct, place = np.unique(scores, return_inverse=True)
    positives = np.bincount(place[clicked], minlength=len(distinct))
    negatives = np.bincount(place[~clicked], minlength=len(distinct))
    if not positives.sum() or not negatives.sum():
        return math.nan
    below = np.cumsum(negatives) - negatives
    twice = int((positives * (2 * below + negatives)).sum())
    return twice / (2 * int(positives.sum()) * int(negatives.sum()))


class GeneratedReader:
    """Reader of the synthetic examples [start, stop), in `passes` passes. `examples` counts those of all passes."""

    def __init__(
        self,
        data: Synthetic,
        pool: ComputePool,
        steps: Steps,
        *,
        start: int,
        stop: int,
        passes: int = 1,
    ) -> None:
        self._data, self._pool, self.steps = data, pool, steps
        self._first_example, self._pass_examples = start, stop - start
        self.examples = self._pass_examples * passes

    def read_steps(self, first_step: int, last_step: int) -> tuple[Batch, Int64s]:
        """Return this node's slices of steps [first_step, last_step) as one batch, and where each begins in it."""
        ranges = [self.steps.slice(step, self.examples) for step in range(first_step, last_step)]
        if ranges and ranges[-1][1] > self.examples:
            raise DataError(f"steps [{first_step}, {last_step}) end behind the last of {self.examples} examples")
        starts = np.cumsum([0, *(stop - start for start, stop in ranges)]).astype(np.int64)
        pieces = [self._read(start, stop) for start, stop in self._join_adjacent(ranges)]
        return concatenate(pieces, ranges[0][0] if ranges else 0, self._pool.buffers.empty), starts

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _join_adjacent(self, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ranges with adjacent ones joined, and cut where a pass ends."""
        joined: list[tuple[int, int]] = []
        for start, stop in ranges:
            while start < stop:
                end = min(stop, (start // self._pass_examples + 1) * self._pass_examples)
                if joined and joined[-1][1] == start and start % self._pass_examples:
                    joined[-1] = (joined[-1][0], end)
                else:
                    joined.append((start, end))
                start = end
        return joined or [(0, 0)]

    def _read(self, start: int, stop: int) -> Batch:
        pass_start = start // self._pass_examples * self._pass_examples
        first = self._first_example + start - pass_start
        return self._data.read(first, first + stop - start, self._pool)
