"""Row optimizers: their settings, the state fields that they keep in a row, and the initial values of all fields.

Initial rows depend only on (seed, table, key), so tiers, batches and nodes do not change them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from daskps.device.device import Array, Device, check_array
from daskps.errors import ArgumentError
from daskps.types import Field, RowLayout

_KINDS = {"constant": 0, "uniform": 1, "normal": 2}
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Initialiser:
    """Distribution of initial values. `constant`: the value a; `uniform`: from a to b; `normal`: mean a, standard
    deviation b."""

    kind: Literal["constant", "uniform", "normal"]
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS or not np.isfinite([self.a, self.b]).all():
            raise ArgumentError(f"an initialiser is constant, uniform or normal with finite numbers, got {self}")
        if (self.kind == "uniform" and self.a > self.b) or (self.kind == "normal" and self.b < 0):
            raise ArgumentError(f"uniform wants a <= b, and normal a standard deviation b >= 0, got {self}")


def initial_salt(seed: int, table: int) -> int:
    """Return the 64-bit hash of (seed, table), computed as in the kernels."""
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


def _mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


OptimizerKind: TypeAlias = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
KINDS: dict[str, int] = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3, "ftrl": 4}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Settings of a row optimizer. A step clips the gradient to `clip_norm`, adds `l2` times the embedding, and then
    applies the rule of `kind`.

    daskps/nn/OPTIMIZERS.md has the formulas. adagrad and rowwise_adagrad divide by ``sqrt(accumulator) + epsilon``;
    rowwise_adagrad has one accumulator per row, of the mean square. adam counts the steps of each row separately. ftrl
    is FTRL-Proximal with `beta`, `l1` and `l2`.
    """

    kind: OptimizerKind
    learning_rate: float
    epsilon: float = 1e-8
    beta1: float = 0.9  # adam
    beta2: float = 0.999  # adam
    beta: float = 1e-5  # ftrl
    l1: float = 0.0  # ftrl
    l2: float = 0.0
    clip_norm: float = 0.0  # 0: no clipping
    initial_accumulator: float = 0.0  # adagrad, rowwise_adagrad, ftrl

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"unknown optimizer {self.kind!r}; use one of {sorted(KINDS)}")
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

    def launch_values(self, weight: float) -> dict[str, Any]:
        """Return the kernel's arguments for a step. `weight` is the step's total example weight, by which the gradient
        sums are divided."""
        return {
            "kind": KINDS[self.kind],
            "learning_rate": self.learning_rate,
            "epsilon": self.beta if self.kind == "ftrl" else self.epsilon,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "l1": self.l1,
            "l2": self.l2,
            "clip": self.clip_norm,
            "factor": 2.0**-36 / weight,
        }


def optimizer_fields(kind: OptimizerKind, dim: int) -> tuple[Field, ...]:
    """Return the first fields of a row: the embedding, then the optimizer's state."""
    state: dict[str, tuple[Field, ...]] = {
        "sgd": (),
        "adagrad": (Field("accumulator", dim),),
        "rowwise_adagrad": (Field("accumulator", 1),),
        "adam": (Field("momentum", dim), Field("variance", dim), Field("steps", 1, "uint32")),
        "ftrl": (Field("accumulator", dim), Field("linear", dim)),
    }
    if kind not in state:
        raise ArgumentError(f"unknown optimizer {kind!r}; use one of {sorted(state)}")
    return (Field("embedding", dim), *state[kind])


def state_initialisers(optimizer: Optimizer) -> dict[str, Initialiser]:
    """Return the initialisers of the state fields. Fields without one start at zero."""
    if optimizer.kind in {"adagrad", "rowwise_adagrad", "ftrl"}:
        return {"accumulator": Initialiser("constant", optimizer.initial_accumulator)}
    return {}
