"""The current rows of a partition (class `LiveRows`): where the row of each key is, and compaction to save disk space.

Input: arrays of keys and rows. Output: rows. `Store` adds snapshots and serialises the changes: every method here that
changes something is called under the store's writer lock. Its lock is held only while the index, the live bits or the
set of segments are read or changed, so that loads wait neither for the disk nor for compaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from threading import RLock

import numpy as np

from daskps.budget import KEY_BYTES, Term, capacity_error, total_bytes
from daskps.device.pool import ComputePool
from daskps.ssd.index import ABSENT, KeyIndex
from daskps.ssd.live_bits import DiskBound, LiveBits
from daskps.ssd.manifest import Manifest, SegmentEntry
from daskps.ssd.options import COMPACT_RATIO, SHORT_FRACTION, SHORT_SEGMENTS, WAIT_RATIO, Options, Statistics
from daskps.ssd.segments import Segment, SegmentFiles, by_segment, sort_requests
from daskps.storage.files import Files, disk_error
from daskps.storage.row_store import Positions
from daskps.types import Bools, Floats, Int64s, Keys


class LiveRows:
    """The current state of a partition: index, live bits and segments."""

    def __init__(
        self, files: Files, manifest: Manifest, pool: ComputePool, options: Options, io: Executor, counters: Statistics
    ) -> None:
        self.shape, self.lock = manifest.shape, RLock()
        self.index = KeyIndex(pool)
        self.live_bits = LiveBits(self.shape.file_rows)
        self.segments = SegmentFiles(files, self.shape, io, self.lock, counters, pool)
        self._files, self._pool, self._options, self._io, self._counters = files, pool, options, io, counters
        self._manifest, self._manifest_bytes = manifest, len(manifest.text())
        self._bound = DiskBound(manifest.snapshots, self.shape.file_rows)
        self.changed_rows = 0  # rows appended or deleted since the store was created; compaction does not count
        self._staged: Segment | None = None  # the segment being filled, in memory
        self._full: list[Segment] = []  # full segments, in memory until they are written

    # ---- rows

    def append(self, keys: Keys, rows: Floats, positions: Int64s | None) -> None:
        """Insert or replace rows: of ``keys[i]`` the row ``rows[positions[i]]``, or ``rows[i]`` without positions.

        Full segments are written in the background (write-behind).
        """
        first = 0
        while first < len(keys):
            count = self._stage(keys, rows, positions, first)
            first += count
            self.changed_rows += count
            self.compact_and_write()

    def load(self, keys: Keys, positions: Positions | None, out: Floats) -> Bools:
        """Copy the row of ``keys[i]`` to ``out[positions[i]]``, or to ``out[i]``; return a mask of the keys found."""
        with self.lock:
            requests, found = self.index.request(keys, positions)
            sort_requests(requests, self.live_bits.files * self.shape.file_rows)
            wanted = []
            for number, first, last in by_segment(requests, self.shape.file_rows):
                segment = self.segments.current[number]
                wanted.append((segment, self.segments.pin(segment), first, last))
        try:
            read = self.segments.read_rows(requests, wanted, out)
        finally:
            for segment, _, _, _ in wanted:
                self.segments.unpin(segment)
        with self.lock:
            self._counters.read_bytes += read
            self._counters.loaded_rows += len(requests)
            self._counters.loaded_bytes += len(requests) * self.shape.row_bytes
        return found

    def delete(self, keys: Keys) -> Bools:
        """Delete keys; return a mask of those that existed."""
        with self.lock:
            previous = self.index.remove(keys)
            self.live_bits.clear(previous)
            found: Bools = previous != ABSENT
            self.changed_rows += int(np.count_nonzero(found))
        return found

    def scan(self) -> Iterator[tuple[Keys, Floats]]:
        """Yield all live keys and rows as of now, one segment at a time."""
        with self.lock:
            contents = [
                (segment, self.live_bits.segment_bits(number).copy())
                for number, segment in self.segments.current.items()
            ]
            for segment, _ in contents:
                self.segments.pin(segment)
        try:
            yield from self.segments.scan(contents)
        finally:
            for segment, _ in contents:
                self.segments.unpin(segment)

    # ---- files

    def adopt(self, manifest: Manifest) -> None:
        """Replace the manifest: keep the segments that its snapshots need, delete those no longer needed."""
        with self.lock:
            gone = self._manifest.kept()
            self._manifest, self._manifest_bytes = manifest, len(manifest.text())
            kept = manifest.kept()
            self.segments.reserve(set(kept))
            self._bound = DiskBound(manifest.snapshots, self.shape.file_rows)
            self.live_bits.keep(list(kept), self._bound)
            self.segments.discard([e for n, e in gone.items() if n not in kept and n not in self.segments.current])

    def flush(self) -> list[SegmentEntry]:
        """Write all rows to segments, wait until their bytes are durable, and return these segments."""
        while self._staged is not None and self._staged.count:
            self._drop_stale_staged()
            self._seal()
            self.compact_and_write()  # may compact, and so stage rows again
        self._drain(0)
        files = [segment for segment in self.segments.current.values() if segment is not self._staged]
        for segment in files:
            self.segments.wait_synced(segment)
        return sorted((segment.entry for segment in files), key=lambda entry: entry.number)

    def compact_and_write(self) -> None:
        """Remove segments without live rows, compact as far as the bound needs it, and write full segments.

        A segment that cannot be written stays in memory.
        """
        self._drop_empty()
        waited = False
        while self.over(WAIT_RATIO) and (number := self.victim(0.0)) is not None:
            self.move(number)
            self._write_full()
            waited = True
        self._counters.append_waits += waited
        self._write_full()

    def compact_for_snapshot(self) -> None:
        """Compact before a snapshot, because its segments cannot be compacted while it is kept.

        It removes stale rows (at most COMPACT_RATIO x the live rows stay) and merges short segments. Every snapshot
        writes a short segment; without merging, frequent snapshots make thousands of them, which cost time in every
        load and live bits in every snapshot.
        """
        self._drop_stale_staged()
        while self.over(COMPACT_RATIO, staged=True) and (number := self.victim(0.0)) is not None:
            self.move(number)
            self._write_full()
        short = self.live_bits.shortest(int(SHORT_FRACTION * self.shape.file_rows), self._staged_number)
        if len(short) > SHORT_SEGMENTS:
            for number in short[: len(short) - SHORT_SEGMENTS // 2]:
                if self._may_move(number):
                    self.move(number)
                    self._write_full()

    def over(self, limit: float, *, staged: bool = False) -> bool:
        """Return True if the current segments have more than `limit` x the live rows, or break the bound on disk use.

        The staged segment is in memory; it counts only with `staged`.
        """
        rows, live_rows = self.live_bits.rows, self.live_bits.live_rows
        if self._staged is not None and not staged:
            rows = rows.copy()
            rows[self._staged.number] = 0
        return int(rows.sum()) > limit * live_rows or self._bound.room(rows, live_rows, self.changed_rows) < 0

    def victim(self, min_stale_fraction: float, *, kept: bool = True) -> int | None:
        """Return the stalest segment that compaction may move; None if there is none.

        Its stale fraction is larger than `min_stale_fraction`. With `kept=False`, segments that a snapshot needs are
        left out.
        """
        files = self.live_bits.stalest(min_stale_fraction, self._staged_number, kept=kept)
        return next((number for number in files if self._may_move(number)), None)

    def move(self, number: int) -> None:
        """Compact a segment: append its live rows again, so that all its own rows are stale."""
        segment = self.segments.current[number]
        live = self.live_bits.live_positions(number)
        with self.segments.trace.span("compact segment", "io", rows=len(live)):
            if len(live):
                keys, rows = self.segments.keys(segment)[live], self.segments.rows(segment)
                first = 0
                while first < len(keys):
                    first += self._stage(keys, rows, live, first)
        self._counters.compactions += 1
        self._counters.compacted_rows += len(live)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory of index, live bits, block checksums and write buffers."""
        with self.lock:
            return self.index.memory_bytes + self.live_bits.memory_bytes + self.segments.memory_bytes

    @property
    def disk_bytes(self) -> int:
        """Return the bytes on disk, including full segments that are being written."""
        return total_bytes(self.disk_terms())

    def disk_terms(self) -> list[Term]:
        """Return the terms of the bytes on disk."""
        with self.lock:
            current = {number: f.count for number, f in self.segments.current.items() if f is not self._staged}
            kept = {n: entry.rows for n, entry in self._manifest.kept().items() if n not in current}
            staged = 0 if self._staged is None else self.live_bits.live_of(self._staged.number)
            live = (self.live_bits.live_rows - staged) * (KEY_BYTES + self.shape.row_bytes)
            current_bytes = sum(map(self.shape.data_bytes, current.values()))
            sizes = {
                "live rows": live,
                "stale rows": current_bytes - live + self.segments.leaving_bytes,
                "kept snapshots": sum(map(self.shape.data_bytes, kept.values())),
                "live bits and indexes": self._manifest_bytes
                + sum(s.live_bytes + (s.index_bytes or 0) for s in self._manifest.snapshots),
            }
            return [Term(name, size, "disk_bytes") for name, size in sizes.items()]

    def has_room(self, count: int) -> bool:
        """Return True if `count` more bytes stay within the disk budget."""
        budget = self._options.disk_bytes
        return budget is None or self.disk_bytes + count <= budget

    # ---- inside

    @property
    def _staged_number(self) -> int | None:
        return self._staged.number if self._staged is not None else None

    def _may_move(self, number: int) -> bool:
        """Return True if the bound still holds after compaction has moved this segment.

        A segment that a snapshot needs stays on disk, so its live rows would be there twice.
        """
        if not self.live_bits.is_kept(number):
            return True
        live_bits = self.live_bits
        if not self.has_room(
            self.shape.data_bytes(live_bits.live_of(number)) + self.shape.data_bytes(self.shape.file_rows)
        ):
            return False
        holder = live_bits.holder(number)
        return holder is None or (
            self._bound.room_after(live_bits.rows, live_bits.live, self.changed_rows, number, holder) >= 0
        )

    def _stage(self, keys: Keys, rows: Floats, positions: Int64s | None, start: int) -> int:
        """Copy rows into the staged segment, from key `start` on, as many as fit; return their number.

        A full segment is sealed.
        """
        if self._staged is None:
            self._staged = self.segments.stage()
        segment = self._staged
        assert segment.keys is not None
        assert segment.rows is not None
        keys = keys[start:]
        first, count = segment.count, min(len(keys), self.shape.file_rows - segment.count)
        segment.keys[first : first + count] = keys[:count]
        staged = slice(start, start + count)
        if positions is None:
            self._copy(segment.rows[first : first + count], rows[staged], None)
        else:
            self._copy(segment.rows[first : first + count], rows, positions[staged])
        base = segment.number * self.shape.file_rows + first
        with self.lock:
            segment.count += count
            self.live_bits.add(segment.number, first, count)
            places = np.arange(base, base + count, dtype=np.uint32)
            previous = self.index.insert(keys[:count], places, expected_more=len(keys) - count)
            self.live_bits.clear(previous)
        if segment.count == self.shape.file_rows:
            if 2 * self.live_bits.live_of(segment.number) <= segment.count:
                self._drop_stale_staged()  # the same keys again and again: their older rows need not be written
            else:
                self._seal()
        return count

    def _copy(self, target: Floats, source: Floats, positions: Int64s | None) -> None:
        """Copy the rows at `positions` of `source`, by default all, to `target`."""

        def share(index: int, count: int) -> None:
            part = slice(len(target) * index // count, len(target) * (index + 1) // count)
            if positions is None:
                target[part] = source[part]
            else:  # mode "raise" would make a copy; all positions are in range
                np.take(source, positions[part], axis=0, out=target[part], mode="clip")

        if target.nbytes < 1 << 20:
            share(0, 1)
        else:
            self._pool.shares(share)

    def _drop_stale_staged(self) -> None:
        """Remove the stale rows of the staged segment before it is written."""
        segment = self._staged
        if segment is None or self.live_bits.live_of(segment.number) == segment.count:
            return
        with self.lock:
            live = self.live_bits.live_positions(segment.number)
            assert segment.keys is not None
            assert segment.rows is not None
            keys, rows = self.segments.buffers()
            keys[: len(live)], rows[: len(live)] = segment.keys[live], segment.rows[live]
            self.segments.exchange(segment, keys, rows)
            self.live_bits.drop(segment.number)
            segment.count = len(live)
            base = segment.number * self.shape.file_rows
            self.live_bits.add(segment.number, 0, len(live))
            self.index.insert(keys[: len(live)], np.arange(base, base + len(live), dtype=np.uint32))

    def _seal(self) -> None:
        assert self._staged is not None
        if self._staged.count:
            self._full.append(self._staged)
            self._staged = None

    def _write_full(self) -> None:
        """Free disk space, start to write the full segments, and wait while too many are in memory (back-pressure)."""
        self._drop_empty()
        self.segments.sweep()
        for segment in list(self._full):
            if (segment.writing is None or _failed(segment.writing)) and segment in self._full:
                self._check_budget()
                self.segments.write(segment)
        self._drain(self._options.unwritten_files)
        self.segments.sweep()

    def _drain(self, allowed: int) -> None:
        """Wait until at most `allowed` full segments are in memory."""
        while len(self._full) > allowed or (self._full and _done(self._full[0])):
            segment = self._full[0]
            assert segment.writing is not None
            try:
                segment.writing.result()
            except OSError as error:
                # The next change tries each again. Wait for all of them now, so that it does not see an error from
                # before space was freed.
                wait([other.writing for other in self._full if other.writing is not None])
                raise disk_error(self._files, error, self.shape.data_bytes(segment.count), self.disk_terms()) from error
            self._full.pop(0)

    def _drop_empty(self) -> None:
        with self.lock:
            for number in self.live_bits.empty_segments():
                if self._staged is not None and number == self._staged.number:
                    continue
                segment, kept = self.segments.current[number], self.live_bits.is_kept(number)
                self.live_bits.drop(number)
                self.segments.drop(segment, kept=kept)
                if segment in self._full:
                    self._full.remove(segment)

    def _check_budget(self) -> None:
        budget = self._options.disk_bytes
        if budget is None:
            return
        while self.disk_bytes > budget and (number := self.victim(0.0, kept=False)) is not None:
            self.move(number)
            self._drop_empty()
            self.segments.sweep()
        if (wanted := self.disk_bytes) > budget:
            raise capacity_error(
                f"{self._files.url}: {wanted:,} bytes wanted, the disk budget is {budget:,}, with "
                f"{len(self._manifest.snapshots)} snapshots",
                self.disk_terms(),
                {"disk_bytes": budget},
                "raise budget.disk_bytes, or free what older snapshots hold with `daskps snapshots drop` or "
                "`daskps compact`",
            )


def _failed(future: Future[None]) -> bool:
    return future.done() and future.exception() is not None


def _done(segment: Segment) -> bool:
    return segment.writing is not None and segment.writing.done()
