"""`Stock`: the current rows of a partition: where each key's row is, in memory or on disk, in how little room.

In: whole arrays of keys and rows. Out: rows. `Store` adds snapshots and serialises the changes: every method here that
changes something is called under the store's writer lock. The `lock` handed in is held only while the index, the live
bits or the set of files are looked at or changed, so that loads wait for neither disk nor compaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from threading import RLock

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.errors import CapacityError
from daskps.ssd.compaction import HARD
from daskps.ssd.files import Files, disk_error
from daskps.ssd.format import KEY_BYTES
from daskps.ssd.index import ABSENT, KeyIndex
from daskps.ssd.ledger import Ledger
from daskps.ssd.manifest import FileEntry, Manifest
from daskps.ssd.options import Options
from daskps.ssd.reader import by_file, read_rows, sort_requests
from daskps.ssd.shelf import ParameterFile, Shelf
from daskps.ssd.statistics import Counters
from daskps.types import Bools, Floats, Keys


class Stock:
    """Index, live bits and parameter files of the current state."""

    def __init__(
        self, files: Files, manifest: Manifest, pool: ComputePool, options: Options, io: Executor, counters: Counters
    ) -> None:
        self.shape, self.lock = manifest.shape, RLock()
        self.index = KeyIndex(pool)
        self.ledger = Ledger(self.shape.file_rows)
        self.shelf = Shelf(files, self.shape, io, self.lock, counters)
        self._files, self._pool, self._options, self._io, self._counters = files, pool, options, io, counters
        self._manifest = manifest
        self._staged: ParameterFile | None = None  # the file being filled
        self._full: list[ParameterFile] = []  # in memory until their writing is done

    # ---- rows

    def append(self, keys: Keys, rows: Floats) -> None:
        """Put rows; full files are written behind the caller's back."""
        first = 0
        while first < len(keys):
            first += self._stage(keys[first:], rows[first:])
            self.settle()

    def load(self, keys: Keys, out: Floats) -> Bools:
        """Copy the rows of the keys into `out`; tells which were found."""
        with self.lock:
            requests, found = self.index.request(keys)
            sort_requests(requests, self.ledger.files * self.shape.file_rows)
            wanted = []
            for number, first, last in by_file(requests, self.shape.file_rows):
                file = self.shelf.current[number]
                wanted.append((file, self.shelf.pin(file), first, last))
        try:
            read = read_rows(self._files, self.shape, self.shelf, self._io, requests, wanted, out)
        finally:
            for file, _, _, _ in wanted:
                self.shelf.unpin(file)
        with self.lock:
            self._counters.read_bytes += read
            self._counters.loaded_rows += len(requests)
            self._counters.loaded_bytes += len(requests) * self.shape.row_bytes
        return found

    def delete(self, keys: Keys) -> Bools:
        """Take keys out; tells which were there."""
        with self.lock:
            previous = self.index.remove(keys)
            self.ledger.clear(previous)
        found: Bools = previous != ABSENT
        return found

    def scan(self) -> Iterator[tuple[Keys, Floats]]:
        """Every live key and row as of now, file by file."""
        with self.lock:
            contents = [(file, self.ledger.file_bits(number).copy()) for number, file in self.shelf.current.items()]
            for file, _ in contents:
                self.shelf.pin(file)
        try:
            yield from self.shelf.scan(contents)
        finally:
            for file, _ in contents:
                self.shelf.unpin(file)

    # ---- files

    def adopt(self, manifest: Manifest) -> None:
        """Keep what the snapshots of `manifest` need, from now on."""
        with self.lock:
            gone = self._manifest.kept()
            self._manifest = manifest
            kept = manifest.kept()
            self.shelf.reserve(set(kept))
            self.ledger.keep(list(kept))
            self.shelf.discard([e for n, e in gone.items() if n not in kept and n not in self.shelf.current])

    def flush(self) -> list[FileEntry]:
        """Wait until every row is in a file whose bytes are durable; returns the files."""
        while self._staged is not None and self._staged.count:
            self._squeeze()
            self._seal()
            self.settle()  # may compact, and so stage rows again
        self._drain(0)
        files = [file for file in self.shelf.current.values() if file is not self._staged]
        for file in files:
            self.shelf.wait_synced(file)
        return sorted((file.entry for file in files), key=lambda entry: entry.number)

    def settle(self) -> None:
        """Let empty files go, compact as far as the bound asks, write full files. If that fails they stay in memory."""
        self._drop_empty()
        waited = False
        while self.over(HARD) and (number := self.victim(0.0)) is not None:
            self.move(number)
            self._write_full()
            waited = True
        self._counters.append_waits += waited
        self._write_full()

    def over(self, limit: float) -> bool:
        """Whether files that no snapshot needs hold more than `limit` x the live rows; the staged one is in memory."""
        staged = self._staged.count if self._staged is not None else 0
        return self.ledger.free_rows_held - staged > limit * self.ledger.live_rows

    def victim(self, above: float) -> int | None:
        """The stalest file that compaction may take, if its stale part is over `above`."""
        return self.ledger.stalest(above, self._staged.number if self._staged is not None else None)

    def move(self, number: int) -> None:
        """Append the live rows of a file again; what is left of it is stale."""
        file = self.shelf.current[number]
        live = self.ledger.live_positions(number)
        if len(live):
            keys, rows = self.shelf.keys(file)[live], self.shelf.rows(file)[live]
            first = 0
            while first < len(keys):
                first += self._stage(keys[first:], rows[first:])
        self._counters.compactions += 1
        self._counters.compacted_rows += len(live)

    @property
    def memory_bytes(self) -> int:
        """Bytes of index, live bits, block checksums and staging."""
        with self.lock:
            return self.index.memory_bytes + self.ledger.memory_bytes + self.shelf.memory_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk, those of full files on their way there included."""
        with self.lock:
            rows = {number: entry.rows for number, entry in self._manifest.kept().items()}
            rows.update({number: f.count for number, f in self.shelf.current.items() if f is not self._staged})
            saved_bytes = sum(s.live_bytes + (s.index_bytes or 0) for s in self._manifest.snapshots)
            files_bytes = sum(map(self.shape.data_bytes, rows.values()))
            return files_bytes + self.shelf.leaving_bytes + saved_bytes + len(self._manifest.text())

    def has_room(self, count: int) -> bool:
        """Whether so many bytes more stay within the disk budget."""
        budget = self._options.disk_bytes
        return budget is None or self.disk_bytes + count <= budget

    # ---- inside

    def _stage(self, keys: Keys, rows: Floats) -> int:
        """Take as many rows as the staged file has room for; a full file is sealed."""
        if self._staged is None:
            self._staged = self.shelf.stage()
        file = self._staged
        assert file.keys is not None
        assert file.rows is not None
        first, count = file.count, min(len(keys), self.shape.file_rows - file.count)
        file.keys[first : first + count] = keys[:count]
        self._copy(file.rows[first : first + count], rows[:count])
        base = file.number * self.shape.file_rows + first
        with self.lock:
            file.count += count
            self.ledger.add(file.number, first, count)
            places = np.arange(base, base + count, dtype=np.uint32)
            previous = self.index.insert(keys[:count], places, coming=len(keys) - count)
            self.ledger.clear(previous)
        if file.count == self.shape.file_rows:
            if 2 * self.ledger.live_of(file.number) <= file.count:
                self._squeeze()  # keys that come again and again: their older rows need not reach the disk
            else:
                self._seal()
        return count

    def _copy(self, target: Floats, source: Floats) -> None:
        if target.nbytes < 1 << 20:
            target[:] = source
            return

        def share(index: int, count: int) -> None:
            part = slice(len(target) * index // count, len(target) * (index + 1) // count)
            target[part] = source[part]

        self._pool.shares(share)

    def _squeeze(self) -> None:
        """Drop the stale rows of the staged file before it is written."""
        file = self._staged
        if file is None or self.ledger.live_of(file.number) == file.count:
            return
        with self.lock:
            live = self.ledger.live_positions(file.number)
            assert file.keys is not None
            assert file.rows is not None
            keys, rows = self.shelf.buffers()
            keys[: len(live)], rows[: len(live)] = file.keys[live], file.rows[live]
            self.shelf.exchange(file, keys, rows)
            self.ledger.drop(file.number)
            file.count = len(live)
            base = file.number * self.shape.file_rows
            self.ledger.add(file.number, 0, len(live))
            self.index.insert(keys[: len(live)], np.arange(base, base + len(live), dtype=np.uint32))

    def _seal(self) -> None:
        assert self._staged is not None
        if self._staged.count:
            self._full.append(self._staged)
            self._staged = None

    def _write_full(self) -> None:
        """Start writing the full files, after making room for them; wait while too many are in memory."""
        self._drop_empty()
        self.shelf.sweep()
        for file in list(self._full):
            if (file.writing is None or _failed(file.writing)) and file in self._full:
                self._check_budget()
                self.shelf.write(file)
        self._drain(self._options.unwritten_files)
        self.shelf.sweep()

    def _drain(self, allowed: int) -> None:
        """Wait until at most `allowed` full files are in memory."""
        while len(self._full) > allowed or (self._full and _done(self._full[0])):
            file = self._full[0]
            assert file.writing is not None
            try:
                file.writing.result()
            except OSError as error:
                # Each is tried again by the next change, which must not meet a failure from before space was freed.
                wait([other.writing for other in self._full if other.writing is not None])
                raise disk_error(self._files, error, self.shape.data_bytes(file.count), self.disk_bytes) from error
            self._full.pop(0)

    def _drop_empty(self) -> None:
        with self.lock:
            for number in self.ledger.empty_files():
                if self._staged is not None and number == self._staged.number:
                    continue
                file, kept = self.shelf.current[number], self.ledger.is_kept(number)
                self.ledger.drop(number)
                self.shelf.drop(file, kept=kept)
                if file in self._full:
                    self._full.remove(file)

    def _check_budget(self) -> None:
        budget = self._options.disk_bytes
        if budget is None:
            return
        while self.disk_bytes > budget and (number := self.victim(0.0)) is not None:
            self.move(number)
            self._drop_empty()
            self.shelf.sweep()
        if (wanted := self.disk_bytes) > budget:
            live = self.ledger.live_rows * (KEY_BYTES + self.shape.row_bytes)
            raise CapacityError(
                f"{self._files.url}: {wanted:,} bytes wanted, the disk budget is {budget:,}; live rows take {live:,}, "
                f"{len(self._manifest.snapshots)} snapshots the rest: drop snapshots, delete keys, or raise disk_bytes"
            )


def _failed(future: Future[None]) -> bool:
    return future.done() and future.exception() is not None


def _done(file: ParameterFile) -> bool:
    return file.writing is not None and file.writing.done()
