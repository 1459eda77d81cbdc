"""Ctrl-C in two steps: the first asks the run to stop at a batch boundary with a snapshot, the second stops at once.

In: SIGINT and SIGTERM (what a batch system sends). Out: `Interrupt.asked`, for ``train(should_stop=...)``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from daskps.cli.command import INTERRUPTED


class Interrupt:
    """Catches the signals while it is entered."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._asked = False
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        """Somebody wants the run to stop."""
        return self._asked

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            self._say("stopped at once; the last committed snapshot is whole, go on with --resume")
            # Threads are in the middle of native code and Dask would wait for them. Nothing is lost: what was committed
            # is on disk, and worker processes end with this one.
            os._exit(INTERRUPTED)
        self._asked = True
        self._say("stopping after the batches in flight, with a snapshot; press Ctrl-C again to stop at once")
