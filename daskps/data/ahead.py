"""Fetching ahead: the next blocks are read and decoded in the background while the last ones are parsed.

In: what is wanted now and what will probably be wanted next. Out: the payloads, in the order asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Generic, TypeVar

Name = TypeVar("Name")
Payload = TypeVar("Payload")


class ReadAhead(Generic[Name, Payload]):
    """At most `depth` payloads wait here. The last one taken is kept: the next range often starts inside it."""

    def __init__(self, fetch: Callable[[Name], Payload], depth: int, threads: int) -> None:
        self._fetch = fetch
        self._depth = depth
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="daskps-fetch")
        self._waiting: dict[Name, Future[Payload]] = {}
        self._last: tuple[Name, Payload] | None = None

    def take(self, wanted: Sequence[Name], next_wanted: Sequence[Name] = ()) -> Iterator[Payload]:
        """The payload of every name in `wanted`; the names in `next_wanted` are begun after them."""
        names = [*wanted, *next_wanted]
        for name in self._waiting.keys() - set(names):
            self._waiting.pop(name).cancel()
        for number, name in enumerate(wanted):
            if self._last is None or self._last[0] != name:
                self._begin(names[number : number + self._depth])
                self._last = (name, self._waiting.pop(name).result())
            yield self._last[1]
        self._begin([name for name in next_wanted[: self._depth] if self._last is None or name != self._last[0]])

    def _begin(self, names: Sequence[Name]) -> None:
        for name in names:
            if name not in self._waiting:
                # The caller's context goes along: a Dask client that is current only there is found by the fetch, too.
                self._waiting[name] = self._threads.submit(copy_context().run, self._fetch, name)

    def close(self) -> None:
        """Stop fetching."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
        self._last = None
