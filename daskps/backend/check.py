"""Checks of the arrays that wrappers are given: dtype, shape, contiguity and device, with words that help."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.backend.device import Device
from daskps.errors import ArgumentError


def check_array(
    call: str, name: str, array: Any, device: Device, dtype: npt.DTypeLike, shape: tuple[int | None, ...]
) -> None:
    """Raise unless `array` is C-contiguous on `device` with this dtype and shape; None stands for any length."""
    wanted = f"{call}: {name} wants a C-contiguous {np.dtype(dtype)} array {_shape(shape)} on {device.name}"
    if not device.holds(array):
        where = getattr(array, "device", None)
        place = f" on device {where}" if where is not None and not isinstance(array, np.ndarray) else ""
        raise ArgumentError(f"{wanted}, got {type(array).__name__}{place}; bring it there with device.from_host")
    if array.dtype != np.dtype(dtype):
        raise ArgumentError(f"{wanted}, got dtype {array.dtype}; convert it with .astype({np.dtype(dtype)})")
    if len(array.shape) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, array.shape, strict=True)
    ):
        raise ArgumentError(f"{wanted}, got shape {array.shape}; pass the array that belongs to the others")
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{wanted}, got strides {array.strides}; make it contiguous with ascontiguousarray")


def check_int32_count(call: str, name: str, count: int) -> None:
    """Numbers of rows and occurrences travel as int32."""
    if count >= 2**31 - 1:
        raise ArgumentError(
            f"{call}: {count:,} {name} are too many for one call (2^31 - 2 at most); use smaller batches"
        )


def _shape(shape: tuple[int | None, ...]) -> str:
    return (
        "("
        + ", ".join("n" if length is None else str(length) for length in shape)
        + ("," if len(shape) == 1 else "")
        + ")"
    )
