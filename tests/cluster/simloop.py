"""An asyncio event loop in one thread whose time is only a number: every run with one seed is the same run.

Callbacks run in the order they were scheduled; when nothing is ready, time jumps to the next timer. Randomness comes
from those who use it (network, disk, work), never from the machine.
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
    """Nothing is ready, no timer is set, and the main task is not done."""


class SimLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as futures, tasks, events and timeouts need."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = itertools.count()
        self.unhandled: list[dict[str, Any]] = []

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

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

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled.append(context)

    def run(self, main: Coroutine[Any, Any, Any], limit_seconds: float = 1e6) -> Any:
        """Run `main` to its end, then whatever is ready."""
        asyncio._set_running_loop(self)
        try:
            task = self.create_task(main)
            while not task.done():
                if not self._ready:
                    self._jump(limit_seconds)
                self._ready.popleft()._run()
            while self._ready:
                self._ready.popleft()._run()
            return task.result()
        finally:
            asyncio._set_running_loop(None)

    def _jump(self, limit_seconds: float) -> None:
        while self._timers:
            when, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                if when > limit_seconds:
                    break
                self._now = max(self._now, when)
                self._ready.append(handle)
                return
        raise DeadlockError(f"nothing can happen any more after {self._now:g} s")
