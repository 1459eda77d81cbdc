"""Optimizers of the dense parameters: SGD, Adagrad, Adam; first clipping by the norm of all gradients, then L2.

OPTIMIZERS.md in this folder has all formulas, also those of rows.

In: the step's sums in fixed point, merged over blocks, devices and nodes. Out: parameters and state, changed in place
by the same kernels on CPU and GPU. So replicas that apply equal sums stay bit-identical.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from daskps.device.device import Device
from daskps.errors import ConfigError
from daskps.nn.dense_model import EXAMPLE_ONE, GRADIENT_ONE

CHUNK = 1024  # parameters per partial sum of squares, as in kernels/dense.cu
SPREAD_FROM = 1 << 18  # parameters; with fewer, one thread is done before other threads wake up (60 us)

DenseOptimizerKind: TypeAlias = Literal["sgd", "adagrad", "adam"]
# The state arrays of each kind, named as in rows; kernel ``dense_<kind>`` of kernels/dense.cu takes them.
DENSE_OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("accumulator",),
    "adam": ("momentum", "variance"),
}


@dataclass(frozen=True, slots=True)
class DenseOptimizer:
    """Settings of a dense optimizer. Settings that its kind does not use are ignored."""

    kind: DenseOptimizerKind = "adagrad"
    learning_rate: float = 0.01
    l2: float = 0.0  # gradient of a weight, after clipping, += l2 * weight; not for biases
    clip_norm: float | None = None  # bound of the norm of the mean gradient of all dense parameters, before L2
    epsilon: float = 1e-8
    initial_accumulator: float = 0.0  # Adagrad
    beta1: float = 0.9  # Adam
    beta2: float = 0.999  # Adam

    def __post_init__(self) -> None:
        if self.kind not in DENSE_OPTIMIZERS:
            raise ConfigError(f"no dense optimizer {self.kind!r}; there are {', '.join(DENSE_OPTIMIZERS)}")
        wrong = [
            f"{name}={value}"
            for name, value, fits in (
                ("learning_rate", self.learning_rate, 0 < self.learning_rate < math.inf),
                ("l2", self.l2, 0 <= self.l2 < math.inf),
                ("clip_norm", self.clip_norm, self.clip_norm is None or self.clip_norm > 0),
                ("epsilon", self.epsilon, 0 <= self.epsilon < math.inf and (self.epsilon or self._accumulates)),
                ("initial_accumulator", self.initial_accumulator, 0 <= self.initial_accumulator < math.inf),
                ("beta1", self.beta1, 0 <= self.beta1 < 1),
                ("beta2", self.beta2, 0 <= self.beta2 < 1),
            )
            if not fits
        ]
        if wrong:
            raise ConfigError(f"dense optimizer {self.kind}: out of range: {', '.join(wrong)}")

    @property
    def _accumulates(self) -> bool:
        """Return True if the divisor is above 0 even when epsilon is 0."""
        return self.kind == "adagrad" and self.initial_accumulator > 0

    @property
    def state_names(self) -> tuple[str, ...]:
        """Return the names of the state arrays of this kind; each array has one value per parameter."""
        return DENSE_OPTIMIZERS[self.kind]

    def initial_state(self, device: Device, size: int) -> dict[str, Any]:
        """Return the state arrays before the first step."""
        first = self.initial_accumulator if self.kind == "adagrad" else 0.0
        return {name: device.xp.full(size, first, dtype=device.xp.float32) for name in self.state_names}


def _power(base: float, exponent: int) -> float:
    """Return base ** exponent by multiplications only: libm's pow may differ in the last bit between machines."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _clip(optimizer: DenseOptimizer, device: Device, sums: Any, scale: float) -> float:
    """Return the factor of all gradients: 1, or clip_norm / norm if their norm is above clip_norm."""
    if optimizer.clip_norm is None:
        return 1.0
    squares = device.xp.empty(-(-len(sums) // CHUNK), device.xp.float64)
    device.launch_inline("dense_squares", len(squares), sums=sums, n=len(sums), scale=scale, squares=squares)
    norm = math.sqrt(math.fsum(squares.tolist()))
    return min(1.0, optimizer.clip_norm / norm) if norm else 1.0


def update(
    optimizer: DenseOptimizer,
    device: Device,
    *,
    sums: Any,  # (n,) int64
    weight_sum: int,  # of the whole step, in units of 1 / EXAMPLE_ONE; must be above 0
    decayed: int,  # number of leading parameters to which L2 applies
    steps: int,  # optimizer steps including this one
    parameters: Any,  # (n,) float32
    state: dict[str, Any],
) -> None:
    """Do one optimizer step on flat arrays: change `parameters` and `state` in place."""
    n = len(parameters)
    scale = EXAMPLE_ONE / (weight_sum * GRADIENT_ONE)
    arguments = {"sums": sums, "n": n, "scale": scale, "clip": _clip(optimizer, device, sums, scale), **state}
    arguments |= {"l2": optimizer.l2, "decayed": decayed, "parameters": parameters}
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
    launch = device.launch if n >= SPREAD_FROM else device.launch_inline
    launch(f"dense_{optimizer.kind}", n, **arguments)
