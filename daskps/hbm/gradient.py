"""Gradient sums of touched rows in fixed point, which is associative, and the optimizer's update of the rows.

Input: gradients of the pooled outputs on each device, and the occurrences of each shard grouped by row. Output: updated
rows. A single node calls `update_rows`. Several nodes call `sum_gradients`, exchange the sums, and call `add_sums` and
`apply_sums`; the bits of the result are the same. Kernels record errors in a `Status`; its `check` raises them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.device.device import Array, CpuDevice, Device, check_array
from daskps.errors import ArgumentError, NonFiniteError
from daskps.hbm.optimizer import Optimizer, optimizer_fields
from daskps.hbm.pooling import Groups, check_dim

GRADIENT_LIMIT = 32768.0  # a gradient of this magnitude or more is an error
_PROBLEMS = {
    1: f"a gradient was NaN, infinite or at least {GRADIENT_LIMIT:.0f} in magnitude",
    2: "the sum of a row's gradients passed 33,554,432 in magnitude",
    4: "an embedding became NaN or infinite",
}


class Status:
    """Error word on a device: kernels set a bit per kind of error, and `check` reads it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.word = device.zeros(1, np.int32)

    def check(self) -> None:
        """Raise NonFiniteError if a kernel has set an error bit since the last check."""
        bits = int(self.device.to_host(self.word)[0])
        if bits:
            with self.device.active():
                self.word.fill(0)
            problems = "; ".join(text for bit, text in _PROBLEMS.items() if bits & bit)
            raise NonFiniteError(
                f"{problems} (on {self.device.name}); lower the learning rate, set clip_norm, or look for bad input"
            )


@dataclass(frozen=True, slots=True)
class Sources:
    """Gradients of the pooled outputs, one array on each device that computed examples of the step."""

    gradients: tuple[Array, ...]  # per device (examples of the device, stride) float32
    slots: int
    dim: int
    column: int  # where the first slot's gradient begins in a line of `gradients`
    stride: int  # columns of `gradients`
    bags: int  # of all devices
    descriptors: dict[str, Array]  # by device name: (devices, 2) uint64


def join_sources(
    devices: Sequence[Device], gradients: Sequence[Array], *, slots: int, dim: int, column: int = 0
) -> Sources:
    """Join gradients (examples, stride), one per device in the order of the step's examples, and put descriptors of
    them on every device."""
    if not gradients or len(devices) != len(gradients):
        raise ArgumentError(f"join_sources: wants one gradient per device, got {len(gradients)} for {len(devices)}")
    stride = int(gradients[0].shape[1])
    if column < 0 or column + slots * dim > stride:
        raise ArgumentError(
            f"join_sources: {slots} slots of {dim} columns from {column} on do not fit {stride} columns"
        )
    table = np.zeros((len(devices), 2), np.uint64)
    bags = 0
    for m, (device, gradient) in enumerate(zip(devices, gradients, strict=True)):
        check_array("join_sources", "gradients", gradient, device, np.float32, (None, stride))
        table[m] = device.pointer(gradient), bags
        bags += len(gradient) * slots
    descriptors = {device.name: device.from_host(table) for device in devices}
    return Sources(tuple(gradients), slots, dim, column, stride, bags, descriptors)


def update_rows(
    device: Device,
    *,
    groups: Groups,
    sources: Sources,
    optimizer: Optimizer,
    weight: float,
    rows: Array,
    status: Status,
) -> None:
    """Sum the gradients of every touched row of this device's shard, divide them by the step's weight, and apply the
    optimizer (which clips) to the rows."""
    if not isinstance(device, CpuDevice):
        sums = sum_gradients(device, groups=groups, sources=sources, status=status)
        apply_sums(
            device, touched=groups.touched, sums=sums, optimizer=optimizer, weight=weight, rows=rows, status=status
        )
        return
    _check_rows("update_rows", device, optimizer, weight, sources.dim, rows)
    device.launch(
        "gradient_update",
        len(groups.bags),
        **_gradient_values(device, groups, sources),
        optimizer=optimizer.kernel_struct(weight),
        touched=groups.touched,
        dim=sources.dim,
        width=rows.shape[1],
        rows=rows,
        status=status.word,
    )


