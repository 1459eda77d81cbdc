"""Opening and checking: read the manifest, clean up after a crash, rebuild the index, verify every byte.

In: the files of a partition. Out: values for `Store`, or an error that names the file and what to do.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.errors import CorruptionError, StoreError
from daskps.ssd import saved
from daskps.ssd.files import Files
from daskps.ssd.format import (
    DATA_ARRAYS,
    FORMAT,
    MANIFEST,
    SNAPSHOT_ARRAYS,
    Shape,
    check_sealed,
    chunk_names,
    data_array_texts,
    group_text,
)
from daskps.ssd.index import KeyIndex
from daskps.ssd.ledger import Ledger
from daskps.ssd.manifest import Manifest, Snapshot, parse
from daskps.ssd.shelf import ParameterFile, Shelf, read_ahead
from daskps.ssd.statistics import Counters
from daskps.ssd.stock import Stock
from daskps.types import Floats, Keys

# Only names that a store makes are ever removed; whatever else someone put into the folder stays.
_OURS = re.compile(
    r"(keys/c\.\d+|rows/c\.\d+\.0|checksums/c\.\d+|(live|index)/\d+/(zarr\.json|c\.0)|(.*/)?\w+\.json\.new)"
)


def read_manifest(files: Files) -> Manifest:
    """The manifest of a partition."""
    if files.size(MANIFEST) < 0:
        raise StoreError(
            f"{files.url}: no {MANIFEST} there, so no store; check the path, or make one with Store.create"
        )
    return parse(files.url, files.read(MANIFEST))


def write_empty(files: Files, manifest: Manifest) -> None:
    """The metadata of a store without rows; the manifest comes last, and makes it one."""
    files.publish("zarr.json", group_text({"format": FORMAT}))
    for array, text in data_array_texts(manifest.shape, 0).items():
        files.publish(f"{array}/zarr.json", text)
    for array in SNAPSHOT_ARRAYS:
        files.publish(f"{array}/zarr.json", group_text({}))
    files.publish(MANIFEST, manifest.text())


def check_metadata(files: Files, manifest: Manifest) -> None:
    """Every zarr.json of the arrays and groups is as it was written, and reaches all files of the manifest."""
    for name in ("zarr.json", *(f"{array}/zarr.json" for array in SNAPSHOT_ARRAYS)):
        check_sealed(f"{files.url}/{name}", files.read(name))
    for array in DATA_ARRAYS:
        name = f"{array}/zarr.json"
        text = files.read(name)
        document = check_sealed(f"{files.url}/{name}", text)
        per_file = manifest.shape.blocks if array == "checksums" else manifest.shape.file_rows
        reach = document["shape"][0] // per_file
        # A crash between these files and the manifest leaves them longer than it says; never shorter.
        if reach < manifest.array_files or text != data_array_texts(manifest.shape, reach)[array]:
            raise CorruptionError(
                f"{files.url}/{name}: array {array} is not the one of the manifest ({manifest.array_files} files of "
                f"{manifest.shape.file_rows} rows of {manifest.shape.layout.width} values); restore it from a copy"
            )


def clean(files: Files, manifest: Manifest) -> tuple[int, int]:
    """Remove what no snapshot needs; returns how many files and bytes."""
    needed = {name for number in manifest.kept() for name in chunk_names(number)}
    for snapshot in manifest.snapshots:
        for array in SNAPSHOT_ARRAYS:
            needed.update(saved.array_names(array, snapshot.number))
    orphans = [name for name in files.names() if _OURS.fullmatch(name) and name not in needed]
    size = sum(max(0, files.size(name)) for name in orphans)
    for name in orphans:
        files.remove(name)
    return len(orphans), size


def take_up(files: Files, stock: Stock, snapshot: Snapshot, pool: ComputePool, io: Executor, from_keys: bool) -> None:
    """Make a snapshot the current state of an empty stock; its index is read, or made from the keys."""
    bits = saved.read_live(files, snapshot)
    size = stock.shape.file_rows // 8
    for entry in snapshot.files:
        stock.shelf.adopt(entry)
        stock.ledger.restore(entry.number, entry.rows, bits[entry.number * size : (entry.number + 1) * size])
    if snapshot.index_bytes is not None and not from_keys:
        stock.index = saved.read_index(files, snapshot, pool, io)
    else:
        stock.index = rebuild_index(stock.shelf, stock.ledger, stock.shape, pool, io)
    if not len(stock.index) == stock.ledger.live_rows == snapshot.live_rows:
        raise CorruptionError(
            f"{files.url}: snapshot {snapshot.id!r} has {snapshot.live_rows} rows by the manifest, "
            f"{stock.ledger.live_rows} by its live bits, {len(stock.index)} by its index; restore it from a copy"
        )


def remove_saved(files: Files, number: int) -> None:
    """Remove live bits and index of a snapshot; what stays after an error is cleaned when the store is opened."""
    for array in SNAPSHOT_ARRAYS:
        for name in saved.array_names(array, number):
            with contextlib.suppress(OSError):
                files.remove(name)


def rebuild_index(shelf: Shelf, ledger: Ledger, shape: Shape, pool: ComputePool, io: Executor) -> KeyIndex:
    """The index of the current files, from their keys and live bits."""
    index, coming = KeyIndex(pool), ledger.live_rows
    index.reserve(coming, ledger.files * shape.file_rows)
    for file, keys in read_ahead(io, shelf.keys, list(shelf.current.values())):
        base, live = file.number * shape.file_rows, ledger.live_of(file.number)
        coming -= live
        if live == file.count:
            index.insert(keys, np.arange(base, base + live, dtype=np.uint32), coming)
        else:
            positions = ledger.live_positions(file.number)
            index.insert(keys[positions], (positions + base).astype(np.uint32), coming)
    return index


def scan(files: Files, shape: Shape, snapshot: Snapshot, io: Executor) -> Iterator[tuple[Keys, Floats]]:
    """Live keys and rows of a snapshot, one parameter file at a time."""
    shelf = Shelf(files, shape, io, threading.RLock(), Counters())
    bits = saved.read_live(files, snapshot)
    size = shape.file_rows // 8

    return shelf.scan(
        (ParameterFile(entry.number, entry.rows, checksum=entry.crc32c), bits[entry.number * size :][:size])
        for entry in snapshot.files
    )


def verify(files: Files, manifest: Manifest, io: Executor, pool: ComputePool) -> int:
    """Check every byte that any snapshot needs; returns their number."""
    stored = read_manifest(files)
    if stored != manifest:
        raise CorruptionError(
            f"{files.url}/{MANIFEST}: generation {stored.generation} is on disk, {manifest.generation} was written; "
            "another process has replaced it"
        )
    check_metadata(files, manifest)
    total = len(manifest.text())
    for snapshot in manifest.snapshots:
        bits = saved.read_live(files, snapshot)
        live = int(np.bitwise_count(bits).sum())
        if live != snapshot.live_rows:
            raise CorruptionError(
                f"{files.url}: snapshot {snapshot.id!r} has {live} live bits, the manifest says {snapshot.live_rows}"
            )
        total += snapshot.live_bytes
        if snapshot.index_bytes is not None:
            saved.read_index(files, snapshot, pool, io)
            total += snapshot.index_bytes
    shelf = Shelf(files, manifest.shape, io, threading.RLock(), Counters())
    kept = [ParameterFile(entry.number, entry.rows, checksum=entry.crc32c) for entry in manifest.kept().values()]
    return total + sum(size for _, size in read_ahead(io, shelf.check, kept))
