"""Devices of a node: CUDA GPUs through CuPy, or CPU stand-ins that run the same kernels.

Input: the number of devices that a job wants. Output: `Device` objects, checks of the arrays passed to kernels, and
scratch memory that is kept between calls.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from daskps.device.memory import MIN_POOLED_BYTES
from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, BackendError

T = TypeVar("T")
Array = Any  # numpy.ndarray on the CPU, cupy.ndarray on a GPU
LINE_BYTES = 64  # of a cache line
SMALL = 4096  # items: with fewer, one share in the calling thread is faster than waking the pool


class Device(Protocol):
    """Interface of a device, which holds arrays and runs kernels: `CpuDevice` here, `CudaDevice` in device/cuda.py.

    Every implementation passes tests/contracts/test_devices.py. Example::

        keys = device.from_host(np.arange(5, dtype=np.uint64))
        mixed = device.empty(5, np.uint64)
        device.launch("mix_keys", 5, keys=keys, n=5, seed=0, mixed=mixed)  # a KERNEL of kernels/mix.cu
        device.to_host(mixed)
    """

    index: int  # number of the device in its node
    kind: str  # cpu or cuda
    name: str  # such as cuda:0
    xp: Any  # array module: numpy or cupy
    immediate: bool  # True: a kernel has ended when its launch returns, so reading its result costs no wait

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a new array with undefined content."""

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a new array of zeros."""

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Return a copy of the array on this device; a CPU device returns the array itself."""

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """Return a copy of the array as a NumPy array; a CPU device returns the array itself."""

    def holds(self, array: object) -> bool:
        """Return True if `array` is in the memory of this device."""

    def pointer(self, array: Array) -> int:
        """Return the address of the array's first byte, for descriptors that kernels read."""

    def launch(self, kernel: str, items: int, *, tiles: bool = False, dim: int | None = None, **values: Any) -> None:
        """Run a KERNEL over `items` items, on all cores of a CPU. With `tiles`, 8 GPU threads (a tile,
        kernels/dialect.cuh) work on each item. `dim` is the embedding dimension: a GPU runs a kernel compiled for it.
        """

    def launch_inline(self, kernel: str, items: int, **values: Any) -> None:
        """Run a KERNEL as `launch` does, but on a CPU only in the calling thread: for a call of `run_shares`."""

    def bind(self, kernel: str, items: int, **values: Any) -> Callable[[], None]:
        """Return a function that does `launch_inline` with these arguments. On a CPU they are checked and converted
        only once, which saves 1 us per argument and launch."""

    def run_shares(self, call: Callable[[int, int], T]) -> list[T]:
        """Call ``call(share_index, share_count)`` once per core of a CPU, in parallel, or once in all for a GPU; return
        the results."""

    def active(self) -> AbstractContextManager[object]:
        """Return a context in which the array module `xp` creates and computes arrays on this device."""

    def synchronize(self) -> None:
        """Wait until all launched work is done."""

    def wait_for(self, others: Sequence[Device]) -> None:
        """Make later launches on this device wait for earlier launches on the others. The caller does not wait.

        Needed before a kernel of this device reads what another device writes. Also needed before memory of this device
        is freed while another device reads it, because later work on this device uses that memory again.
        """

    def enable_peers(self, others: Sequence[Device]) -> None:
        """Let kernels of this device access the memory of the others (CUDA peer access)."""


def _aligned(make: Callable[..., Array], size_bytes: int) -> Array:
    """Return bytes aligned to a cache line. NumPy's own arrays start 16 bytes after one, so that each row of 64 bytes
    would span two lines."""
    memory = make(size_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + size_bytes]


