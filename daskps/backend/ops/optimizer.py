"""Optimizers on rows: their settings, the fields they keep in a row, and the initial values of these.

In: a kind by name. Out: `Optimizer`, whose fields come first in a row, the embedding before all; kernels/optimizer.cuh
does the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from daskps.backend.ops.initial import Initialiser
from daskps.errors import ArgumentError
from daskps.types import Field

OptimizerKind: TypeAlias = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
KINDS: dict[str, int] = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3, "ftrl": 4}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One step on a row with gradient g: clip g to `clip_norm`, add `l2` times the embedding, then the kind's own rule.

    adagrad and rowwise_adagrad divide by ``sqrt(accumulator) + epsilon``; rowwise keeps one accumulator of the mean
    square. adam counts the steps of each row. ftrl is FTRL-Proximal with `beta`, `l1` and `l2`.
    """

    kind: OptimizerKind
    learning_rate: float
    epsilon: float = 1e-8
    beta1: float = 0.9  # adam
    beta2: float = 0.999  # adam
    beta: float = 1.0  # ftrl
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
        """The kernel's arguments for a step whose gradient sums are divided by `weight`."""
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
    """The first fields of a row: the embedding, then the optimizer's state."""
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
    """The initial values of the state; fields that are not named start at zero."""
    if optimizer.kind in {"adagrad", "rowwise_adagrad", "ftrl"}:
        return {"accumulator": Initialiser("constant", optimizer.initial_accumulator)}
    return {}
