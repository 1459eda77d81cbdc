"""The manifest: which snapshots there are, and which parameter files each one needs. Replaced as a whole, atomically.

In: the text of manifest.json. Out: `Manifest` and `Snapshot` values; a change is a new value and a new text.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from daskps.errors import CorruptionError, SnapshotError, StoreError
from daskps.ssd.checksum import crc32c
from daskps.ssd.format import FORMAT, MANIFEST, VERSION, Shape, canonical
from daskps.types import Field, RowLayout

State = Literal["prepared", "confirmed"]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One parameter file as a snapshot needs it."""

    number: int
    rows: int  # rows written; the rest of the chunk is zeros
    crc32c: int  # of the file's chunk of block checksums


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A named state: its files and which of their rows are live."""

    id: str
    number: int  # names live/<number> and index/<number>; grows with every snapshot
    state: State
    live_rows: int
    files: tuple[FileEntry, ...]
    live_bytes: int
    live_crc32c: int
    index_bytes: int | None  # None: no index was saved; opening rebuilds it from the keys
    index_crc32c: int | None  # of the image's head, which holds the sums of its groups

    @property
    def array_files(self) -> int:
        """Parameter files that the arrays must reach."""
        return max((entry.number for entry in self.files), default=-1) + 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that is committed."""

    shape: Shape
    generation: int = 0  # counts the replacements
    next_number: int = 1  # of the next snapshot
    array_files: int = 0  # parameter files that the arrays' zarr.json reach
    snapshots: tuple[Snapshot, ...] = ()

    def snapshot(self, snapshot_id: str) -> Snapshot:
        """The snapshot of that id."""
        for snapshot in self.snapshots:
            if snapshot.id == snapshot_id:
                return snapshot
        known = ", ".join(f"{s.id!r} ({s.state})" for s in self.snapshots) or "none"
        raise SnapshotError(f"no snapshot {snapshot_id!r} here; there are: {known}")

    def newest(self) -> Snapshot | None:
        """The confirmed snapshot made last."""
        confirmed = [snapshot for snapshot in self.snapshots if snapshot.state == "confirmed"]
        return max(confirmed, key=lambda snapshot: snapshot.number, default=None)

    def kept(self) -> dict[int, FileEntry]:
        """Every parameter file that some snapshot needs, by number."""
        return {entry.number: entry for snapshot in self.snapshots for entry in snapshot.files}

    def with_snapshot(self, snapshot: Snapshot) -> Manifest:
        """This manifest with one snapshot more."""
        return replace(
            self,
            generation=self.generation + 1,
            next_number=snapshot.number + 1,
            array_files=max(snapshot.array_files, self.array_files),
            snapshots=(*self.snapshots, snapshot),
        )

    def without(self, ids: set[str]) -> Manifest:
        """This manifest with those snapshots gone."""
        kept = tuple(snapshot for snapshot in self.snapshots if snapshot.id not in ids)
        return replace(self, generation=self.generation + 1, snapshots=kept)

    def confirmed(self, snapshot_id: str) -> Manifest:
        """This manifest with one snapshot confirmed."""
        changed = tuple(replace(s, state="confirmed") if s.id == snapshot_id else s for s in self.snapshots)
        return replace(self, generation=self.generation + 1, snapshots=changed)

    def text(self) -> bytes:
        """manifest.json, its own checksum included."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "next_number": self.next_number,
            "fields": [asdict(field) for field in self.shape.layout.fields],
            "file_rows": self.shape.file_rows,
            "block_bytes": self.shape.block_bytes,
            "array_files": self.array_files,
            "snapshots": [_snapshot_document(snapshot) for snapshot in self.snapshots],
        }
        return canonical({**document, "crc32c": crc32c(canonical(document))})


def parse(url: str, text: bytes) -> Manifest:
    """The manifest in `text`; refuses a newer version and anything that was not written here."""
    try:
        document = json.loads(text)
        version = int(document["version"]) if document["format"] == FORMAT else 0
    except (ValueError, KeyError, TypeError):
        raise CorruptionError(
            f"{url}/{MANIFEST}: no readable manifest in its {len(text)} bytes; restore the file from a copy"
        ) from None
    if version > VERSION:
        raise StoreError(
            f"{url}/{MANIFEST} is of version {version}, this daskps reads up to {VERSION}; install a newer daskps"
        )
    recorded = document.pop("crc32c", None)
    if recorded != crc32c(canonical(document)) or canonical({**document, "crc32c": recorded}) != text:
        raise CorruptionError(f"{url}/{MANIFEST}: the text does not match its checksum; restore the file from a copy")
    layout = RowLayout(tuple(Field(**field) for field in document["fields"]))
    return Manifest(
        shape=Shape(layout, document["file_rows"], document["block_bytes"]),
        generation=document["generation"],
        next_number=document["next_number"],
        array_files=document["array_files"],
        snapshots=tuple(_snapshot(entry) for entry in document["snapshots"]),
    )


def _snapshot_document(snapshot: Snapshot) -> dict[str, Any]:
    document = {name: getattr(snapshot, name) for name in Snapshot.__slots__}
    return {**document, "files": [[entry.number, entry.rows, entry.crc32c] for entry in snapshot.files]}


def _snapshot(document: dict[str, Any]) -> Snapshot:
    return Snapshot(**{**document, "files": tuple(FileEntry(*entry) for entry in document["files"])})
