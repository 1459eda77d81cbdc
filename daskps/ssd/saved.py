"""What a snapshot saves beside its parameter files: the live bits, and an image of the index that opens at disk speed.

In: bits and index of the current state. Out: two small Zarr arrays of bytes; and back again, checked.

The image: a head of uint64 (the bits of the hash in a slot; then of each of 256 groups the capacity, keys, removed
keys, slots and checksum), the uint32 bucket starts of all groups, and the 10-byte slots, group by group. The manifest
holds the checksum of head and starts, the head those of the groups: the CRC-32C of the CRC-32Cs of their 4 KiB blocks.
"""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.errors import CorruptionError
from daskps.ssd.checked import read_sums
from daskps.ssd.checksum import block_sums, crc32c
from daskps.ssd.files import Files
from daskps.ssd.format import BLOCK_BYTES, DATA_ARRAYS, bytes_array_text, check_sealed, data_array_texts
from daskps.ssd.index import GROUPS, NARROW, SLOT_BYTES, WIDE, Bytes, IndexImage, KeyIndex
from daskps.ssd.manifest import FileEntry, Manifest, Snapshot, State
from daskps.ssd.stock import Stock


def array_names(array: str, number: int) -> tuple[str, str]:
    """zarr.json and the one chunk of live/<number> or index/<number>."""
    return f"{array}/{number}/zarr.json", f"{array}/{number}/c.0"


def write_live(files: Files, number: int, bits: Bytes) -> tuple[int, int]:
    """Write the live bits, not yet synced; returns their checksum and the bytes sent."""
    metadata, chunk = array_names("live", number)
    text = bytes_array_text(len(bits))
    sent = files.write(metadata, [text], len(text))
    if len(bits):  # an empty array has no chunk
        sent += files.write(chunk, [bits], len(bits))
    return crc32c(bits), sent


def write_snapshot(
    files: Files,
    stock: Stock,
    pool: ComputePool,
    manifest: Manifest,
    snapshot_id: str,
    state: State,
    entries: list[FileEntry],
    save_index: bool,
) -> tuple[Snapshot, int]:
    """Everything of a snapshot but the manifest, durable; returns it and the bytes sent."""
    number = manifest.next_number
    reach = max((entry.number for entry in entries), default=-1) + 1
    bits = stock.ledger.snapshot_bits(reach)
    live_crc, sent = write_live(files, number, bits)
    names = [name for name in array_names("live", number) if len(bits) or name.endswith("json")]
    index_bytes = index_crc = None
    if save_index:
        index_bytes, index_crc, more = write_index(files, number, stock.index, pool)
        names += array_names("index", number)
        sent += more
    files.sync([*names, *(f"{array}/zarr.json" for array in DATA_ARRAYS)])  # and so the folders of all arrays
    if reach > manifest.array_files:
        for array, text in data_array_texts(stock.shape, reach).items():
            files.publish(f"{array}/zarr.json", text)
    snapshot = Snapshot(
        id=snapshot_id,
        number=number,
        state=state,
        live_rows=stock.ledger.live_rows,
        files=tuple(entries),
        live_bytes=len(bits),
        live_crc32c=live_crc,
        index_bytes=index_bytes,
        index_crc32c=index_crc,
    )
    return snapshot, sent


def read_live(files: Files, snapshot: Snapshot) -> Bytes:
    """The live bits of a snapshot, checked."""
    metadata, chunk = array_names("live", snapshot.number)
    _check_metadata(files, metadata, snapshot.live_bytes)
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
    """Write an image of the index, not yet synced; returns its length, its head's checksum and the bytes sent."""
    image = index.image()
    groups = np.empty((GROUPS, 5), np.uint64)
    groups[:, 0], groups[:, 1], groups[:, 2] = image.capacities, image.keys, image.removed
    groups[:, 3] = image.starts[:, -1]
    groups[:, 4] = pool.map(lambda slots: crc32c(block_sums(slots, slots.nbytes, BLOCK_BYTES)), image.slots)
    head = np.concatenate([np.array([image.bits], np.uint64), groups.reshape(-1)])
    pieces = [head, image.starts, *image.slots]
    length = sum(piece.nbytes for piece in pieces)
    metadata, chunk = array_names("index", number)
    text = bytes_array_text(length)
    sent = files.write(metadata, [text], len(text)) + files.write(chunk, pieces, length)
    return length, crc32c(head, image.starts), sent


def read_index(files: Files, snapshot: Snapshot, pool: ComputePool, io: Executor) -> KeyIndex:
    """The saved index of a snapshot that has one, checked."""
    assert snapshot.index_bytes is not None
    metadata, chunk = array_names("index", snapshot.number)
    _check_metadata(files, metadata, snapshot.index_bytes)
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
    ends = np.cumsum(groups[:, 3]) * SLOT_BYTES
    # All groups in one piece of memory: it gets huge pages, whose faults take a third of the time of small ones.
    memory = np.empty(int(ends[-1]), np.uint8)

    def read(group: int) -> Bytes:
        slots = memory[int(ends[group] - groups[group, 3] * SLOT_BYTES) : int(ends[group])]
        first = head.nbytes + starts.nbytes + int(ends[group]) - slots.nbytes
        sums = read_sums(files, chunk, first, slots, BLOCK_BYTES)
        if crc32c(sums) != groups[group, 4]:
            raise _damaged(files, chunk, snapshot.number, f"group {group}")
        return slots

    capacities, keys, removed = (groups[:, column].copy() for column in range(3))
    slots = list(io.map(read, range(GROUPS)))
    return KeyIndex.from_image(pool, IndexImage(int(head[0]), capacities, keys, removed, starts, slots))


def _damaged(files: Files, chunk: str, number: int, what: str) -> CorruptionError:
    return CorruptionError(
        f"{files.url}/{chunk} (array index/{number}): {what} is damaged; open the store with rebuild_index=True, which "
        "reads the keys instead"
    )


def _check_metadata(files: Files, name: str, length: int) -> None:
    text = files.read(name)
    check_sealed(f"{files.url}/{name}", text)
    if text != bytes_array_text(length):
        raise CorruptionError(f"{files.url}/{name}: the array should have {length} bytes; restore the file from a copy")


def _check_size(files: Files, name: str, size: int) -> None:
    actual = files.size(name)
    if actual != size:
        what = "is missing" if actual < 0 else f"has {actual} bytes instead of {size}"
        raise CorruptionError(f"{files.url}/{name}: the file {what}; restore it from a copy")
