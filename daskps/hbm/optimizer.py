"""Row optimizers, one record per kind, and initial rows.

Input: the settings of an optimizer. Output: the fields that it keeps in a row with their initial values, and the
arguments of its kernel. Initial rows depend only on (seed, table, key), so tiers, batches and nodes do not change them.

To add a kind: a record in OPTIMIZERS here, its formula in kernels/optimizer.cuh, a line in nn/OPTIMIZERS.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pydantic

from daskps.device.device import Array, Device, check_array
from daskps.device.native import make_struct, mix64, struct_dtype
from daskps.errors import ArgumentError
from daskps.settings import RECORDED, Decay, FiniteNonNegative, LearningRate, Settings, as_float32
from daskps.types import Field, Merge, RowLayout

FIXED_ONE = 2**36  # fixed point: the integer that stands for 1.0 in gradient sums, as in kernels/gradient.cuh

OptimizerKind: TypeAlias = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]


@dataclass(frozen=True, slots=True)
class StateField:
    """A field of optimizer state in a row."""

    name: str
    per_row: bool = False  # True: one value; False: one per dimension of the embedding
    dtype: Literal["float32", "uint32"] = "float32"
    merge: Merge = "mean"
    initial: str | None = None  # the setting that is its initial value; None: 0


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """A kind of row optimizer: what its name stands for, except the formula."""

    number: int  # in the enum of kernels/optimizer.cuh
    settings: tuple[str, ...] = ()  # its own, beside kind, learning_rate, l2 and clip_norm
    state: tuple[StateField, ...] = ()  # fields of a row, after the embedding
    divisors: tuple[str, ...] = ()  # one of these settings must be above 0, or a zero gradient would be divided by 0


_ACCUMULATOR = StateField("accumulator", initial="initial_accumulator")

OPTIMIZERS: dict[OptimizerKind, RowOptimizer] = {
    "sgd": RowOptimizer(0),
    "adagrad": RowOptimizer(
        1,
        settings=("epsilon", "initial_accumulator"),
        state=(_ACCUMULATOR,),
        divisors=("epsilon", "initial_accumulator"),
    ),
    "rowwise_adagrad": RowOptimizer(
        2,
        settings=("epsilon", "initial_accumulator"),
        state=(StateField("accumulator", per_row=True, initial="initial_accumulator"),),
        divisors=("epsilon", "initial_accumulator"),
    ),
    "adam": RowOptimizer(
        3,
        settings=("epsilon", "beta1", "beta2"),
        state=(
            StateField("momentum"),
            StateField("variance"),
            StateField("steps", per_row=True, dtype="uint32", merge="max"),
        ),
        divisors=("epsilon",),
    ),
    "ftrl": RowOptimizer(
        4,
        settings=("initial_accumulator", "l1", "beta"),
        state=(_ACCUMULATOR, StateField("linear")),
        divisors=("beta", "initial_accumulator", "l2"),
    ),
}


class OptimizerSettings(Settings):
    """Optimizer of a table's rows or of the dense network; daskps/nn/OPTIMIZERS.md has the formulas of all kinds.

    Gradients are means over a step's examples. They are clipped, then L2 is added; this is the same for rows and
    network. A field that the kind does not use is an error.
    """

    kind: OptimizerKind = pydantic.Field(
        default="adagrad", description="Rule of the update; the network learns with sgd, adagrad or adam."
    )
    learning_rate: LearningRate = pydantic.Field(default=0.05, description="Factor of every update; above 0.")
    l2: FiniteNonNegative = pydantic.Field(
        default=0.0, description="L2 penalty; in the network on weights, not on biases."
    )
    clip_norm: FiniteNonNegative = pydantic.Field(
        default=0.0, description="Largest norm of a row's gradient, or of the whole network's; 0: no clipping."
    )
    epsilon: FiniteNonNegative = pydantic.Field(
        default=1e-8, description="Adagrad and Adam: added to the divisor; 0 only with an initial_accumulator."
    )
    initial_accumulator: FiniteNonNegative = pydantic.Field(
        default=0.0, description="Adagrad and FTRL: the sum of squared gradients before the first one."
    )
    beta1: Decay = pydantic.Field(default=0.9, description="Adam: decay of the mean of gradients; at least 0, below 1.")
    beta2: Decay = pydantic.Field(
        default=0.999, description="Adam: decay of the mean of their squares; at least 0, below 1."
    )
    l1: FiniteNonNegative = pydantic.Field(default=0.0, description="FTRL: L1 penalty, which makes weights exactly 0.")
    beta: FiniteNonNegative = pydantic.Field(
        default=1e-5,
        description="FTRL: added to the divisor; small because gradients are means. With single examples 1 is usual.",
    )

    @property
    def known_fields(self) -> set[str]:
        """Names of the fields that the kind uses."""
        return {*OPTIMIZERS[self.kind].settings, "kind", "learning_rate", "l2", "clip_norm"}

    @pydantic.model_validator(mode="after")
    def _fields_of_the_kind(self) -> OptimizerSettings:
        known = self.known_fields
        if wrong := sorted(self.model_fields_set - known):
            raise ValueError(f"{self.kind} has no setting {', '.join(wrong)}; it has {', '.join(sorted(known))}")
        return self

    @pydantic.model_validator(mode="after")
    def _divides_by_more_than_0(self, info: pydantic.ValidationInfo) -> OptimizerSettings:
        if info.context == RECORDED:
            return self
        names = OPTIMIZERS[self.kind].divisors
        if names and not any(as_float32(getattr(self, name)) for name in names):
            raise ValueError(
                f"{names[0]} = {getattr(self, names[0])}: {self.kind} would divide 0 by 0 at the first gradient of 0; "
                f"set {' or '.join(names)} above 0"
            )
        return self

    @pydantic.model_serializer(mode="wrap")
    def _only_those(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return only the fields of the kind, so that settings in a snapshot can be read again as the same job."""
        known = self.known_fields
        return {name: value for name, value in handler(self).items() if name in known}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Settings of a row optimizer. A step clips the gradient to `clip_norm`, adds `l2` times the embedding, and then
    applies the rule of `kind`; daskps/nn/OPTIMIZERS.md has the formulas. Settings that the kind does not use are
    ignored.
    """

    kind: OptimizerKind
    learning_rate: float
    epsilon: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    beta: float = 1e-5
    l1: float = 0.0
    l2: float = 0.0
    clip_norm: float = 0.0  # 0: no clipping
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        _record(self.kind)
        positive = {"learning_rate": self.learning_rate}
        not_negative = {
            name: getattr(self, name) for name in ("epsilon", "beta", "l1", "l2", "clip_norm", "initial_accumulator")
        }
        below_one = {"beta1": self.beta1, "beta2": self.beta2}
        wrong = [f"{name}={value} (wants > 0)" for name, value in positive.items() if not 0 < value < math.inf]
        wrong += [f"{name}={value} (wants >= 0)" for name, value in not_negative.items() if not 0 <= value < math.inf]
        wrong += [f"{name}={value} (wants 0 <= and < 1)" for name, value in below_one.items() if not 0 <= value < 1]
        if wrong:
            raise ArgumentError(f"optimizer {self.kind}: {', '.join(wrong)}")

    def kernel_struct(self, weight: float) -> np.void:
        """Return `struct Optimizer` of kernels/optimizer.cuh for a step of this total example weight, by which the
        gradient sums are divided."""
        names = struct_dtype("Optimizer").names or ()
        settings = {name: getattr(self, name) for name in names if name not in ("kind", "factor")}
        return make_struct("Optimizer", kind=OPTIMIZERS[self.kind].number, factor=1 / FIXED_ONE / weight, **settings)


def optimizer_fields(kind: OptimizerKind, dim: int) -> tuple[Field, ...]:
    """Return the first fields of a row: the embedding, then the optimizer's state."""
    state = (Field(f.name, 1 if f.per_row else dim, f.dtype, f.merge) for f in _record(kind).state)
    return (Field("embedding", dim), *state)


