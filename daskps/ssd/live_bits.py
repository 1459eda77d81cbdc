"""The live rows of every segment: one bit per row, counts per segment, and the bound on disk use.

A row is live if the index points to it, otherwise stale. storage/FORMAT.md, "Compaction", derives the bound.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from daskps.device.native import library
from daskps.ssd.index import Bytes, Places
from daskps.ssd.manifest import PartitionSnapshot
from daskps.types import Int64s

PER_ROW = 2.0  # rows allowed on disk per live row, of the current state and of each kept snapshot
PER_CHANGE = 2.2  # rows allowed on disk for a kept snapshot, per row appended or deleted since it


class DiskBound:
    """The bound on rows on disk, for the given snapshots (oldest first) and for every subset of them.

    rows on disk <= 2 x live rows + for each snapshot min(2 x its rows, 2.2 x rows changed since it) + one segment.
    Subsets count because any snapshot may be dropped next.

    A snapshot that exceeds its share alone (older versions of daskps made such) is left out: only dropping it
    helps, and it must not prevent the compaction of later ones.
    """

    def __init__(self, snapshots: Iterable[PartitionSnapshot], file_rows: int) -> None:
        held = [(s, sum(entry.rows for entry in s.files)) for s in snapshots]
        held = [(s, rows) for s, rows in held if rows <= PER_ROW * s.live_rows + file_rows]
        self._file_rows = file_rows
        self._held = np.array([rows for _, rows in held], np.float64)
        self._most = PER_ROW * np.array([s.live_rows for s, _ in held], np.float64)
        self._changed = np.array([s.changed_rows for s, _ in held], np.float64)
        reach = max((s.array_files for s, _ in held), default=0)
        self._has = np.zeros((len(held), reach))  # (snapshots, segments): 1 where the snapshot needs the segment
        rows = np.zeros(reach)
        for index, (snapshot, _) in enumerate(held):
            for entry in snapshot.files:
                self._has[index, entry.number] = 1
                rows[entry.number] = entry.rows
        self._gone = (self._has * rows) @ (1 - self._has).T  # [i, j]: rows of segments in i, not in j

    def holders(self, files: int, nobody: int) -> Int64s:
        """Return, for each segment number, the index of the oldest snapshot that needs it; `nobody` if none does."""
        count, reach = self._has.shape
        first = np.full(max(files, reach), nobody, np.int64)
        for index in reversed(range(count)):
            first[:reach][self._has[index] > 0] = index
        return first[:files]

    def room(self, rows: Int64s, live_rows: int, changed_rows: int) -> float:
        """Return how many rows may be added to the disk; below 0, the bound is broken.

        `rows` are the rows of each current segment, by number.
        """
        total = float(rows.sum())
        if not len(self._held):
            return PER_ROW * live_rows + self._file_rows - total
        return self._room(rows, total, live_rows, changed_rows, 0)

    def room_after(self, rows: Int64s, live: Int64s, changed_rows: int, moved: int, holder: int) -> float:
        """Return how many rows may be added to the disk after compaction has moved the live rows of segment `moved`.

        `holder` is the oldest snapshot that needs the segment. Only the subsets whose newest snapshot is `holder` or a
        later one are checked: with them, the live rows of the segment are on disk twice. The other subsets do not need
        the segment, so moving it only frees space.
        """
        others = rows.copy()
        others[moved] = 0
        return self._room(others, float(others.sum() + live[moved]), int(live.sum()), changed_rows, holder)

    def _room(self, rows: Int64s, total: float, live_rows: int, changed_rows: int, newest_from: int) -> float:
        # Rows on disk of each snapshot together with the current state.
        on_disk = self._held - self._has[:, : len(rows)] @ rows[: self._has.shape[1]] + total
        on_disk[:newest_from] = -np.inf
        allowed = np.minimum(self._most, PER_CHANGE * np.maximum(changed_rows - self._changed, 0))
        over = np.empty(len(on_disk))  # rows on disk minus allowance, of the worst subset from this snapshot on
        for index in reversed(range(len(over))):
            more = (self._gone[index, index + 1 :] + over[index + 1 :]).max(initial=-np.inf)
            over[index] = max(float(on_disk[index]), float(more)) - allowed[index]
        return PER_ROW * live_rows + self._file_rows - float(over.max())


NOBODY = np.iinfo(np.int64).max  # stands for the holder of a segment that no snapshot needs


class LiveBits:
    """Live bits and counts of the current segments. Bit `place` is set if that row is live.

    Segments are known by number; a number without rows is free.
    """

    def __init__(self, file_rows: int) -> None:
        self._file_rows = file_rows
        self._bits = np.zeros(0, np.uint8)
        self._rows = np.zeros(0, np.int64)  # rows of each segment, live and stale
        self._live = np.zeros(0, np.int64)  # live rows of each segment
        self._kept = np.zeros(0, np.bool_)  # True if some snapshot needs the segment
        self._holder = np.zeros(0, np.int64)  # index of the oldest snapshot that needs it; NOBODY if none does

    @property
    def files(self) -> int:
        """Return the largest segment number so far plus one."""
        return len(self._rows)

    @property
    def live_rows(self) -> int:
        """Return the live rows of all segments."""
        return int(self._live.sum())

    @property
    def stale_rows(self) -> int:
        """Return the stale rows of the current segments: no key points to them."""
        return int(self._rows.sum()) - self.live_rows

    @property
    def rows(self) -> Int64s:
        """Return the rows of each current segment, live and stale, by number. Do not change the array."""
        return self._rows

    @property
    def live(self) -> Int64s:
        """Return the live rows of each current segment, by number. Do not change the array."""
        return self._live

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory of the bits and counts."""
        return sum(part.nbytes for part in (self._bits, self._rows, self._live, self._kept, self._holder))

    def live_of(self, number: int) -> int:
        """Return the live rows of one segment."""
        return int(self._live[number])

    def add(self, number: int, first: int, count: int) -> None:
        """Mark rows [first, first + count) of a segment as written and live."""
        self._reach(number + 1)
        bits = self.segment_bits(number)
        if first % 8 == 0 and count >= 8:
            whole = count // 8
            bits[first // 8 : first // 8 + whole] = 0xFF
            first, count = first + 8 * whole, count - 8 * whole
            self._rows[number] += 8 * whole
            self._live[number] += 8 * whole
        if count:
            flags = np.unpackbits(bits, bitorder="little")
            flags[first : first + count] = 1
            bits[:] = np.packbits(flags, bitorder="little")
            self._rows[number] += count
            self._live[number] += count

    def clear(self, places: Places) -> None:
        """Mark rows as stale. Items that are ABSENT are ignored."""
        library().ssd_clear_live(
            places=places, n=len(places), file_rows=self._file_rows, live=self._bits, live_rows=self._live
        )

    def restore(self, number: int, rows: int, bits: Bytes) -> None:
        """Add a segment of `rows` rows with the live bits of a snapshot."""
        self._reach(number + 1)
        self.segment_bits(number)[:] = bits
        self._rows[number] = rows
        self._live[number] = int(np.bitwise_count(bits).sum())

    def drop(self, number: int) -> None:
        """Remove a segment; its number is free."""
        self.segment_bits(number)[:] = 0
        self._rows[number] = self._live[number] = 0

    def keep(self, numbers: list[int], bound: DiskBound) -> None:
        """Record that snapshots need exactly these segments."""
        self._reach(max(numbers, default=-1) + 1)
        self._kept[:] = False
        self._kept[numbers] = True
        self._holder = bound.holders(self.files, NOBODY)

    def is_kept(self, number: int) -> bool:
        """Return True if some snapshot needs the segment."""
        return bool(self._kept[number])

    def holder(self, number: int) -> int | None:
        """Return the index, in the bound, of the oldest snapshot that needs the segment; None if none does."""
        holder = int(self._holder[number])
        return None if holder == NOBODY else holder

    def live_positions(self, number: int) -> npt.NDArray[np.int64]:
        """Return the numbers, within the segment, of its live rows."""
        return np.flatnonzero(np.unpackbits(self.segment_bits(number), bitorder="little"))

    def empty_segments(self) -> list[int]:
        """Return the segments whose rows are all stale."""
        return [int(number) for number in np.flatnonzero((self._rows > 0) & (self._live == 0))]

    def stalest(self, min_stale_fraction: float, exclude: int | None = None, *, kept: bool = True) -> list[int]:
        """Return candidates for compaction, the one with the largest stale fraction first.

        Segments are grouped by the oldest snapshot that needs them, and each group gives its stalest segment. Only
        segments with a larger stale fraction than `min_stale_fraction` count, without the segment `exclude`, and with
        `kept=False` without those that a snapshot needs.
        """
        rows = self._rows if kept else np.where(self._kept, 0, self._rows)
        stale = np.divide(rows - np.minimum(self._live, rows), rows, out=np.zeros(len(rows)), where=rows > 0)
        if exclude is not None:
            stale[exclude] = 0
        order = np.argsort(-stale, kind="stable")
        order = order[: int(np.count_nonzero(stale > min_stale_fraction))]
        _, first = np.unique(self._holder[order], return_index=True)
        return [int(number) for number in order[np.sort(first)]]

    def shortest(self, below: int, exclude: int | None = None) -> list[int]:
        """Return the segments with fewer than `below` live rows, except `exclude`, the shortest first."""
        short = np.flatnonzero((self._rows > 0) & (self._live < below))
        short = short[short != exclude] if exclude is not None else short
        return [int(number) for number in short[np.argsort(self._live[short], kind="stable")]]

    def snapshot_bits(self, files: int) -> Bytes:
        """Return a copy of the live bits of the first `files` segments."""
        return self._bits[: files * self._file_rows // 8].copy()

    def segment_bits(self, number: int) -> Bytes:
        """Return the live bits of one segment, as a view."""
        size = self._file_rows // 8
        return self._bits[number * size : (number + 1) * size]

    def _reach(self, files: int) -> None:
        if files <= len(self._rows):
            return
        more = max(files, len(self._rows) + len(self._rows) // 8) - len(self._rows)
        self._bits = np.concatenate([self._bits, np.zeros(more * self._file_rows // 8, np.uint8)])
        self._rows = np.concatenate([self._rows, np.zeros(more, np.int64)])
        self._live = np.concatenate([self._live, np.zeros(more, np.int64)])
        self._kept = np.concatenate([self._kept, np.zeros(more, np.bool_)])
        self._holder = np.concatenate([self._holder, np.full(more, NOBODY)])
