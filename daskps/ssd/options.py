"""Options, limits of compaction and statistics of a store. None of them changes the rows that a store returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from daskps.errors import ArgumentError


@dataclass(slots=True)
class Statistics:
    """Totals since a store was opened, and its size at the moment of `Store.stats`."""

    appended_rows: int = 0
    appended_bytes: int = 0  # keys and rows given to append
    written_bytes: int = 0  # bytes sent to the disk, including compaction and metadata
    loaded_rows: int = 0
    loaded_bytes: int = 0  # rows returned by load
    read_bytes: int = 0  # bytes read for load and compaction
    deleted_rows: int = 0
    compactions: int = 0  # segments that compaction rewrote
    compacted_rows: int = 0  # live rows that compaction moved
    append_waits: int = 0  # changes that had to wait for compaction
    recovered_files: int = 0  # files that no snapshot needed, removed when the store was opened
    recovered_bytes: int = 0
    # Size; 0 while the store counts.
    files: int = 0  # segments
    live_rows: int = 0
    stale_rows: int = 0
    disk_bytes: int = 0
    memory_bytes: int = 0

    @property
    def read_amplification(self) -> float:
        """Return the bytes read from disk per byte of rows returned."""
        return self.read_bytes / self.loaded_bytes if self.loaded_bytes else 0.0

    @property
    def write_amplification(self) -> float:
        """Return the bytes written to disk per byte appended."""
        return self.written_bytes / self.appended_bytes if self.appended_bytes else 0.0

    def __add__(self, other: Statistics) -> Statistics:
        """Return the sum of the statistics of two partitions."""
        return Statistics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Statistics)))


# Rows of the current segments (live and stale) per live row.
COMPACT_RATIO = 1.6  # at a snapshot, compaction goes down to this; above it, the background thread works by default
WAIT_RATIO = 1.9  # above this, an append waits for compaction
STALE_FRACTION = 0.5  # a segment with more stale rows than this is worth compacting although nobody waits
# A segment is short if less than SHORT_FRACTION of its rows are live. A snapshot leaves at most SHORT_SEGMENTS short
# ones; see `LiveRows.compact_for_snapshot`.
SHORT_SEGMENTS = 16
SHORT_FRACTION = 0.25
# Pause of the background thread after a step, as a multiple of the time of the step: with 1, background compaction uses
# at most half of the disk's time.
PAUSE_RATIO = 1.0


class Compactor:
    """A background thread. After `wake` it calls `step` until that returns False; an exception goes to `failed`."""

    def __init__(self, step: Callable[[], bool], failed: Callable[[Exception], None]) -> None:
        self._step, self._failed = step, failed
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="daskps-compaction", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread: there may be something to compact."""
        self._woken.set()

    def close(self) -> None:
        """Stop the thread after the current step."""
        self._stop.set()
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._woken.wait()
            self._woken.clear()
            try:
                while not self._stop.is_set():
                    start = time.perf_counter()
                    if not self._step():
                        break
                    self._stop.wait(PAUSE_RATIO * (time.perf_counter() - start))
            except Exception as error:
                self._failed(error)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of an open store."""

    disk_bytes: int | None = None  # budget for everything on disk; None: until the disk is full
    background_compaction: bool = True
    compact_above: float = COMPACT_RATIO  # rows on disk per live row above which the background thread works
    io_threads: int = 8  # threads that wait for the disk; they need no cores
    unwritten_files: int = 2  # full segments that may be in memory while they are written; an append waits above this

    def __post_init__(self) -> None:
        if not 1.0 < self.compact_above <= WAIT_RATIO:
            raise ArgumentError(f"compact_above must be over 1 and at most {WAIT_RATIO}, got {self.compact_above}")
        if self.io_threads < 1 or self.unwritten_files < 1:
            raise ArgumentError(f"a store needs at least one I/O thread and one buffer, got {self}")
