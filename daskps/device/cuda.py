"""CUDA devices through CuPy and cuDF. Only this module imports them, and only when a GPU is used.

Input: kernels of kernels/*.cu by name, CuPy arrays, plain numbers. Output: launches on the device's current stream.
Every scalar is converted to the width that the kernel's source declares: CUDA reports no error for a scalar of the
wrong width, the kernel just computes with wrong values.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from daskps.device.compile import KERNELS, kernel_digest
from daskps.device.device import Array, Device
from daskps.device.native import Argument, Signature, signatures
from daskps.errors import ArgumentError, BackendError

T = TypeVar("T")
THREADS = 256  # threads per block, as in the launch bounds of KERNEL (kernels/dialect.cuh)
LANES = 8  # threads per tile, as in kernels/dialect.cuh
PEER_ACCESS_ALREADY_ENABLED = 704  # a cudaError_t for which CuPy has no name
DIM_CLASSES = (4, 8, 16, 32, 64, 128, 256)  # embedding dimensions that kernels are compiled for, one module each


def problem() -> str | None:
    """Return the reason why CUDA cannot be used on this machine, or None if it can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"the CUDA runtime reports: {error}"
    if not count:
        return "no CUDA device is visible"
    if importlib.util.find_spec("cudf") is None:  # not imported here, because the import takes seconds
        return "cuDF, which finds the distinct keys on a GPU, is not installed"
    return None


def device_count() -> int:
    """Return the number of visible GPUs."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def dim_class(dim: int) -> int:
    """Return the smallest of DIM_CLASSES that is at least `dim`."""
    return next(size for size in DIM_CLASSES if size >= dim)


@functools.cache
def kernel_files() -> dict[str, tuple[str, Signature]]:
    """Return the source file name and the signature of every KERNEL, by kernel name."""
    found = {}
    for path in sorted(KERNELS.glob("*.cu")):
        for signature in signatures(path.read_text()):
            if signature.kind == "KERNEL":
                found[signature.name] = (path.name, signature)
    return found


def options(size: int | None = None, folder: Path = KERNELS) -> tuple[str, ...]:
    """Return NVRTC's options for the kernels of `folder`; `size` is one of DIM_CLASSES, or None for other kernels.

    CuPy's disk cache of compiled kernels is keyed by the options and the text of the .cu file; it does not see included
    headers. The digest of all sources is therefore passed as an option; without it, kernels would keep the arithmetic
    of the old headers after an upgrade.
    """
    # For the same bits as on the CPU: no contraction into fused multiply-add. NVRTC's division and square root are
    # correctly rounded by default.
    always = ("--std=c++17", "-fmad=false", "-lineinfo", f"-I{folder}", f"-DDASKPS_KERNELS={kernel_digest(folder)}")
    return always if size is None else (*always, f"-DDIM={size}")


@functools.cache
def _module(file: str, size: int | None) -> Any:
    import cupy

    return cupy.RawModule(code=(KERNELS / file).read_text(), options=options(size))


@functools.cache
def _function(kernel: str, size: int | None) -> tuple[Any, Signature]:
    file, signature = kernel_files()[kernel]
    return _module(file, size).get_function(kernel), signature


class CudaDevice:
    """One GPU. Launches and copies go to its current CUDA stream."""

    kind = "cuda"
    immediate = False

    def __init__(self, index: int) -> None:
        import cupy

        self.index = index
        self.name = f"cuda:{index}"
        self.xp: Any = cupy
        self._device = cupy.cuda.Device(index)
        self._most_blocks = 32 * int(self._device.attributes["MultiProcessorCount"])
        self._peers: set[int] = {index}

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def empty(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        with self._device:
            return self.xp.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        with self._device:
            return self.xp.zeros(shape, dtype)

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        with self._device:
            return self.xp.asarray(np.ascontiguousarray(array))

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        with self._device:
            return np.asarray(self.xp.asnumpy(array))

    def holds(self, array: object) -> bool:
        return isinstance(array, self.xp.ndarray) and array.device.id == self.index

    def pointer(self, array: Array) -> int:
        return int(array.data.ptr)

    def launch(self, kernel: str, items: int, *, tiles: bool = False, dim: int | None = None, **values: Any) -> None:
        function, signature = _function(kernel, None if dim is None else dim_class(dim))
        if dim is not None:
            values["dim"] = dim
        names = {argument.name for argument in signature.arguments}
        if values.keys() != names:
            raise ArgumentError(
                f"{kernel}: missing arguments {sorted(names - values.keys())}, "
                f"unknown arguments {sorted(values.keys() - names)}"
            )
        converted = tuple(self._convert(kernel, argument, values[argument.name]) for argument in signature.arguments)
        if items:
            blocks = -(-items * (LANES if tiles else 1) // THREADS)
            with self._device:
                function((min(blocks, self._most_blocks),), (THREADS,), converted)

    def launch_inline(self, kernel: str, items: int, **values: Any) -> None:
        self.launch(kernel, items, **values)

    def bind(self, kernel: str, items: int, **values: Any) -> Callable[[], None]:
        return functools.partial(self.launch, kernel, items, **values)

    def run_shares(self, call: Callable[[int, int], T]) -> list[T]:
        return [call(0, 1)]

    def _convert(self, kernel: str, argument: Argument, value: Any) -> Any:
        if not argument.pointer:
            value = argument.by_value(kernel, value)
            return value if argument.dtype.names else argument.dtype.type(value)
        if value is None:
            return np.uint64(0)
        if not self.holds(value):
            raise ArgumentError(f"{kernel}: {argument.name} wants an array on {self.name}, got {type(value).__name__}")
        if argument.type_name != "void" and value.dtype != argument.dtype:
            raise ArgumentError(f"{kernel}: {argument.name} wants dtype {argument.dtype}, got {value.dtype}")
        if not value.flags.c_contiguous:
            raise ArgumentError(f"{kernel}: {argument.name} wants a C-contiguous array, got strides {value.strides}")
        return value

    def active(self) -> AbstractContextManager[object]:
        return self._device  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        self._device.synchronize()

    def wait_for(self, others: Sequence[Device]) -> None:
        """Make this device's stream wait for all work launched on the others so far."""
        for other in others:
            if isinstance(other, CudaDevice) and other.index != self.index:
                with other._device:
                    done = self.xp.cuda.Event(disable_timing=True)
                    done.record()
                with self._device:
                    self.xp.cuda.get_current_stream().wait_event(done)

    def enable_peers(self, others: Sequence[Device]) -> None:
        runtime = self.xp.cuda.runtime
        for other in others:
            if other.index in self._peers:
                continue
            if not runtime.deviceCanAccessPeer(self.index, other.index):
                raise BackendError(
                    f"{self.name} cannot reach the memory of {other.name} (no peer access between them); use one "
                    "device a node, with one worker per GPU, or choose GPUs that are linked"
                )
            with self._device:
                try:
                    runtime.deviceEnablePeerAccess(other.index)
                except runtime.CUDARuntimeError as error:
                    if error.status != PEER_ACCESS_ALREADY_ENABLED:
                        raise
            self._peers.add(other.index)


def distinct_keys(device: Device, keys: Array) -> Array:
    """Return the distinct keys in ascending order: cuDF's hash-based unique, then CuPy's radix sort."""
    import cudf

    with device.active():
        return device.xp.sort(cudf.Series(keys).unique().to_cupy())
