"""The device interface of a network: array module, kernel launches, and NumPy's BLAS limited to one thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import threadpoolctl

from daskps.device.device import CpuDevice, Device
from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.errors import BackendError


@functools.cache
def hold_to_one_thread() -> None:
    """Limit every BLAS loaded in this process to one thread, for the rest of the process.

    Raises BackendError if a BLAS does not obey: then results would depend on the number of cores.
    """
    threadpoolctl.threadpool_limits(limits=1, user_api="blas")
    for info in threadpoolctl.threadpool_info():
        if info["user_api"] == "blas" and info["num_threads"] != 1:
            raise BackendError(
                f"the BLAS {info['filepath']} still uses {info['num_threads']} threads after being held to 1; "
                "results would depend on the number of cores: set OPENBLAS_NUM_THREADS=1 before Python starts"
            )


@functools.cache
def blas_build() -> str:
    """Return name, version and kernels of NumPy's BLAS, such as ``openblas 0.3.31 SkylakeX``.

    Equal strings mean equal bits of matrix products.
    """
    builds = [
        f"{info['internal_api']} {info['version']} {info.get('architecture', '')}".strip()
        for info in threadpoolctl.threadpool_info()
        if info["user_api"] == "blas" and "numpy" in info["filepath"]
    ]
    if builds:
        return " + ".join(sorted(builds))
    # NumPy does not bring its own BLAS: use what it was built with.
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


# launch(name, items, **arguments) runs kernel `name` over `items` items, with the kernel's own arguments.
Launch: TypeAlias = Callable[..., None]
# bind(name, items, **arguments) returns a call that launches the kernel; arguments are checked and converted only once.
Bind: TypeAlias = Callable[..., Callable[[], None]]


@dataclass(frozen=True, slots=True)
class ArrayBackend:
    """The functions of one device that a network needs."""

    xp: Any  # array module: numpy or cupy
    launch: Launch  # runs in the calling thread (CPU) or on the current stream (GPU)
    bind: Bind  # saves 1 us per argument and launch, which matters with blocks of 256 examples
    spread: Launch  # runs on all cores of the node (CPU); must not be called inside `shares`
    shares: Callable[[Callable[[int, int], Any]], list[Any]]  # calls f(share_index, share_count) per core; the results
    active: Callable[[], AbstractContextManager[object]]  # context in which `xp` creates arrays on this device
    to_host: Callable[[Any], Any]  # converts an array to NumPy
    immediate: bool  # True (CPU): a launch returns when the kernel has ended, so its result can be read at no cost


def cpu(pool: ComputePool) -> ArrayBackend:
    """Return an engine for NumPy arrays that runs kernels on the threads of `pool`."""
    functions = library().functions

    def launch(name: str, items: int, **arguments: Any) -> None:
        functions[name](**arguments)

    def bind(name: str, items: int, **arguments: Any) -> Callable[[], None]:
        function = functions[name]
        converted = function.convert(arguments)

        def call(_keep: dict[str, Any] = arguments) -> None:  # keeps the arrays alive: `converted` has only addresses
            function.share(converted, 0, 1)

        return call

    def spread(name: str, items: int, **arguments: Any) -> None:
        pool.launch(functions[name], **arguments)

    return ArrayBackend(
        xp=np,
        launch=launch,
        bind=bind,
        spread=spread,
        shares=pool.shares,
        active=nullcontext,
        to_host=np.asarray,
        immediate=True,
    )


def on(device: Device) -> ArrayBackend:
    """Return the engine of a device; CPU stand-ins of one node share the node's thread pool."""
    if isinstance(device, CpuDevice):
        return cpu(device.pool)

    def bind(name: str, items: int, **arguments: Any) -> Callable[[], None]:
        return functools.partial(device.launch, name, items, **arguments)

    return ArrayBackend(
        xp=device.xp,
        launch=device.launch,
        bind=bind,
        spread=device.launch,
        shares=lambda call: [call(0, 1)],
        active=device.active,
        to_host=device.to_host,
        immediate=False,
    )
