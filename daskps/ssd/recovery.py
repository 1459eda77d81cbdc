"""Snapshots of a partition: live bits and index are saved and read here; a store is opened, cleaned up and verified."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor

import numpy as np

from daskps.device.pool import ComputePool
from daskps.errors import CorruptionError, StoreError
from daskps.ssd.format import (
    BLOCK_BYTES,
    DATA_ARRAYS,
    FORMAT,
    MANIFEST,
    SNAPSHOT_ARRAYS,
    ZARR_JSON,
    SegmentShape,
    block_sums,
    bytes_array_text,
    chunk_names,
    crc32c,
    data_array_texts,
    group_text,
)
from daskps.ssd.index import CELL_BYTES, GROUPS, NARROW, WIDE, Bytes, IndexImage, KeyIndex
from daskps.ssd.live_bits import LiveBits
from daskps.ssd.live_rows import LiveRows
from daskps.ssd.manifest import Manifest, PartitionSnapshot, SegmentEntry, SnapshotState, parse
from daskps.ssd.options import Statistics
from daskps.ssd.segments import Segment, SegmentFiles, read_ahead, read_sums
from daskps.storage.files import Files
from daskps.types import Floats, Keys


def array_names(array: str, number: int) -> tuple[str, str]:
    """Return the names of zarr.json and of the only chunk of live/<number> or index/<number>."""
    return f"{array}/{number}/zarr.json", f"{array}/{number}/c.0"


def write_live(files: Files, number: int, bits: Bytes) -> tuple[int, int]:
    """Write the live bits, without sync; return their checksum and the bytes sent."""
    metadata, chunk = array_names("live", number)
    text = bytes_array_text(len(bits))
    sent = files.write(metadata, [text], len(text))
    if len(bits):  # an empty array has no chunk
        sent += files.write(chunk, [bits], len(bits))
    return crc32c(bits), sent


def write_snapshot(
    files: Files,
    rows: LiveRows,
    pool: ComputePool,
    manifest: Manifest,
    snapshot_id: str,
    state: SnapshotState,
    entries: list[SegmentEntry],
    save_index: bool,
) -> tuple[PartitionSnapshot, int]:
    """Write everything of a snapshot except the manifest, durably; return the snapshot and the bytes sent."""
    number = manifest.next_number
    reach = max((entry.number for entry in entries), default=-1) + 1
    bits = rows.live_bits.snapshot_bits(reach)
    live_crc, sent = write_live(files, number, bits)
    names = [name for name in array_names("live", number) if len(bits) or name.endswith("json")]
    index_bytes = index_crc = None
    if save_index:
        index_bytes, index_crc, more = write_index(files, number, rows.index, pool)
        names += array_names("index", number)
        sent += more
    files.sync([*names, *(f"{array}/zarr.json" for array in DATA_ARRAYS)])  # syncs the folders of all arrays too
    if reach > manifest.array_files:
        for array, text in data_array_texts(rows.shape, reach).items():
            files.replace(f"{array}/zarr.json", text)
    snapshot = PartitionSnapshot(
        id=snapshot_id,
        number=number,
        state=state,
        live_rows=rows.live_bits.live_rows,
        files=tuple(entries),
        live_bytes=len(bits),
        live_crc32c=live_crc,
        index_bytes=index_bytes,
        index_crc32c=index_crc,
        changed_rows=rows.changed_rows,
    )
    return snapshot, sent


def read_live(files: Files, snapshot: PartitionSnapshot) -> Bytes:
    """Return the live bits of a snapshot, after checking them."""
    metadata, chunk = array_names("live", snapshot.number)
    _check_array_text(files, metadata, snapshot.live_bytes)
    bits = np.empty(snapshot.live_bytes, np.uint8)
    if len(bits):
        _check_size(files, chunk, len(bits))
        files.read_into(chunk, 0, [bits])
    if crc32c(bits) != snapshot.live_crc32c:
        raise CorruptionError(
            f"{files.url}/{chunk} (array live/{snapshot.number}): the live bits of snapshot {snapshot.id!r} do not "
            "match the manifest; restore the file from a copy, or open another snapshot"
        )
    return bits


def write_index(files: Files, number: int, index: KeyIndex, pool: ComputePool) -> tuple[int, int, int]:
    """Write the index, without sync; return its size in bytes, the checksum of its head, and the bytes sent."""
    image = index.image()
    groups = np.empty((GROUPS, 5), np.uint64)
    groups[:, 0], groups[:, 1], groups[:, 2] = image.capacities, image.keys, image.removed
    groups[:, 3] = image.starts[:, -1]
    groups[:, 4] = pool.map(lambda cells: crc32c(block_sums(cells, cells.nbytes, BLOCK_BYTES)), image.cells)
    head = np.concatenate([np.array([image.bits], np.uint64), groups.reshape(-1)])
    pieces = [head, image.starts, *image.cells]
    length = sum(piece.nbytes for piece in pieces)
    metadata, chunk = array_names("index", number)
    text = bytes_array_text(length)
    sent = files.write(metadata, [text], len(text)) + files.write(chunk, pieces, length)
    return length, crc32c(head, image.starts), sent


def read_index(files: Files, snapshot: PartitionSnapshot, pool: ComputePool, io: Executor) -> KeyIndex:
    """Return the saved index of a snapshot that has one, after checking it."""
    assert snapshot.index_bytes is not None
    metadata, chunk = array_names("index", snapshot.number)
    _check_array_text(files, metadata, snapshot.index_bytes)
    _check_size(files, chunk, snapshot.index_bytes)
    head = np.empty(1 + 5 * GROUPS, np.uint64)
    files.read_into(chunk, 0, [head])
    if head[0] not in (NARROW, WIDE):
        raise _damaged(files, chunk, snapshot.number, "the head")
    starts = np.empty((GROUPS, (1 << (56 - int(head[0]))) + 1), np.uint32)
    files.read_into(chunk, head.nbytes, [starts])
    if crc32c(head, starts) != snapshot.index_crc32c:
        raise _damaged(files, chunk, snapshot.number, "the head")
    groups = head[1:].reshape(GROUPS, 5).astype(np.int64)
    ends = np.cumsum(groups[:, 3]) * CELL_BYTES
    # One allocation for all groups: it gets huge pages, whose page faults take a third of the time of small pages.
    memory = np.empty(int(ends[-1]), np.uint8)

    def read(group: int) -> Bytes:
        cells = memory[int(ends[group] - groups[group, 3] * CELL_BYTES) : int(ends[group])]
        first = head.nbytes + starts.nbytes + int(ends[group]) - cells.nbytes
        sums = read_sums(files, chunk, first, cells, BLOCK_BYTES)
        if crc32c(sums) != groups[group, 4]:
            raise _damaged(files, chunk, snapshot.number, f"group {group}")
        return cells

    capacities, keys, removed = (groups[:, column].copy() for column in range(3))
    cells = list(io.map(read, range(GROUPS)))
    return KeyIndex.from_image(pool, IndexImage(int(head[0]), capacities, keys, removed, starts, cells))


def _damaged(files: Files, chunk: str, number: int, what: str) -> CorruptionError:
    return CorruptionError(
        f"{files.url}/{chunk} (array index/{number}): {what} is damaged; open the store with rebuild_index=True, which "
        "reads the keys instead"
    )


def _check_array_text(files: Files, name: str, length: int) -> None:
    text = files.read(name)
    ZARR_JSON.read(text, f"{files.url}/{name}")
    if text != bytes_array_text(length):
        raise CorruptionError(f"{files.url}/{name}: the array should have {length} bytes; restore the file from a copy")


def _check_size(files: Files, name: str, size: int) -> None:
    actual = files.size(name)
    if actual != size:
        what = "is missing" if actual < 0 else f"has {actual} bytes instead of {size}"
        raise CorruptionError(f"{files.url}/{name}: the file {what}; restore it from a copy")


# Only files with names that a store creates are removed; other files in the folder stay.
_REMOVABLE = re.compile(
    r"(keys/c\.\d+|rows/c\.\d+\.0|checksums/c\.\d+|(live|index)/\d+/(zarr\.json|c\.0)|(.*/)?\w+\.json\.new)"
)


def read_manifest(files: Files) -> Manifest:
    """Read and return the manifest of a partition."""
    if files.size(MANIFEST) < 0:
        raise StoreError(
            f"{files.url}: no {MANIFEST} there, so no store; check the path, or make one with Store.create"
        )
    return parse(files.url, files.read(MANIFEST))


def check_model(files: Files, manifest: Manifest, model: str) -> None:
    """Raise CorruptionError if a partition belongs to another model than `model`. A partition without an id passes."""
    if manifest.model not in ("", model):
        raise CorruptionError(
            f"{files.url} is a partition of model {manifest.model}, but the log is that of model {model or '(no id)'}; "
            "restore the partition from a copy of the same model"
        )


def check_digest(files: Files, manifest: Manifest, snapshot: PartitionSnapshot, digest: str) -> None:
    """Raise CorruptionError if this partition's part of a snapshot does not have the digest that was published."""
    if (found := manifest.digest(snapshot)) != digest:
        raise CorruptionError(
            f"{files.url}: its part of snapshot {snapshot.id!r} is not the one that was published (digest {found}, the "
            f"model's manifest says {digest}): this is a folder of another model or another time; restore its own"
        )