def sum_gradients(
    device: Device, *, groups: Groups, sources: Sources, status: Status, out: Array | None = None
) -> Array:
    """Return the gradient sums (T, dim) of the touched rows, int64 in units of 2^-36."""
    shape = (len(groups.touched), sources.dim)
    if out is None:
        out = device.empty(shape, np.int64)
    check_array("sum_gradients", "out", out, device, np.int64, shape)
    if not isinstance(device, CpuDevice):
        with device.active():  # otherwise the memset runs on another GPU's stream, and nothing here waits for it
            out.fill(0)  # the kernel adds with atomics on a GPU
    device.launch(
        "gradient_sum",
        len(groups.bags),
        tiles=True,
        **_gradient_values(device, groups, sources),
        dim=sources.dim,
        sums=out,
        status=status.word,
    )
    return out


def add_sums(device: Device, *, sums: Array, positions: Array, received: Array, status: Status) -> None:
    """Add ``received[i]`` to ``sums[positions[i]]``. A position may occur at most once per call."""
    check_array("add_sums", "sums", sums, device, np.int64, (None, None))
    check_array("add_sums", "positions", positions, device, np.int32, (None,))
    check_array("add_sums", "received", received, device, np.int64, (len(positions), sums.shape[1]))
    device.launch(
        "gradient_add",
        len(positions),
        tiles=True,
        received=received,
        positions=positions,
        n=len(positions),
        dim=sums.shape[1],
        sums=sums,
        status=status.word,
    )


def apply_sums(
    device: Device, *, touched: Array, sums: Array, optimizer: Optimizer, weight: float, rows: Array, status: Status
) -> None:
    """Divide sums (T, dim) by the step's weight and apply the optimizer to rows `touched` of this device's shard."""
    check_array("apply_sums", "touched", touched, device, np.int32, (None,))
    check_array("apply_sums", "sums", sums, device, np.int64, (len(touched), None))
    dim = int(sums.shape[1])
    _check_rows("apply_sums", device, optimizer, weight, dim, rows)
    device.launch(
        "gradient_apply",
        len(touched),
        tiles=True,
        sums=sums,
        touched=touched,
        touched_count=len(touched),
        optimizer=optimizer.kernel_struct(weight),
        dim=dim,
        width=rows.shape[1],
        rows=rows,
        status=status.word,
    )


def _gradient_values(device: Device, groups: Groups, sources: Sources) -> dict[str, Any]:
    if groups.slots != sources.slots:
        raise ArgumentError(f"the groups were made for {groups.slots} slots, the gradients have {sources.slots}")
    return {
        "sources": sources.descriptors[device.name],
        "source_count": len(sources.gradients),
        "slots": sources.slots,
        "stride": sources.stride,
        "column": sources.column,
        "touched_count": len(groups.touched),
        "starts": groups.starts,
        "bags": groups.bags,
        "coefficients": groups.coefficients,
    }


def _check_rows(call: str, device: Device, optimizer: Optimizer, weight: float, dim: int, rows: Array) -> None:
    check_array(call, "rows", rows, device, np.float32, (None, None))
    check_dim(call, dim, rows.shape[1])
    wanted = sum(field.width for field in optimizer_fields(optimizer.kind, dim))
    if rows.shape[1] < wanted:
        raise ArgumentError(
            f"{call}: {optimizer.kind} on {dim} dimensions wants rows of at least {wanted} values, got "
            f"{rows.shape[1]}; lay rows out with optimizer_fields"
        )
    if not 0 < weight < math.inf:
        raise ArgumentError(f"{call}: the step's weight must be positive and finite, got {weight}")