def state_initialisers(optimizer: Optimizer) -> dict[str, Initialiser]:
    """Return the initialisers of the state fields. Fields without one start at zero."""
    state = OPTIMIZERS[optimizer.kind].state
    return {f.name: Initialiser("constant", getattr(optimizer, f.initial)) for f in state if f.initial is not None}


def _record(kind: str) -> RowOptimizer:
    for name, record in OPTIMIZERS.items():
        if name == kind:
            return record
    raise ArgumentError(f"unknown optimizer {kind!r}; use one of {sorted(OPTIMIZERS)}")


_DISTRIBUTIONS = {"constant": 0, "uniform": 1, "normal": 2}  # the enum of kernels/initial.cu


@dataclass(frozen=True, slots=True)
class Initialiser:
    """Distribution of initial values. `constant`: the value a; `uniform`: from a to b; `normal`: mean a, standard
    deviation b."""

    kind: Literal["constant", "uniform", "normal"]
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _DISTRIBUTIONS or not np.isfinite([self.a, self.b]).all():
            raise ArgumentError(f"an initialiser is constant, uniform or normal with finite numbers, got {self}")
        if (self.kind == "uniform" and self.a > self.b) or (self.kind == "normal" and self.b < 0):
            raise ArgumentError(f"uniform wants a <= b, and normal a standard deviation b >= 0, got {self}")


def initial_salt(seed: int, table: int) -> int:
    """Return the 64-bit hash of (seed, table), computed as in the kernels."""
    return mix64(mix64(seed) + table * 0x9E3779B97F4A7C15)


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
    """Write initial values into `columns` of the row of each key: row i, or row ``positions[i]``, for ``keys[i]``."""
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
        kind=_DISTRIBUTIONS[initialiser.kind],
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
    """Write initial rows, field by field. A field without an initialiser gets zero bits."""
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
