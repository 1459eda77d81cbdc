"""The rows of one partition on disk (class `Store`), with crash-safe snapshots.

Input: arrays of keys and rows. Output: rows, and a mask of the keys that were found. storage/FORMAT.md describes the
files. `LiveRows` has the current rows, the manifest has the committed state. One writer lock serialises all changes,
including background compaction.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from daskps.budget import KEY_BYTES
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, CapacityError, CorruptionError, SnapshotError, StoreError
from daskps.ssd import recovery
from daskps.ssd.format import BLOCK_BYTES, DATA_ARRAYS, MANIFEST, SNAPSHOT_ARRAYS, SegmentShape, default_file_rows
from daskps.ssd.live_rows import LiveRows
from daskps.ssd.manifest import Manifest, PartitionSnapshot, SnapshotState
from daskps.ssd.options import STALE_FRACTION, Compactor, Options, Statistics
from daskps.storage.files import Files, disk_error, files_at
from daskps.storage.row_store import Positions
from daskps.types import Bools, Floats, Int64s, Keys, RowLayout


class Store:
    """One partition. Get it with `create` or `open`; close it, or use it in a `with`."""

    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        pool: ComputePool,
        options: Options,
        io: Executor | None,
        read_only: bool,
    ) -> None:
        self.shape = manifest.shape
        self.read_only = read_only
        self._files, self._manifest, self._pool, self._options = files, manifest, pool, options
        self._own_io = None if io is not None else ThreadPoolExecutor(options.io_threads, "daskps-ssd")
        self._io: Executor = io or self._own_io  # type: ignore[assignment]
        self._writer = threading.RLock()
        self._counters = Statistics()
        self._rows = LiveRows(files, manifest, pool, options, self._io, self._counters)
        self._unsaved_rows = 0  # rows appended since an index was saved last
        self._failure: Exception | None = None
        self._compactor: Compactor | None = None
        self._closed = False

    # ---- make, open, close

    @classmethod
    def create(
        cls,
        path: Any,
        layout: RowLayout,
        *,
        pool: ComputePool,
        model: str = "",
        file_rows: int | None = None,
        block_bytes: int = BLOCK_BYTES,
        options: Options | None = None,
        io: Executor | None = None,
    ) -> Store:
        """Create an empty store at `path`: a folder, any fsspec URL, or a Zarr store. `model` is the model's id."""
        files = files_at(path)
        manifest = Manifest(SegmentShape(layout, file_rows or default_file_rows(layout), block_bytes), model=model)
        try:
            files.make([*DATA_ARRAYS, *SNAPSHOT_ARRAYS])
            files.lock()
            if files.size(MANIFEST) >= 0:
                raise StoreError(f"{files.url}: there is a store already; open it, or choose another path")
            recovery.write_empty(files, manifest)
            return cls(files, manifest, pool, options or Options(), io, read_only=False)._begin(None, False)
        except OSError as error:
            files.close()
            raise disk_error(files, error, len(manifest.text()), []) from error
        except BaseException:
            files.close()
            raise

    @classmethod
    def open(
        cls,
        path: Any,
        *,
        pool: ComputePool,
        snapshot: str | None = None,
        model: str | None = None,
        digest: str = "",
        read_only: bool = False,
        rebuild_index: bool = False,
        options: Options | None = None,
        io: Executor | None = None,
    ) -> Store:
        """Open the store at `path` at `snapshot`, prepared or confirmed; by default at the newest confirmed one.

        The store must belong to the model with id `model`; a writer records the id in a store that has none. `digest`
        is the digest of this partition's part of the snapshot in the model's manifest, "" if it is not known. A writer
        removes and counts the files that no snapshot needs, which a crash leaves behind. Prepared snapshots stay until
        `confirm` or `discard` is called.
        """
        files = files_at(path)
        if not read_only:
            files.lock()
        try:
            manifest = recovery.read_manifest(files)
            if model is not None:
                recovery.check_model(files, manifest, model)
            chosen = manifest.newest() if snapshot is None else manifest.snapshot(snapshot)
            if digest and chosen is not None:
                recovery.check_digest(files, manifest, chosen, digest)
            store = cls(files, manifest, pool, options or Options(), io, read_only)._begin(chosen, rebuild_index)
            if model and not (read_only or manifest.model):
                store._record_model(model)
            return store
        except BaseException:
            files.close()
            raise

    def _begin(self, snapshot: PartitionSnapshot | None, rebuild_index: bool) -> Store:
        try:
            recovery.check_metadata(self._files, self._manifest)
            if not self.read_only:
                self._counters.recovered_files, self._counters.recovered_bytes = recovery.remove_orphans(
                    self._files, self._manifest
                )
            if snapshot is not None:
                recovery.open_snapshot(self._files, self._rows, snapshot, self._pool, self._io, rebuild_index)
            self._rows.adopt(self._manifest)
        except BaseException:
            if self._own_io is not None:
                self._own_io.shutdown()
            raise
        if self._options.background_compaction and not self.read_only:
            self._compactor = Compactor(self._background_step, self._failed)
        return self

    def close(self) -> None:
        """Stop the threads and release the lock. Rows in no snapshot are lost; the next writer removes them."""
        if self._closed:
            return
        self._closed = True
        if self._compactor is not None:
            self._compactor.close()
        with self._writer:
            self._rows.segments.wait()
            if self._own_io is not None:
                self._own_io.shutdown()
            self._files.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- rows

    def append(self, keys: Keys, rows: Floats) -> None:
        """Insert or replace rows (n, width); if a key occurs twice, its last row counts.

        An append that raises may have stored the first part of its rows; it is safe to append all of them again.
        """
        self.check_rows(keys, rows)
        self.append_from(keys, rows, None)

    def append_from(self, keys: Keys, rows: Floats, positions: Int64s | None) -> None:
        """Insert or replace rows: of ``keys[i]`` the row ``rows[positions[i]]``. Arguments are not checked."""
        with self._writer:
            self._ready()
            self._rows.compact_and_write()
            self._rows.append(keys, rows, positions)
            self._counters.appended_rows += len(keys)
            self._counters.appended_bytes += len(keys) * (KEY_BYTES + self.shape.row_bytes)
            self._unsaved_rows += len(keys)
        self._wake_compactor()

    def load(self, keys: Keys, out: Floats | None = None) -> tuple[Floats, Bools]:
        """Return the rows (n, width) of the keys, and a mask of the keys that were found.

        Rows of other keys are zeros, or unchanged if `out` is given.
        """
        self.check_keys(keys)
        if out is None:
            out = np.zeros((len(keys), self.shape.layout.width), np.float32)
        self.check_rows(keys, out)
        return out, self._rows.load(keys, None, out)

    def load_into(self, keys: Keys, positions: Positions, out: Floats) -> Bools:
        """Copy the row of ``keys[i]`` to ``out[positions[i]]``; return a mask of the keys that were found.

        Arguments are not checked.
        """
        return self._rows.load(keys, positions, out)

    def delete(self, keys: Keys) -> Bools:
        """Delete keys; return a mask of those that existed. The next snapshot makes it durable, as every change."""
        self.check_keys(keys)
        with self._writer:
            self._ready()
            found = self._rows.delete(keys)
            self._counters.deleted_rows += int(np.count_nonzero(found))
            with contextlib.suppress(CapacityError):  # the next append raises it again
                self._rows.compact_and_write()
        self._wake_compactor()
        return found

    def scan(self, snapshot: str | None = None) -> Iterator[tuple[Keys, Floats]]:
        """Yield all live keys and rows, of the current state or of a snapshot, one segment at a time; keys unsorted."""
        if snapshot is None:
            return self._rows.scan()
        return recovery.scan(self._files, self.shape, self._manifest.snapshot(snapshot), self._io, self._pool)

    def __len__(self) -> int:
        with self._rows.lock:
            return len(self._rows.index)

    # ---- snapshots

    def snapshots(self) -> list[PartitionSnapshot]:
        """Return all snapshots, oldest first."""
        return list(self._manifest.snapshots)

    def prepared(self) -> list[str]:
        """Return the ids of the snapshots that are neither confirmed nor discarded yet."""
        return [snapshot.id for snapshot in self._manifest.snapshots if snapshot.state == "prepared"]

    def confirmed(self) -> list[str]:
        """Return the ids of the confirmed snapshots."""
        return [snapshot.id for snapshot in self._manifest.snapshots if snapshot.state == "confirmed"]

    def prepare(self, snapshot_id: str, *, save_index: bool | None = None) -> PartitionSnapshot:
        """Make the current state durable under a new id (first phase of a commit); `confirm` or `discard` follows.

        `save_index` says whether the index is saved too. By default it is, if at least as many rows as it has keys were
        appended since it was saved last and the disk budget has room. So frequent snapshots write mostly rows; opening
        one without an index rebuilds it from the keys.
        """
        return self._snapshot(snapshot_id, save_index, "prepared")

    def commit(self, snapshot_id: str, *, save_index: bool | None = None) -> PartitionSnapshot:
        """Prepare and confirm in one step."""
        return self._snapshot(snapshot_id, save_index, "confirmed")

    def confirm(self, snapshot_id: str) -> None:
        """Make a prepared snapshot valid. Does nothing if it is confirmed already."""
        with self._writer:
            self._ready()
            if self._manifest.snapshot(snapshot_id).state == "prepared":
                self._replace(self._manifest.confirmed(snapshot_id))

    def discard(self, snapshot_id: str) -> None:
        """Remove a prepared snapshot."""
        if self._manifest.snapshot(snapshot_id).state != "prepared":
            raise SnapshotError(f"snapshot {snapshot_id!r} is confirmed; drop it if it is not wanted any more")
        self._forget({snapshot_id})

    def drop(self, snapshot_id: str) -> None:
        """Remove a confirmed snapshot. Its segments are deleted when no other snapshot and no live row needs them."""
        if self._manifest.snapshot(snapshot_id).state != "confirmed":
            raise SnapshotError(f"snapshot {snapshot_id!r} is only prepared; confirm or discard it")
        self._forget({snapshot_id})

    def digest(self, snapshot_id: str) -> str:
        """Return the digest of this partition's part of a snapshot, for the model's manifest."""
        manifest = self._manifest
        return manifest.digest(manifest.snapshot(snapshot_id))

    def verify(self, published: Mapping[str, str] | None = None) -> int:
        """Check every byte of every snapshot; return the bytes checked. Raises CorruptionError at the first damage.

        With `published`, only these snapshots are checked: digests by id (see recovery.verify). A read-only store
        checks what is in its folder now: a run may have changed it since it was opened.
        """
        with self._writer:
            stored = recovery.read_manifest(self._files)
            if self.read_only:
                recovery.check_model(self._files, stored, self._manifest.model or stored.model)
            elif stored != self._manifest:
                raise CorruptionError(
                    f"{self._files.url}/{MANIFEST}: generation {stored.generation} is on disk, "
                    f"{self._manifest.generation} was written; another process has replaced it"
                )
            return recovery.verify(self._files, stored, self._io, self._pool, published)

    # ---- compaction and figures

    def compact(self, min_stale_fraction: float = STALE_FRACTION) -> int:
        """Compact segments with a larger stale fraction than `min_stale_fraction`; return their number.

        Segments whose compaction would break the bound on disk use are left as they are.
        """
        moved = 0
        with self._writer:
            self._ready()
            while (number := self._rows.victim(min_stale_fraction)) is not None:
                self._rows.move(number)
                self._rows.compact_and_write()
                moved += 1
        return moved

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory of index, live bits, block checksums and write buffers."""
        return self._rows.memory_bytes

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of memory of write buffers. They are allocated when they are needed."""
        return self._rows.segments.buffer_bytes

    @property
    def disk_bytes(self) -> int:
        """Return the bytes on disk: segments of the current state and of snapshots, live bits, indexes, manifest."""
        return self._rows.disk_bytes

    def stats(self) -> Statistics:
        """Return the counters since the store was opened, and its size."""
        with self._rows.lock:
            return replace(
                self._counters,
                files=len(self._rows.segments.current),
                live_rows=self._rows.live_bits.live_rows,
                stale_rows=self._rows.live_bits.stale_rows,
                disk_bytes=self.disk_bytes,
                memory_bytes=self.memory_bytes,
            )

    # ---- inside

    def _snapshot(self, snapshot_id: str, save_index: bool | None, state: SnapshotState) -> PartitionSnapshot:
        if not snapshot_id or len(snapshot_id) > 200:
            raise ArgumentError(f"a snapshot id has 1 to 200 characters, got {len(snapshot_id)}")
        with self._writer:
            self._ready()
            if any(snapshot.id == snapshot_id for snapshot in self._manifest.snapshots):
                raise SnapshotError(f"there is a snapshot {snapshot_id!r} already; choose another id, or drop it first")
            self._rows.compact_and_write()
            self._rows.compact_for_snapshot()
            try:
                entries = self._rows.flush()
            except OSError as error:  # fsync failed: the kernel may have dropped the bytes, so stop writing
                self._failure = error
                raise StoreError(
                    f"{self._files.url}: fsync failed ({error}); close the store and open it at its last snapshot"
                ) from error
            if save_index is None:
                index_bytes = self._rows.index.memory_bytes
                enough = self._unsaved_rows >= self._rows.live_bits.live_rows
                save_index = enough and self._rows.has_room(index_bytes)
            number = self._manifest.next_number
            try:
                snapshot, sent = recovery.write_snapshot(
                    self._files, self._rows, self._pool, self._manifest, snapshot_id, state, entries, save_index
                )
                self._publish(self._manifest.with_snapshot(snapshot))
                self._counters.written_bytes += sent
            except OSError as error:
                recovery.remove_saved(self._files, number)
                raise disk_error(self._files, error, self._rows.index.memory_bytes, self._rows.disk_terms()) from error
            if save_index:
                self._unsaved_rows = 0
            return snapshot

    def _record_model(self, model: str) -> None:
        """Record the model's id in a store that has none."""
        with self._writer:
            self._replace(replace(self._manifest, generation=self._manifest.generation + 1, model=model))

    def _replace(self, manifest: Manifest) -> None:
        try:
            self._publish(manifest)
        except OSError as error:
            raise disk_error(self._files, error, len(manifest.text()), self._rows.disk_terms()) from error

    def _publish(self, manifest: Manifest) -> None:
        text = manifest.text()
        try:
            self._files.replace(MANIFEST, text)
        except StoreError as error:  # unknown which manifest a power cut would leave: stop writing
            self._failure = error
            raise
        self._counters.written_bytes += len(text)
        self._manifest = manifest
        self._rows.adopt(manifest)

    def _forget(self, ids: set[str]) -> None:
        with self._writer:
            self._ready()
            before = self._manifest
            self._replace(before.without(ids))
            for snapshot in before.snapshots:
                if snapshot.id in ids:
                    recovery.remove_saved(self._files, snapshot.number)
            with contextlib.suppress(CapacityError):
                self._rows.compact_and_write()
        self._wake_compactor()

    def _ready(self) -> None:
        if self._closed or self.read_only:
            raise StoreError(f"{self._files.url}: the store is {'closed' if self._closed else 'open for reading only'}")
        if self._failure is not None:
            raise StoreError(f"{self._files.url}: an earlier write failed ({self._failure}); open the store again")

    def check_keys(self, keys: Keys) -> None:
        """Raise ArgumentError unless `keys` is an array of keys."""
        if keys.dtype != np.uint64 or keys.ndim != 1 or not keys.flags.c_contiguous:
            raise ArgumentError(f"keys must be a contiguous (n,) array of uint64, got {keys.shape} of {keys.dtype}")

    def check_rows(self, keys: Keys, rows: Floats) -> None:
        """Raise ArgumentError unless `keys` is an array of keys and `rows` has a row for each of them."""
        self.check_keys(keys)
        wanted = (len(keys), self.shape.layout.width)
        if rows.dtype != np.float32 or rows.shape != wanted or not rows.flags.c_contiguous:
            raise ArgumentError(
                f"rows must be a contiguous {wanted} array of float32 (this store's rows have "
                f"{self.shape.layout.width} values), got {rows.shape} of {rows.dtype}"
            )

    def _wake_compactor(self) -> None:
        if self._compactor is not None and self._rows.over(self._options.compact_above):
            self._compactor.wake()

    def _background_step(self) -> bool:
        with self._writer:
            if self._closed or self._failure or not self._rows.over(self._options.compact_above):
                return False
            number = self._rows.victim(STALE_FRACTION)
            if number is None:
                return False
            self._rows.move(number)
            self._rows.compact_and_write()
            return True

    def _failed(self, error: Exception) -> None:
        """Handle an error of background compaction: it stops the writer, unless the disk is full.

        The next append raises the error of a full disk again.
        """
        if not isinstance(error, CapacityError):
            self._failure = error
