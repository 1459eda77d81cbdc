"""An asyncio event loop in one thread whose time is only a number: every run with one seed is the same run.

Callbacks run in the order they were scheduled; when nothing is ready, time jumps to the next timer. Randomness comes
from those who use it (network, disk, work), never from the machine. What a callback raises ends the run.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any


class DeadlockError(Exception):
    """The run cannot continue: nothing is ready, no timer is set, and the main task is not done."""


class Call:
    """A callback that will run, unless it is cancelled. Half of a schedule's time goes through here, so it is little:
    asyncio's own handles also keep contexts, which nobody uses here."""

    __slots__ = ("args", "callback")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.callback, self.args = callback, args

    def cancel(self) -> None:
        self.callback, self.args = _nothing, ()


def _nothing() -> None:
    pass


class SimLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that futures, tasks, events and timeouts need."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[Call] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        self._count = itertools.count()
        self.unhandled: list[dict[str, Any]] = []

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Call:
        call = Call(callback, args)
        self._ready.append(call)
        return call

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Call:
        call = Call(callback, args)
        heapq.heappush(self._timers, (when, next(self._count), call))
        return call

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Call:
        return self.call_at(self._now + delay, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **options)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled.append(context)

    def run(self, main: Coroutine[Any, Any, Any], limit_seconds: float = 1e6) -> Any:
        """Run `main` to its end, then all that is ready."""
        asyncio._set_running_loop(self)
        ready = self._ready
        try:
            task = self.create_task(main)
            while not task.done():
                if not ready:
                    self._jump(limit_seconds)
                call = ready.popleft()
                call.callback(*call.args)
            while ready:
                call = ready.popleft()
                call.callback(*call.args)
            return task.result()
        finally:
            asyncio._set_running_loop(None)

    def _jump(self, limit_seconds: float) -> None:
        while self._timers:
            when, _, call = heapq.heappop(self._timers)
            if call.callback is not _nothing:
                if when > limit_seconds:
                    break
                self._now = max(self._now, when)
                self._ready.append(call)
                return
        raise DeadlockError(f"nothing can happen any more after {self._now:g} s")


def set_once(future: asyncio.Future[Any], result: Any) -> None:
    """Set the result of a future, unless it is done or cancelled."""
    if not future.done():
        future.set_result(result)


def sleep(seconds: float) -> asyncio.Future[None]:
    """Return an awaitable like `asyncio.sleep` at half its cost; a schedule sleeps more than a thousand times."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_later(seconds, set_once, future, None)
    return future
