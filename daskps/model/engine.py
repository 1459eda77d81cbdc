"""Where a network computes: the array module, how a kernel is launched, how blocks of examples are shared out.

In: a compute pool, or the same three callables for a GPU. Out: an `Engine`. The network itself is written once against
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


@dataclass(frozen=True, slots=True)
class Engine:
    """One device, as the network sees it."""

    xp: Any  # numpy, or cupy
    launch: Launch  # in the calling thread (CPU), or on the current stream (GPU)
    spread: Launch  # over all cores of the node (CPU); must not be called inside of `shares`
    shares: Callable[[Callable[[int, int], Any]], list[Any]]  # call(share_index, share_count) once per core, results
    immediate: bool  # a kernel has ended when its launch returns, so looking at its result costs nothing


def cpu(pool: ComputePool) -> Engine:
    """The engine of NumPy arrays, with the threads of `pool`."""
    functions = library().functions

    def launch(name: str, items: int, **arguments: Any) -> None:
        functions[name](**arguments)

    def spread(name: str, items: int, **arguments: Any) -> None:
        pool.launch(functions[name], **arguments)

    return Engine(xp=np, launch=launch, spread=spread, shares=pool.shares, immediate=True)
