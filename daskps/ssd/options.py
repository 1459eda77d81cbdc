"""Options, compaction limits and counters of a store. None of them changes the rows that a store returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from daskps.errors import ArgumentError


@dataclass(slots=True)
class Counters:
    """Totals since the store was opened. The store adds to them under its lock."""

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


@dataclass(frozen=True, slots=True)
class Statistics:
    """A copy of the counters, with the size of the store at that moment."""

    appended_rows: int
    appended_bytes: int
    written_bytes: int
    loaded_rows: int
    loaded_bytes: int
    read_bytes: int
    deleted_rows: int
    compactions: int
    compacted_rows: int
    append_waits: int
    recovered_files: int
    recovered_bytes: int
    files: int
    live_rows: int
    stale_rows: int
    disk_bytes: int
    memory_bytes: int

    @property
    def read_amplification(self) -> float:
        """Return the bytes read from disk per byte of rows returned."""
        return self.read_bytes / self.loaded_bytes if self.loaded_bytes else 0.0

    @property
    def write_amplification(self) -> float:
        """Return the bytes written to disk per byte appended."""
        return self.written_bytes / self.appended_bytes if self.appended_bytes else 0.0

    @classmethod
    def of(
        cls, counters: Counters, *, files: int, live_rows: int, stale_rows: int, disk_bytes: int, memory_bytes: int
    ) -> Statistics:
        """Return a copy of the counters together with the size of the store."""
        totals = {field.name: getattr(counters, field.name) for field in fields(Counters)}
        return cls(
            **totals,
            files=files,
            live_rows=live_rows,
            stale_rows=stale_rows,
            disk_bytes=disk_bytes,
            memory_bytes=memory_bytes,
        )

    def __add__(self, other: Statistics) -> Statistics:
        """Return the sum of the statistics of two partitions."""
        return Statistics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Statistics)))


# Rows of the current segments (live and stale) per live row.
SOFT = 1.6  # at a snapshot, compaction goes down to this; above it, the background thread works by default
HARD = 1.9  # an append waits for compaction above this
HALF = 0.5  # stale fraction above which a segment is worth compacting when nobody waits
# A segment is short if fewer than SHORT_PART x file_rows of its rows are live. A snapshot leaves at most SHORT_FILES
# short segments; see `LiveRows.tidy`.
SHORT_FILES = 16
SHORT_PART = 0.25
# Pause of the background thread after a step, as a multiple of the time of the step: with 1, background compaction uses
# at most half of the disk's time.
REST = 1.0


class Compactor:
    """A background thread. After `nudge` it calls `step` until that returns False; an exception goes to `failed`."""

    def __init__(self, step: Callable[[], bool], failed: Callable[[Exception], None]) -> None:
        self._step, self._failed = step, failed
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="daskps-compaction", daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """Wake the thread: there may be something to compact."""
        self._wake.set()

    def close(self) -> None:
        """Stop the thread after the current step."""
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


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of an open store."""

    disk_bytes: int | None = None  # budget for everything on disk; None: until the disk is full
    background_compaction: bool = True
    compact_above: float = SOFT  # rows on disk per live row above which the background thread works
    io_threads: int = 8  # threads that wait for the disk; they need no cores
    unwritten_files: int = 2  # full segments that may be in memory while they are written; an append waits above this

    def __post_init__(self) -> None:
        if not 1.0 < self.compact_above <= HARD:
            raise ArgumentError(f"compact_above must be over 1 and at most {HARD}, got {self.compact_above}")
        if self.io_threads < 1 or self.unwritten_files < 1:
            raise ArgumentError(f"a store needs I/O threads and buffers, got {self}")
