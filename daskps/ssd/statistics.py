"""What a store has done and holds, as one value for logs and dashboards."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Running totals; the store adds to them under its lock."""

    appended_rows: int = 0
    appended_bytes: int = 0  # keys and rows handed to append
    written_bytes: int = 0  # bytes sent to the disk, compaction and metadata included
    loaded_rows: int = 0
    loaded_bytes: int = 0  # rows handed out by load
    read_bytes: int = 0  # bytes read for load and compaction
    deleted_rows: int = 0
    compactions: int = 0  # parameter files rewritten
    compacted_rows: int = 0  # live rows that compaction moved
    append_waits: int = 0  # appends that had to compact first
    recovered_files: int = 0  # files of no snapshot, removed when the store was opened
    recovered_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """A copy of the counters with the state they led to."""

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
        """Bytes read from disk for each byte of rows handed out."""
        return self.read_bytes / self.loaded_bytes if self.loaded_bytes else 0.0

    @property
    def write_amplification(self) -> float:
        """Bytes written to disk for each byte appended."""
        return self.written_bytes / self.appended_bytes if self.appended_bytes else 0.0

    @classmethod
    def of(
        cls, counters: Counters, *, files: int, live_rows: int, stale_rows: int, disk_bytes: int, memory_bytes: int
    ) -> Statistics:
        """The counters as they are now, with the state."""
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
        """Of two partitions together."""
        return Statistics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Statistics)))
