"""Values that pass between stages, and the layout of a row: plain data without logic.

Shapes: B examples, S slots, K occurrences of keys, U distinct keys, W fields of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import StrEnum
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Keys: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float32]
Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


# How the values that replicas of a row have in one field become one value, with `train.sync_every` above 1.
Merge: TypeAlias = Literal["mean", "sum", "max"]


@dataclass(frozen=True, slots=True)
class Field:
    """Named group of `width` consecutive 4-byte values inside a row.

    `merge` says how replicas are merged: `mean` of their values, `sum` of what each has added since the last merge, or
    the largest value (`max`). It is a rule of the job. Files do not record it, and it does not make layouts different.
    """

    name: str
    width: int
    dtype: Literal["float32", "uint32"] = "float32"
    merge: Merge = dataclass_field(default="mean", compare=False)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Fields of a row, in order. Rows are float32 arrays (n, width); uint32 fields are views of the same bits.

    >>> layout = RowLayout((Field("embedding", 4), Field("accumulator", 4), Field("shows", 1, "uint32", "sum")))
    >>> layout.width, layout.place("accumulator")
    (9, slice(4, 8, None))
    """

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if not names or len(set(names)) != len(names) or any(field.width < 1 for field in self.fields):
            raise ValueError(f"a row needs named fields of at least one value, each name once; got {self.fields}")

    @property
    def width(self) -> int:
        """Number of 4-byte values in a row."""
        return sum(field.width for field in self.fields)

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return 4 * self.width

    @property
    def has_sums(self) -> bool:
        """True if a field is merged by `sum`, which needs the row's values after the last merge."""
        return any(field.merge == "sum" for field in self.fields)

    def place(self, name: str) -> slice:
        """Return the columns of field `name`."""
        start = 0
        for field in self.fields:
            if field.name == name:
                return slice(start, start + field.width)
            start += field.width
        raise KeyError(f"no field {name!r} in this row; it has {[field.name for field in self.fields]}")


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive examples. Bag ``example * slots + slot`` holds ``keys[offsets[bag]:offsets[bag + 1]]``."""

    first_example: int  # global example number of the first example
    slots: int  # S
    labels: Floats  # (B,) 0 or 1
    keys: Keys  # (K,)
    offsets: Int64s  # (B * S + 1,) starts at 0, ends at K
    weights: Floats | None = None  # (K,) weight of each key occurrence
    dense: Floats | None = None  # (B, dense features)
    example_weights: Floats | None = None  # (B,)
    bad: Bools | None = None  # (B,) True for examples that could not be parsed: no keys, weight 0; None: there are none

    @property
    def examples(self) -> int:
        """Number of examples, B."""
        return len(self.labels)

    def slice(self, start: int, stop: int) -> Batch:
        """Return the examples [start, stop). All arrays are views, except offsets that must be shifted."""
        first, last = int(self.offsets[start * self.slots]), int(self.offsets[stop * self.slots])
        offsets = self.offsets[start * self.slots : stop * self.slots + 1]
        return Batch(
            first_example=self.first_example + start,
            slots=self.slots,
            labels=self.labels[start:stop],
            keys=self.keys[first:last],
            offsets=offsets - first if first else offsets,
            weights=None if self.weights is None else self.weights[first:last],
            dense=None if self.dense is None else self.dense[start:stop],
            example_weights=None if self.example_weights is None else self.example_weights[start:stop],
            bad=None if self.bad is None else self.bad[start:stop],
        )


class Stage(StrEnum):
    """Stages of a batch, in their order. Each is one Dask task per node and batch."""

    READ = "read"
    DEDUP = "dedup"
    PULL = "pull"
    LOAD = "load"
    TRAIN = "train"
    PUSH = "push"


@dataclass(frozen=True, slots=True)
class BatchId:
    """Identity of a batch, as stages' tasks pass it on. Bulk data stays in the node."""

    run: str  # unique id of the training run
    incarnation: int  # grows with every restart from a snapshot; a fencing token
    batch: int  # -1 until the batch has its number
    first_step: int  # steps are numbered over all passes over the data
    stop_step: int
    snapshot: str = ""  # prepare this snapshot when the batch is pushed

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.stop_step}"
        return f"batch {self.batch} ({steps}) of run {self.run}, incarnation {self.incarnation}"


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Distinct keys of one batch in one table, and the row number of each key occurrence.

    The rows of one device, its shard of the table, have consecutive numbers.
    """

    keys: Keys  # (U,) distinct
    row_of: Int32s  # (K,) row number of each occurrence
    offsets: Int64s  # (B * S + 1,) bags of this table's slots, example by example
    weights: Floats | None  # (K,)
    shard_starts: Int64s  # (M + 1,) device m has rows [shard_starts[m], shard_starts[m + 1])
    key_of: Int32s | None  # (U,) position in `keys` of each row; None: rows are in the order of `keys`
