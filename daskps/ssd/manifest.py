"""The manifest of a partition: its snapshots and the segments that each one needs. It is replaced atomically.

Input: the text of manifest.json. Output: `Manifest` and `PartitionSnapshot`. Both are immutable: a change makes a new
value and a new text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from daskps.errors import SnapshotError, StoreError
from daskps.ssd.format import FORMAT, MANIFEST, MANIFEST_JSON, VERSION, SegmentShape, field_documents
from daskps.storage.sealed import canonical, checksum
from daskps.types import Field, RowLayout

SnapshotState = Literal["prepared", "confirmed"]


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment as recorded in a snapshot."""

    number: int
    rows: int  # rows written; the rest of the chunk is zeros
    crc32c: int  # of the segment's chunk of block checksums


@dataclass(frozen=True, slots=True)
class PartitionSnapshot:
    """A named state of the partition: its segments and their live rows."""

    id: str
    number: int  # in the paths live/<number> and index/<number>; larger for every new snapshot
    state: SnapshotState
    live_rows: int
    files: tuple[SegmentEntry, ...]
    live_bytes: int  # size of the live bits
    live_crc32c: int
    index_bytes: int | None  # None: no index was saved, so opening rebuilds it from the keys
    index_crc32c: int | None  # of the head of the saved index, which has the checksums of its groups
    changed_rows: int = 0  # rows appended or deleted before it since the store was created; 0 with older daskps

    @property
    def array_files(self) -> int:
        """Return the length that the data arrays need, in segments: the largest segment number plus one."""
        return max((entry.number for entry in self.files), default=-1) + 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The committed state of a partition."""

    shape: SegmentShape
    generation: int = 0  # number of replacements so far
    next_number: int = 1  # number of the next snapshot
    array_files: int = 0  # length of the data arrays by their zarr.json, in segments
    snapshots: tuple[PartitionSnapshot, ...] = ()
    model: str = ""  # id of the model that the rows belong to; "" if it is not known

    def snapshot(self, snapshot_id: str) -> PartitionSnapshot:
        """Return the snapshot with this id, or raise SnapshotError."""
        for snapshot in self.snapshots:
            if snapshot.id == snapshot_id:
                return snapshot
        known = ", ".join(f"{s.id!r} ({s.state})" for s in self.snapshots) or "none"
        raise SnapshotError(f"no snapshot {snapshot_id!r} here; there are: {known}")

    def digest(self, snapshot: PartitionSnapshot) -> str:
        """Return the XXH3 of everything that determines a snapshot's rows: shape, segments with checksums, live bits.

        The model's manifest keeps it, so that a partition of another model or of another time is detected. The state is
        left out because it changes, and the index because it follows from keys and live bits.
        """
        files = [[entry.number, entry.rows, entry.crc32c] for entry in snapshot.files]
        live = [snapshot.live_rows, snapshot.live_bytes, snapshot.live_crc32c]
        shape = [field_documents(self.shape.layout), self.shape.file_rows, self.shape.block_bytes]
        part = {"id": snapshot.id, "number": snapshot.number, "files": files, "live": live, "shape": shape}
        return checksum(canonical(part))

    def newest(self) -> PartitionSnapshot | None:
        """Return the newest confirmed snapshot, None if there is none."""
        confirmed = [snapshot for snapshot in self.snapshots if snapshot.state == "confirmed"]
        return max(confirmed, key=lambda snapshot: snapshot.number, default=None)

    def kept(self) -> dict[int, SegmentEntry]:
        """Return all segments that some snapshot needs, by number."""
        return {entry.number: entry for snapshot in self.snapshots for entry in snapshot.files}

    def with_snapshot(self, snapshot: PartitionSnapshot) -> Manifest:
        """Return a manifest with one more snapshot."""
        return replace(
            self,
            generation=self.generation + 1,
            next_number=snapshot.number + 1,
            array_files=max(snapshot.array_files, self.array_files),
            snapshots=(*self.snapshots, snapshot),
        )

    def without(self, ids: set[str]) -> Manifest:
        """Return a manifest without these snapshots."""
        kept = tuple(snapshot for snapshot in self.snapshots if snapshot.id not in ids)
        return replace(self, generation=self.generation + 1, snapshots=kept)

    def confirmed(self, snapshot_id: str) -> Manifest:
        """Return a manifest in which this snapshot is confirmed."""
        changed = tuple(replace(s, state="confirmed") if s.id == snapshot_id else s for s in self.snapshots)
        return replace(self, generation=self.generation + 1, snapshots=changed)

    def text(self) -> bytes:
        """Return the text of manifest.json, including its own checksum."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "next_number": self.next_number,
            "fields": field_documents(self.shape.layout),
            "file_rows": self.shape.file_rows,
            "block_bytes": self.shape.block_bytes,
            "array_files": self.array_files,
            "model": self.model,
            "snapshots": [_snapshot_document(snapshot) for snapshot in self.snapshots],
        }
        return MANIFEST_JSON.write(document)


def parse(url: str, text: bytes) -> Manifest:
    """Return the manifest in `text`.

    Raises StoreError for a newer version, and CorruptionError for a text that is not exactly what `Manifest.text`
    writes.
    """
    path = f"{url}/{MANIFEST}"
    if (version := _version(text)) > VERSION:
        raise StoreError(f"{path} is of version {version}, this daskps reads up to {VERSION}; install a newer daskps")
    document = MANIFEST_JSON.read(text, path)
    layout = RowLayout(tuple(Field(f["name"], f["count"], f["dtype"]) for f in document["fields"]))
    return Manifest(
        shape=SegmentShape(layout, document["file_rows"], document["block_bytes"]),
        generation=document["generation"],
        next_number=document["next_number"],
        array_files=document["array_files"],
        snapshots=tuple(_snapshot(entry) for entry in document["snapshots"]),
        model=document.get("model", ""),
    )


def _snapshot_document(snapshot: PartitionSnapshot) -> dict[str, Any]:
    document = {name: getattr(snapshot, name) for name in PartitionSnapshot.__slots__}
    return {**document, "files": [[entry.number, entry.rows, entry.crc32c] for entry in snapshot.files]}


def _snapshot(document: dict[str, Any]) -> PartitionSnapshot:
    return PartitionSnapshot(**{**document, "files": tuple(SegmentEntry(*entry) for entry in document["files"])})


def _version(text: bytes) -> int:
    """Return the version that a manifest says it has, before its checksum is checked; 0 if it says none."""
    try:
        document = json.loads(text)
        return int(document["version"]) if document["format"] == FORMAT else 0
    except (ValueError, KeyError, TypeError):
        return 0
