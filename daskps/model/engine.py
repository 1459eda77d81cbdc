"""Where a network computes: the array module, how a kernel is launched, how blocks of examples are shared out.

In: a compute pool, or the same callables for a GPU. Out: an `Engine`. The network itself is written once against
it and does not know NumPy from CuPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from daskps.backend.native import library
from daskps.backend.pool import ComputePool


class Launch(Protocol):
    """Runs the kernel `name` over `items` items; the other arguments are the kernel's own."""

    def __call__(self, name: str, items: int, **arguments: Any) -> None: ...


class Bind(Protocol):
    """The same, as a call to be made later and often: its arguments are checked and converted once."""

    def __call__(self, name: str, items: int, **arguments: Any) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True)
class Engine:
    """One device, as the network sees it."""

    xp: Any  # numpy, or cupy
    launch: Launch  # in the calling thread (CPU), or on the current stream (GPU)
    bind: Bind  # a later launch; converting takes 1 us an argument, which a block of 256 examples notices
    spread: Launch  # over all cores of the node (CPU); must not be called inside of `shares`
    shares: Callable[[Callable[[int, int], Any]], list[Any]]  # call(share_index, share_count) once per core, results
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

    return Engine(xp=np, launch=launch, bind=bind, spread=spread, shares=pool.shares, immediate=True)
