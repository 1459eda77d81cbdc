"""Optimizers of the dense parameters: SGD, Adagrad, Adam, with L2 on weights and clipping by the norm of all gradients.

In: the step's sums in fixed point, merged over blocks, devices and nodes. Out: parameters and state changed in place,
by the same kernels on CPU and GPU, so replicas that apply equal sums stay equal bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from daskps.errors import ConfigError
from daskps.model.engine import Engine

# kernels/dense.cuh: units of gradient sums and of sums over examples, and parameters to one partial sum of squares
GRADIENT_ONE = 1 << 36
EXAMPLE_ONE = 1 << 30
CHUNK = 1024
SPREAD_FROM = 1 << 18  # parameters; below it one thread is done before others are awake (60 us)

_STATE = {"sgd": (), "adagrad": ("accumulator",), "adam": ("first_moment", "second_moment")}


@dataclass(frozen=True, slots=True)
class DenseOptimizer:
    """Settings of one kind; those that the kind does not use are ignored."""

    kind: Literal["sgd", "adagrad", "adam"] = "adagrad"
    learning_rate: float = 0.01
    l2: float = 0.0  # gradient of weights += l2 * weight; biases are left alone
    clip_norm: float | None = None  # the largest norm of the mean gradient over all dense parameters
    epsilon: float = 1e-8
    initial_accumulator: float = 0.0  # Adagrad
    beta1: float = 0.9  # Adam
    beta2: float = 0.999  # Adam

    def __post_init__(self) -> None:
        if self.kind not in _STATE:
            raise ConfigError(f"no dense optimizer {self.kind!r}; there are {', '.join(_STATE)}")
        wrong = [
            f"{name}={value}"
            for name, value, fits in (
                ("learning_rate", self.learning_rate, 0 < self.learning_rate < math.inf),
                ("l2", self.l2, 0 <= self.l2 < math.inf),
                ("clip_norm", self.clip_norm, self.clip_norm is None or self.clip_norm > 0),
                ("epsilon", self.epsilon, 0 < self.epsilon < math.inf),
                ("initial_accumulator", self.initial_accumulator, 0 <= self.initial_accumulator < math.inf),
                ("beta1", self.beta1, 0 <= self.beta1 < 1),
                ("beta2", self.beta2, 0 <= self.beta2 < 1),
            )
            if not fits
        ]
        if wrong:
            raise ConfigError(f"dense optimizer {self.kind}: out of range: {', '.join(wrong)}")

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the arrays that this kind keeps beside the parameters, each of their length."""
        return _STATE[self.kind]

    def initial_state(self, engine: Engine, size: int) -> dict[str, Any]:
        """The state before the first step."""
        first = self.initial_accumulator if self.kind == "adagrad" else 0.0
        return {name: engine.xp.full(size, first, dtype=engine.xp.float32) for name in self.state_names}


def _power(base: float, exponent: int) -> float:
    """base ** exponent by products alone: libm's pow may differ in the last bit between machines."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _clip(optimizer: DenseOptimizer, engine: Engine, n: int, common: dict[str, Any], parameters: Any) -> float:
    """What gradients are multiplied by: 1, or less where their norm is above clip_norm."""
    if optimizer.clip_norm is None:
        return 1.0
    squares = engine.xp.empty(-(-n // CHUNK), engine.xp.float64)
    engine.launch("dense_squares", len(squares), parameters=parameters, squares=squares, **common)
    norm = math.sqrt(math.fsum(squares.tolist()))
    return min(1.0, optimizer.clip_norm / norm) if norm else 1.0


def update(
    optimizer: DenseOptimizer,
    engine: Engine,
    *,
    sums: Any,  # (n,) int64
    weight_sum: int,  # of the whole step, in units of 1 / EXAMPLE_ONE, above 0
    decayed: int,  # leading parameters that L2 pulls on
    steps: int,  # updates so far, this one included
    parameters: Any,  # (n,) float32
    state: dict[str, Any],
) -> None:
    """One optimizer step on flat arrays."""
    n = len(parameters)
    scale = EXAMPLE_ONE / (weight_sum * GRADIENT_ONE)
    common = {"sums": sums, "n": n, "scale": scale, "l2": optimizer.l2, "decayed": decayed}
    arguments = {**common, "parameters": parameters, "clip": _clip(optimizer, engine, n, common, parameters), **state}
    if optimizer.kind == "adam":
        arguments |= {
            "step_size": optimizer.learning_rate / (1 - _power(optimizer.beta1, steps)),
            "correction": 1 / math.sqrt(1 - _power(optimizer.beta2, steps)),
            "beta1": optimizer.beta1,
            "rest1": 1 - optimizer.beta1,
            "beta2": optimizer.beta2,
            "rest2": 1 - optimizer.beta2,
            "epsilon": optimizer.epsilon,
        }
    else:
        arguments["learning_rate"] = optimizer.learning_rate
        if optimizer.kind == "adagrad":
            arguments["epsilon"] = optimizer.epsilon
    launch = engine.spread if n >= SPREAD_FROM else engine.launch
    launch(f"dense_{optimizer.kind}", n, **arguments)
