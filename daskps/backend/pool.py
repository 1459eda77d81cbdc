"""The compute pool: the only threads of a node that compute. Stages hand it shares of work and wait outside of it.

In: a call for (share_index, share_count). Out: its results in share order. Nothing that runs in the pool may wait for
anything else, so any number of stages can use one pool of `cores` threads without a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from daskps.backend.native import Function

T = TypeVar("T")
S = TypeVar("S")


class ComputePool:
    """`cores` threads. With one core the work runs in the calling thread."""

    def __init__(self, cores: int) -> None:
        if cores < 1:
            raise ValueError(f"a compute pool needs at least one core, got {cores}")
        self.cores = cores
        self._threads = ThreadPoolExecutor(cores, thread_name_prefix="daskps-compute") if cores > 1 else None

    def map(self, call: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """`call` of every item, in parallel; results in the items' order, the first error raised."""
        if self._threads is None:
            return [call(item) for item in items]
        futures = [self._threads.submit(call, item) for item in items]
        return [future.result() for future in futures]

    def shares(self, call: Callable[[int, int], T]) -> list[T]:
        """``call(share_index, share_count)`` once per core."""
        return self.map(lambda index: call(index, self.cores), range(self.cores))

    def launch(self, function: Function, **values: Any) -> None:
        """Run a KERNEL in one share per core; arguments are checked once."""
        converted = function.convert(values)
        self.shares(lambda index, count: function.share(converted, index, count))

    def close(self) -> None:
        """Stop the threads; later calls raise."""
        if self._threads is not None:
            self._threads.shutdown()

    def __enter__(self) -> ComputePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