def snapshot_names(snapshot: PartitionSnapshot) -> list[str]:
    """Return the names of all files that this snapshot needs, except the manifest."""
    names = ["zarr.json", *(f"{array}/zarr.json" for array in (*DATA_ARRAYS, *SNAPSHOT_ARRAYS))]
    names += [name for entry in snapshot.files for name in chunk_names(entry.number)]
    for array, size in (("live", snapshot.live_bytes), ("index", snapshot.index_bytes)):
        if size is not None:
            metadata, chunk = array_names(array, snapshot.number)
            names += [metadata, chunk] if size else [metadata]  # an empty array has no chunk
    return names


def write_empty(files: Files, manifest: Manifest) -> None:
    """Write the metadata of a store without rows. The manifest comes last: with it, the store exists."""
    files.replace("zarr.json", group_text({"format": FORMAT}))
    for array, text in data_array_texts(manifest.shape, 0).items():
        files.replace(f"{array}/zarr.json", text)
    for array in SNAPSHOT_ARRAYS:
        files.replace(f"{array}/zarr.json", group_text({}))
    files.replace(MANIFEST, manifest.text())


def check_metadata(files: Files, manifest: Manifest) -> None:
    """Check that every zarr.json is as it was written, and that the data arrays are long enough for the manifest."""
    for name in ("zarr.json", *(f"{array}/zarr.json" for array in SNAPSHOT_ARRAYS)):
        ZARR_JSON.read(files.read(name), f"{files.url}/{name}")
    for array in DATA_ARRAYS:
        name = f"{array}/zarr.json"
        text = files.read(name)
        document = ZARR_JSON.read(text, f"{files.url}/{name}")
        per_file = manifest.shape.blocks if array == "checksums" else manifest.shape.file_rows
        reach = document["shape"][0] // per_file
        # A crash between writing these files and the manifest leaves them longer than the manifest says, never shorter.
        if reach < manifest.array_files or text != data_array_texts(manifest.shape, reach)[array]:
            raise CorruptionError(
                f"{files.url}/{name}: array {array} is not the one of the manifest ({manifest.array_files} files of "
                f"{manifest.shape.file_rows} rows of {manifest.shape.layout.width} values); restore it from a copy"
            )


