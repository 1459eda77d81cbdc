"""When to compact, and the thread that does it behind the trainer's back.

In: a store's counts, through two calls. Out: steps, each of which moves the live rows of one file and lets the file go.

The arithmetic (FORMAT.md, "Compaction"): files that no snapshot needs hold at most HARD x the live rows. Over SOFT, the
background thread takes files more than half stale; at HARD, whoever appends must compact first, the stalest file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SOFT = 1.6
HARD = 1.9
HALF = 0.5
# The thread rests as long as a step took, times this: compaction takes at most half the disk while nobody waits for it.
REST = 1.0


class Compactor:
    """Runs `step` whenever `nudge` was called and it reports that there is more to do."""

    def __init__(self, step: Callable[[], bool], failed: Callable[[Exception], None]) -> None:
        self._step, self._failed = step, failed
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="daskps-compaction", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """There may be something to do."""
        self._wake.set()

    def close(self) -> None:
        """Stop after the step under way."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            try:
                while not self._stop.is_set():
                    start = time.perf_counter()
                    if not self._step():
                        break
                    self._stop.wait(REST * (time.perf_counter() - start))
            except Exception as error:
                self._failed(error)
