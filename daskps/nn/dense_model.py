"""DenseModel: the interface of the dense part of a model. The trainer, snapshots and predictions know no more of it.

In: pooled slots of each table and dense features, of all examples of a step or of the part that one node or device has.
Out: logits; gradients of the pooled slots, as sums that are not divided by the weight; and the part's sums of the
parameters' gradients, of the loss and of the weight, in 64-bit fixed point. `merge` adds the sums of all parts, then
`DenseModel.apply` updates the parameters. Example weights are relative to the largest weight of their step
(`weight_scale`), so they may be in any unit.

`daskps.nn.network.DenseNetwork` is the built-in implementation. Every implementation passes
tests/contracts/test_dense_models.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from daskps.device.device import Device
from daskps.errors import NonFiniteError

# Units of the sums, as in kernels/dense.cuh.
GRADIENT_ONE = 1 << 36  # fixed point: the integer that stands for 1.0 in sums of gradients
EXAMPLE_ONE = 1 << 30  # fixed point: the integer that stands for 1.0 in sums of losses and of weights


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one part of a step. All arrays are on `device`; reading one waits for the device."""

    device: Device
    logits: Any  # (n,) float32
    probabilities: Any  # (n,) float32
    gradients: Sequence[Any]  # (n, S * D) float32 per table: gradient by pooled slots of the weighted loss, a sum
    sums: Any  # (P + 2,) int64, of the part: gradient of each parameter, then the loss, then the weight
    status: Any  # int32; any value but 0: a loss or gradient is not finite or too large, and no other array counts
    explain: Callable[[], str]  # names the cause of a status; call it before the model's next step

    @property
    def loss(self) -> Any:
        """Weighted loss, summed over the examples: (1,) int64 in units of 1 / EXAMPLE_ONE."""
        return self.sums[-2:-1]

    @property
    def weight(self) -> Any:
        """Total weight of the examples, divided by the step's scale: (1,) int64 in units of 1 / EXAMPLE_ONE."""
        return self.sums[-1:]

    def check(self) -> None:
        """Read the status and raise NonFiniteError, which names the cause, if it is set."""
        if self.device.to_host(self.status).any():
            raise NonFiniteError(self.explain())


class DenseModel(Protocol):
    """One replica of the dense part of a model: parameters, optimizer, step count.

    A step of M devices, each with one replica and with its part of the examples::

        results = [model.step(pooled=..., labels=..., first_block=...) for model in models]
        for result in results:
            result.check()  # when it is read is the caller's choice
        sums = merge([device.to_host(result.sums) for device, result in zip(devices, results)])
        for model, device in zip(models, devices):
            model.apply(device.from_host(sums))

    Replicas that apply equal sums must stay bit-identical. A part must begin at a multiple of the block size in its
    step. Then the merged sums must have the same bits for any cut of the step into parts, so that the numbers of
    threads, devices and nodes do not matter. Several threads may call `step` and `predict` at the same time.
    """

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameter arrays by name, on the device."""

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""

    def step(
        self,
        *,
        pooled: Sequence[Any],
        labels: Any,
        dense: Any | None = None,
        example_weights: Any | None = None,
        scale: float = 1.0,
        first_block: int = 0,
        gradients: Sequence[Any] | None = None,
    ) -> StepResult:
        """Compute predictions and gradients of the examples of one part of a step. Parameters do not change.

        `pooled` has one array (n, S * D) per table, `dense` is (n, F), `labels` and `example_weights` are (n,); all
        float32 on the device. `scale` is `weight_scale` of the largest weight of the whole step; all sums and gradients
        use weights divided by it. `first_block` is the number of blocks of the step before this part. If `gradients` is
        given, the gradients of the pooled slots are written there. It may be `pooled` itself, which saves memory and
        the time to map it.
        """

    def apply(self, sums: Any) -> None:
        """Do one optimizer step with the merged sums of a whole step. If the step's weight is 0, nothing changes."""

    def predict(self, *, pooled: Sequence[Any], dense: Any | None = None) -> Any:
        """Return the logits (n,), with the bits that `step` gives."""

    def probabilities(self, logits: Any) -> Any:
        """Return the probabilities (n,) of logits, with the bits that `step` gives."""

    def export(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return parameters, optimizer state and step count as NumPy arrays by name, for a snapshot."""

    def load(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Replace parameters, optimizer state and step count by arrays of `export`.

        Raises ConfigError if they are not those of this model and optimizer.
        """

    def pack(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the parameters and the optimizer's state as one array on the host, to compute means of nodes."""

    def unpack(self, packed: np.ndarray[Any, np.dtype[np.float32]], steps: int) -> None:
        """Replace parameters and optimizer state by an array of `pack`, or a mean of several; set the step count."""

    def size_bytes(self, cores: int) -> int:
        """Return an upper bound of the bytes in use on the device, for budgets, if `cores` threads work on a step."""


def merge(parts: Sequence[Any]) -> Any:
    """Return the sums of a step, given the sums of its parts; the order of the parts does not change the bits."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def step_weight(sums: Any) -> float:
    """Return the total weight of a step, divided by its scale. Sums over examples divided by it are means."""
    return int(sums[-1]) / EXAMPLE_ONE


def weight_scale(largest: float) -> float:
    """Return the scale of a step: the smallest power of two that is at least its largest weight, or 1 if that is 0.

    Weights divided by it are at most 1, so sums have the same precision for any unit of the weights. The scale cancels
    out when sums are divided by the step's weight.
    """
    mantissa, exponent = math.frexp(largest)
    return math.ldexp(1.0, exponent - (mantissa == 0.5)) if largest > 0 else 1.0
