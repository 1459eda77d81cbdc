"""Which rows of which parameter file are live: one bit a row, and counts a file.

In: places written and replaced. Out: totals, the stalest file, and the bits that a snapshot saves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.ssd.index import Bytes, Places


class Ledger:
    """Bit `place` is set when that row is live. Files are known by number; a number without rows is free."""

    def __init__(self, file_rows: int) -> None:
        self._file_rows = file_rows
        self._bits = np.zeros(0, np.uint8)
        self._rows = np.zeros(0, np.int64)  # rows written of each file
        self._live = np.zeros(0, np.int64)  # live ones among them
        self._kept = np.zeros(0, np.bool_)  # some snapshot needs the file

    @property
    def files(self) -> int:
        """One more than the largest file number so far."""
        return len(self._rows)

    @property
    def live_rows(self) -> int:
        """Live rows of all files."""
        return int(self._live.sum())

    @property
    def stale_rows(self) -> int:
        """Rows of the current files that nothing points to."""
        return int(self._rows.sum()) - self.live_rows

    @property
    def free_rows_held(self) -> int:
        """Rows, live or stale, in files that no snapshot needs: what compaction may touch."""
        return int(self._rows[~self._kept].sum())

    @property
    def memory_bytes(self) -> int:
        """Bytes of the bits and counts."""
        return self._bits.nbytes + self._rows.nbytes + self._live.nbytes + self._kept.nbytes

    def live_of(self, number: int) -> int:
        """Live rows of one file."""
        return int(self._live[number])

    def add(self, number: int, first: int, count: int) -> None:
        """Rows [first, first + count) of a file are written, and live."""
        self._reach(number + 1)
        bits = self.file_bits(number)
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
        """Those rows are stale now; ABSENT entries stand for none."""
        library().ssd_clear_live(
            places=places, n=len(places), file_rows=self._file_rows, live=self._bits, live_rows=self._live
        )

    def restore(self, number: int, rows: int, bits: Bytes) -> None:
        """Take a file of `rows` rows over from a snapshot, with its live bits."""
        self._reach(number + 1)
        self.file_bits(number)[:] = bits
        self._rows[number] = rows
        self._live[number] = int(np.bitwise_count(bits).sum())

    def drop(self, number: int) -> None:
        """The file is gone."""
        self.file_bits(number)[:] = 0
        self._rows[number] = self._live[number] = 0

    def keep(self, numbers: list[int]) -> None:
        """Exactly these files are needed by snapshots."""
        self._reach(max(numbers, default=-1) + 1)
        self._kept[:] = False
        self._kept[numbers] = True

    def is_kept(self, number: int) -> bool:
        """Whether some snapshot needs the file."""
        return bool(self._kept[number])

    def live_positions(self, number: int) -> npt.NDArray[np.int64]:
        """Row numbers, within the file, of its live rows."""
        return np.flatnonzero(np.unpackbits(self.file_bits(number), bitorder="little"))

    def empty_files(self) -> list[int]:
        """Files whose rows are all stale."""
        return [int(number) for number in np.flatnonzero((self._rows > 0) & (self._live == 0))]

    def stalest(self, above: float, besides: int | None = None) -> int | None:
        """The file with the largest stale part over `above`, among those that no snapshot needs, without `besides`."""
        rows = np.where(self._kept, 0, self._rows)
        if besides is not None:
            rows[besides] = 0
        stale = np.divide(rows - np.minimum(self._live, rows), rows, out=np.zeros(len(rows)), where=rows > 0)
        if not len(stale) or stale.max() <= above:
            return None
        return int(stale.argmax())

    def snapshot_bits(self, files: int) -> Bytes:
        """A copy of the bits of the first `files` files."""
        return self._bits[: files * self._file_rows // 8].copy()

    def file_bits(self, number: int) -> Bytes:
        """The live bits of one file, a view."""
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
