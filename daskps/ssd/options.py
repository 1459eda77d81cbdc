"""How a store behaves; nothing here changes what is in it."""

from __future__ import annotations

from dataclasses import dataclass

from daskps.errors import ArgumentError
from daskps.ssd.compaction import HARD, SOFT


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of an open store."""

    disk_bytes: int | None = None  # budget for everything on disk; None: the disk's own end
    background_compaction: bool = True
    compact_above: float = SOFT  # disk rows over live rows from which the background thread works
    io_threads: int = 8  # threads that wait for the disk; they are no cores to compute with
    unwritten_files: int = 2  # full parameter files in memory while they are written

    def __post_init__(self) -> None:
        if not 1.0 < self.compact_above <= HARD:
            raise ArgumentError(f"compact_above must be over 1 and at most {HARD}, got {self.compact_above}")
        if self.io_threads < 1 or self.unwritten_files < 1:
            raise ArgumentError(f"a store needs I/O threads and buffers, got {self}")