def remove_orphans(files: Files, manifest: Manifest) -> tuple[int, int]:
    """Remove files that no snapshot needs; return their number and bytes."""
    needed = {name for number in manifest.kept() for name in chunk_names(number)}
    for snapshot in manifest.snapshots:
        for array in SNAPSHOT_ARRAYS:
            needed.update(array_names(array, snapshot.number))
    orphans = [name for name in files.names() if _REMOVABLE.fullmatch(name) and name not in needed]
    size = sum(max(0, files.size(name)) for name in orphans)
    for name in orphans:
        files.remove(name)
    for folder in {
        name.rpartition("/")[0] for name in orphans if name.count("/") == 2
    }:  # live/<number>, index/<number>
        if not files.list_folder(folder):
            files.remove_folder(folder)
    return len(orphans), size


def open_snapshot(
    files: Files, rows: LiveRows, snapshot: PartitionSnapshot, pool: ComputePool, io: Executor, from_keys: bool
) -> None:
    """Make a snapshot the current state of an empty rows.

    The index is read if it was saved; otherwise, or with `from_keys`, it is rebuilt from the keys.
    """
    bits = read_live(files, snapshot)
    size = rows.shape.file_rows // 8
    rows.changed_rows = snapshot.changed_rows
    for entry in snapshot.files:
        rows.segments.adopt(entry)
        rows.live_bits.restore(entry.number, entry.rows, bits[entry.number * size : (entry.number + 1) * size])
    if snapshot.index_bytes is not None and not from_keys:
        rows.index = read_index(files, snapshot, pool, io)
    else:
        rows.index = rebuild_index(rows.segments, rows.live_bits, rows.shape, pool, io)
    if not len(rows.index) == rows.live_bits.live_rows == snapshot.live_rows:
        raise CorruptionError(
            f"{files.url}: snapshot {snapshot.id!r} has {snapshot.live_rows} rows by the manifest, "
            f"{rows.live_bits.live_rows} by its live bits, {len(rows.index)} by its index; restore it from a copy"
        )


