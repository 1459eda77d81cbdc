"""Where a network computes: the array module, how a kernel is launched, how blocks of examples are shared out.

In: a device, or just a compute pool. Out: an `Engine`. The network is written once against it and does not know NumPy
from CuPy. On the CPU, blocks run in parallel and the launches within one stay in its thread; a GPU takes the blocks one
after the other on its current stream, so there a block should be large: `block_examples` up to the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from daskps.backend.device import CpuDevice, Device
from daskps.backend.native import library
from daskps.backend.pool import ComputePool

# launch(name, items, **arguments): runs the kernel `name` over `items` items; the arguments are the kernel's own.
Launch: TypeAlias = Callable[..., None]
# The same as a call to be made later and often: its arguments are checked and converted once.
Bind: TypeAlias = Callable[..., Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Engine:
    """One device, as the network sees it."""

    xp: Any  # numpy, or cupy
    launch: Launch  # in the calling thread (CPU), or on the current stream (GPU)
    bind: Bind  # a later launch; converting takes 1 us an argument, which a block of 256 examples notices
    spread: Launch  # over all cores of the node (CPU); must not be called inside of `shares`
    shares: Callable[[Callable[[int, int], Any]], list[Any]]  # call(share_index, share_count) once per core, results
    active: Callable[[], AbstractContextManager[object]]  # in it, `xp` makes arrays on this device
    to_host: Callable[[Any], Any]  # an array as NumPy's
    immediate: bool  # a kernel has ended when its launch returns, so looking at its result costs nothing


def cpu(pool: ComputePool) -> Engine:
    """The engine of NumPy arrays, with the threads of `pool`."""
    functions = library().functions

    def launch(name: str, items: int, **arguments: Any) -> None:
        functions[name](**arguments)

    def bind(name: str, items: int, **arguments: Any) -> Callable[[], None]:
        function = functions[name]
        converted = function.convert(arguments)

        def call(_keep: dict[str, Any] = arguments) -> None:  # the arrays must outlive their addresses
            function.share(converted, 0, 1)

        return call

    def spread(name: str, items: int, **arguments: Any) -> None:
        pool.launch(functions[name], **arguments)

    return Engine(
        xp=np,
        launch=launch,
        bind=bind,
        spread=spread,
        shares=pool.shares,
        active=nullcontext,
        to_host=np.asarray,
        immediate=True,
    )


def on(device: Device) -> Engine:
    """The engine of a device; stand-ins of one node share its pool."""
    if isinstance(device, CpuDevice):
        return cpu(device.pool)

    def bind(name: str, items: int, **arguments: Any) -> Callable[[], None]:
        return functools.partial(device.launch, name, items, **arguments)

    return Engine(
        xp=device.xp,
        launch=device.launch,
        bind=bind,
        spread=device.launch,
        shares=lambda call: [call(0, 1)],
        active=device.active,
        to_host=device.to_host,
        immediate=False,
    )
