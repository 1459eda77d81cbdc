"""The devices of a node: CUDA GPUs through CuPy, or stand-ins that run the same kernels on the compute pool.

In: the choice `auto`, `cpu` or `cuda` (setting, or the environment variable DASKPS_BACKEND), a number of devices, the
node's compute pool. Out: `Device` values that hold arrays and launch kernels by name. Everything else of daskps takes
a device and does not ask what it is.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.backend.pool import ComputePool
from daskps.backend.recycle import LEAST_BYTES, Recycler
from daskps.errors import ArgumentError, BackendError

Array = Any  # numpy.ndarray on the CPU, cupy.ndarray on a GPU
LINE_BYTES = 64
SMALL = 4096  # items below which one share in the calling thread is faster than waking the pool


class Device(Protocol):
    """Where arrays live and kernels run. Two of them: `CpuDevice` here, `CudaDevice` in `daskps.backend.cuda`."""

    index: int
    kind: str
    name: str
    xp: Any

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A new array with any content."""

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A new array of zeros."""

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """The array on this device; on the CPU the array itself."""

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """The array as NumPy's; on the CPU the array itself."""

    def holds(self, array: object) -> bool:
        """Whether `array` is one of this device's arrays."""

    def pointer(self, array: Array) -> int:
        """The address of its first byte, for descriptors."""

    def launch(self, kernel: str, items: int, *, tiles: bool = False, dim: int | None = None, **values: Any) -> None:
        """Run a KERNEL over `items`; `tiles`: each item takes a tile of lanes; `dim`: the dimension to compile for."""

    def active(self) -> AbstractContextManager[object]:
        """A context in which the array module `xp` makes and computes arrays here."""

    def synchronize(self) -> None:
        """Wait for what was launched."""

    def wait_for(self, others: Sequence[Device]) -> None:
        """Let later launches here wait for earlier ones on the others."""

    def enable_peers(self, others: Sequence[Device]) -> None:
        """Let kernels of this device reach the memory of the others."""


MEMORY = Recycler()  # of all stand-ins of this process


def _lend(size_bytes: int) -> Array:
    return MEMORY.lend(size_bytes) if size_bytes >= LEAST_BYTES else _aligned(np.empty, size_bytes)


def _aligned(make: Callable[..., Array], size_bytes: int) -> Array:
    """Bytes from the start of a cache line; NumPy's own begin 16 behind one, and rows of 64 bytes lie in two."""
    memory = make(size_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + size_bytes]


def _array(make: Callable[[int], Array], shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    kind: np.dtype[Any] = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    return make(math.prod(shape) * kind.itemsize).view(kind).reshape(shape)


class CpuDevice:
    """A stand-in: NumPy arrays, kernels on the node's compute pool, done when `launch` returns."""

    kind = "cpu"
    xp: Any = np

    def __init__(self, index: int, pool: ComputePool) -> None:
        self.index = index
        self.name = f"cpu:{index}"
        self.pool = pool

    def __repr__(self) -> str:
        return f"<{self.name} with {self.pool.cores} threads>"

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return _array(_lend, shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return _array(functools.partial(_aligned, np.zeros), shape, dtype)

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        return array

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        return np.asarray(array)

    def holds(self, array: object) -> bool:
        return isinstance(array, np.ndarray)

    def pointer(self, array: Array) -> int:
        return int(array.ctypes.data)

    def shares(self, items: int) -> int:
        """How many shares `items` are worth."""
        return 1 if items < SMALL else self.pool.cores

    def launch(self, kernel: str, items: int, *, tiles: bool = False, dim: int | None = None, **values: Any) -> None:
        if dim is not None:
            values["dim"] = dim
        self.pool.launch(getattr(library(), kernel), self.shares(items), **values)

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        pass

    def wait_for(self, others: Sequence[Device]) -> None:
        pass

    def enable_peers(self, others: Sequence[Device]) -> None:
        pass


def chosen_backend(backend: str | None = None) -> str:
    """`cpu` or `cuda`: the argument; if that is `auto`, DASKPS_BACKEND; else cuda where a GPU can be used."""
    asked = backend if backend not in {None, "auto"} else os.environ.get("DASKPS_BACKEND") or "auto"
    if asked not in {"auto", "cpu", "cuda"}:
        raise ArgumentError(f"unknown backend {asked!r}; use auto, cpu or cuda (setting, or DASKPS_BACKEND)")
    if asked == "cpu":
        return "cpu"
    from daskps.backend import cuda

    problem = cuda.problem()
    if problem is None:
        return "cuda"
    if asked == "cuda":
        raise BackendError(
            f"the backend cuda was asked for, but {problem}; install daskps with the extra cuda12 or cuda13 on a "
            "machine with an NVIDIA GPU, or choose the backend cpu"
        )
    return "cpu"


def devices(backend: str | None = None, count: int | None = None, *, pool: ComputePool) -> list[Device]:
    """The node's devices: `count` of them, by default every GPU that is visible, or one stand-in."""
    if count is not None and count < 1:
        raise ArgumentError(f"a node needs at least one device, got {count}")
    if chosen_backend(backend) == "cpu":
        return [CpuDevice(index, pool) for index in range(count or 1)]
    from daskps.backend import cuda

    found = cuda.device_count()
    if count is not None and count > found:
        raise BackendError(f"{count} CUDA devices were asked for, {found} are visible; see CUDA_VISIBLE_DEVICES")
    return [cuda.CudaDevice(index) for index in range(count or found)]