def remove_saved(files: Files, number: int) -> None:
    """Remove the live bits and the index of a snapshot. Opening the store removes what an error leaves behind."""
    for array in SNAPSHOT_ARRAYS:
        with contextlib.suppress(OSError):
            files.remove_folder(f"{array}/{number}")


def rebuild_index(
    segments: SegmentFiles, live_bits: LiveBits, shape: SegmentShape, pool: ComputePool, io: Executor
) -> KeyIndex:
    """Build the index of the current segments from their keys and live bits."""
    index, expected_more = KeyIndex(pool), live_bits.live_rows
    index.reserve(expected_more, live_bits.files * shape.file_rows)
    for segment, keys in read_ahead(io, segments.keys, list(segments.current.values())):
        base, live = segment.number * shape.file_rows, live_bits.live_of(segment.number)
        expected_more -= live
        if live == segment.count:
            index.insert(keys, np.arange(base, base + live, dtype=np.uint32), expected_more)
        else:
            positions = live_bits.live_positions(segment.number)
            index.insert(keys[positions], (positions + base).astype(np.uint32), expected_more)
    return index


def scan(
    files: Files, shape: SegmentShape, snapshot: PartitionSnapshot, io: Executor, pool: ComputePool
) -> Iterator[tuple[Keys, Floats]]:
    """Yield the live keys and rows of a snapshot, one segment at a time."""
    segments = SegmentFiles(files, shape, io, threading.RLock(), Statistics(), pool)
    bits = read_live(files, snapshot)
    size = shape.file_rows // 8

    return segments.scan(
        (Segment(entry.number, entry.rows, checksum=entry.crc32c), bits[entry.number * size :][:size])
        for entry in snapshot.files
    )


def verify(
    files: Files, manifest: Manifest, io: Executor, pool: ComputePool, published: Mapping[str, str] | None = None
) -> int:
    """Check every byte that a snapshot needs; return the number of bytes checked.

    If `published` is given, exactly these snapshots are checked: by id, the digest of this partition's part ("" if it
    is not known). All of them must exist. Others are skipped, because a run may be making or dropping them now.
    """
    snapshots = manifest.snapshots
    if published is not None:
        if missing := sorted(published.keys() - {snapshot.id for snapshot in snapshots}):
            raise CorruptionError(
                f"{files.url}/{MANIFEST} has no part of {', '.join(missing)}, which the model's log names; restore the "
                "partition from a copy of the same model"
            )
        snapshots = tuple(snapshot for snapshot in snapshots if snapshot.id in published)
        for snapshot in snapshots:
            if published[snapshot.id]:
                check_digest(files, manifest, snapshot, published[snapshot.id])
    check_metadata(files, manifest)
    total = len(manifest.text())
    for snapshot in snapshots:
        bits = read_live(files, snapshot)
        live = int(np.bitwise_count(bits).sum())
        if live != snapshot.live_rows:
            raise CorruptionError(
                f"{files.url}: snapshot {snapshot.id!r} has {live} live bits, the manifest says {snapshot.live_rows}"
            )
        total += snapshot.live_bytes
        if snapshot.index_bytes is not None:
            read_index(files, snapshot, pool, io)
            total += snapshot.index_bytes
    segments = SegmentFiles(files, manifest.shape, io, threading.RLock(), Statistics(), pool)
    needed = {entry.number: entry for snapshot in snapshots for entry in snapshot.files}
    kept = [Segment(entry.number, entry.rows, checksum=entry.crc32c) for entry in needed.values()]
    return total + sum(size for _, size in read_ahead(io, segments.check, kept))