def _array(make: Callable[[int], Array], shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    kind: np.dtype[Any] = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    return make(math.prod(shape) * kind.itemsize).view(kind).reshape(shape)


class CpuDevice:
    """CPU stand-in for a GPU: NumPy arrays from the node's buffer pool, and kernels on its compute pool. `launch`
    returns when the kernel is done."""

    kind = "cpu"
    xp: Any = np
    immediate = True

    def __init__(self, index: int, pool: ComputePool) -> None:
        self.index = index
        self.name = f"cpu:{index}"
        self.pool = pool

    def __repr__(self) -> str:
        return f"<{self.name} with {self.pool.cores} threads>"

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return _array(self._allocate, shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        return _array(functools.partial(_aligned, np.zeros), shape, dtype)

    def _allocate(self, size_bytes: int) -> Array:
        return (
            self.pool.buffers.allocate(size_bytes) if size_bytes >= MIN_POOLED_BYTES else _aligned(np.empty, size_bytes)
        )

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        return array

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        return np.asarray(array)

    def holds(self, array: object) -> bool:
        return isinstance(array, np.ndarray)

    def pointer(self, array: Array) -> int:
        return int(array.ctypes.data)

    def share_count(self, items: int) -> int:
        """Return the number of shares to run `items` items in: 1 if they are few, else one per core."""
        return 1 if items < SMALL else self.pool.cores

    def launch(self, kernel: str, items: int, *, tiles: bool = False, dim: int | None = None, **values: Any) -> None:
        if dim is not None:
            values["dim"] = dim
        self.pool.launch(getattr(library(), kernel), self.share_count(items), **values)

    def launch_inline(self, kernel: str, items: int, **values: Any) -> None:
        library().functions[kernel](**values)

    def bind(self, kernel: str, items: int, **values: Any) -> Callable[[], None]:
        function = library().functions[kernel]
        converted = function.convert(values)

        def call(_keep: dict[str, Any] = values) -> None:  # keeps the arrays alive: `converted` has only addresses
            function.share(converted, 0, 1)

        return call

    def run_shares(self, call: Callable[[int, int], T]) -> list[T]:
        return self.pool.shares(call)

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        pass

    def wait_for(self, others: Sequence[Device]) -> None:
        pass

    def enable_peers(self, others: Sequence[Device]) -> None:
        pass


def chosen_backend(backend: str | None = None) -> str:
    """Return `cpu` or `cuda`. The argument decides; if it is None or `auto`, the environment variable DASKPS_BACKEND;
    if that is `auto` or unset, `cuda` where a GPU can be used and `cpu` elsewhere."""
    asked = backend if backend not in {None, "auto"} else os.environ.get("DASKPS_BACKEND") or "auto"
    if asked not in {"auto", "cpu", "cuda"}:
        raise ArgumentError(f"unknown backend {asked!r}; use auto, cpu or cuda (setting, or DASKPS_BACKEND)")
    if asked == "cpu":
        return "cpu"
    from daskps.device import cuda

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
    """Return the node's devices: `count` of them; by default every visible GPU, or one CPU device."""
    if count is not None and count < 1:
        raise ArgumentError(f"a node needs at least one device, got {count}")
    if chosen_backend(backend) == "cpu":
        return [CpuDevice(index, pool) for index in range(count or 1)]
    from daskps.device import cuda

    found = cuda.device_count()
    if count is not None and count > found:
        raise BackendError(f"{count} CUDA devices were asked for, {found} are visible; see CUDA_VISIBLE_DEVICES")
    return [cuda.CudaDevice(index) for index in range(count or found)]


def check_array(
    call: str, name: str, array: Any, device: Device, dtype: npt.DTypeLike, shape: tuple[int | None, ...]
) -> None:
    """Raise ArgumentError unless `array` is C-contiguous, on `device`, and has this dtype and shape. None in the shape
    allows any length."""
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
        raise ArgumentError(f"{wanted}, got shape {array.shape}; pass the array that belongs to the other arguments")
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{wanted}, got strides {array.strides}; make it contiguous with ascontiguousarray")


def check_int32_count(call: str, name: str, count: int) -> None:
    """Raise ArgumentError if `count` is too large for int32, the type of row and occurrence numbers in kernels."""
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


class Workspace:
    """Named scratch buffers of one device, reused between calls. Each grows to the largest size that was taken."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._buffers: dict[str, Array] = {}

    def take(self, name: str, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an array with undefined content. The array taken before under the same name is no longer valid."""
        kind: np.dtype[Any] = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        size_bytes = math.prod(shape) * kind.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size_bytes:
            self._buffers[name] = buffer = self.device.empty(size_bytes + size_bytes // 4 + 64, np.uint8)
        return buffer[:size_bytes].view(kind).reshape(shape)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return sum(int(buffer.size) for buffer in self._buffers.values())
