"""Names, sizes and metadata texts of a partition on disk, in one place; FORMAT.md explains them.

In: a row layout and file numbers. Out: file names, byte counts, and the exact text of every zarr.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from daskps.errors import ArgumentError, CorruptionError
from daskps.ssd.checksum import crc32c
from daskps.ssd.index import PLACES
from daskps.types import RowLayout

FORMAT = "daskps-ssd"
VERSION = 1
MANIFEST = "manifest.json"
LOCK = "lock"
KEY_BYTES = 8
# Read together with its checksum: the disk's own page, so a single row costs one small read (FORMAT.md, "Reading").
BLOCK_BYTES = 4096
# Rows of a parameter file, as bytes: large enough to write at full speed, small enough to stage in memory.
FILE_BYTES = 16 << 20
DATA_ARRAYS = ("keys", "rows", "checksums")
SNAPSHOT_ARRAYS = ("live", "index")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that follow from a store's layout: R = file_rows rows a parameter file."""

    layout: RowLayout
    file_rows: int  # R, a multiple of 8
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        if self.file_rows < 8 or self.file_rows % 8 or self.file_rows > PLACES // 2:
            raise ArgumentError(f"file_rows must be a multiple of 8 from 8 to {PLACES // 2}, got {self.file_rows}")
        if self.block_bytes < 64 or self.block_bytes % 8:
            raise ArgumentError(f"block_bytes must be a multiple of 8 from 64 on, got {self.block_bytes}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.layout.row_bytes

    @property
    def keys_bytes(self) -> int:
        """Bytes of a file's chunk of keys."""
        return KEY_BYTES * self.file_rows

    @property
    def rows_bytes(self) -> int:
        """Bytes of a file's chunk of rows."""
        return self.row_bytes * self.file_rows

    @property
    def key_blocks(self) -> int:
        """Checksummed blocks of the keys; in a file's chunk of checksums they come first."""
        return -(-self.keys_bytes // self.block_bytes)

    @property
    def row_blocks(self) -> int:
        """Checksummed blocks of the rows."""
        return -(-self.rows_bytes // self.block_bytes)

    @property
    def blocks(self) -> int:
        """All checksums of a file."""
        return self.key_blocks + self.row_blocks

    @property
    def most_files(self) -> int:
        """Parameter files that 32-bit places can tell apart."""
        return PLACES // self.file_rows

    def data_bytes(self, rows: int) -> int:
        """Bytes that `rows` rows take on disk: keys, rows and checksums, without the holes of a short file."""
        return rows * (KEY_BYTES + self.row_bytes) + 4 * self.blocks


def default_file_rows(layout: RowLayout) -> int:
    """The largest power of two whose rows fit FILE_BYTES."""
    return max(8, 1 << ((FILE_BYTES // layout.row_bytes).bit_length() - 1))


def chunk_names(number: int) -> tuple[str, str, str]:
    """The files of parameter file `number`: keys, rows, checksums."""
    return f"keys/c.{number}", f"rows/c.{number}.0", f"checksums/c.{number}"


def array_text(dtype: str, shape: list[int], chunk: list[int], names: list[str], attributes: dict[str, Any]) -> bytes:
    """The zarr.json of an uncompressed little-endian array, with a checksum of itself among its attributes."""
    codec: dict[str, Any] = {"name": "bytes"}
    if dtype != "uint8":
        codec["configuration"] = {"endian": "little"}
    return sealed(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": [codec],
            "dimension_names": names,
            "attributes": attributes,
        }
    )


def data_array_texts(shape: Shape, files: int) -> dict[str, bytes]:
    """zarr.json of the three data arrays, grown to `files` parameter files."""
    rows, file_rows, width = files * shape.file_rows, shape.file_rows, shape.layout.width
    fields = [{"name": f.name, "count": f.count, "dtype": f.dtype} for f in shape.layout.fields]
    return {
        "keys": array_text("uint64", [rows], [file_rows], ["row"], {}),
        "rows": array_text("float32", [rows, width], [file_rows, width], ["row", "value"], {"fields": fields}),
        "checksums": array_text(
            "uint32", [files * shape.blocks], [shape.blocks], ["block"], {"block_bytes": shape.block_bytes}
        ),
    }


def bytes_array_text(length: int) -> bytes:
    """zarr.json of a run of bytes in one chunk: live bits or a saved index."""
    return array_text("uint8", [length], [max(1, length)], ["byte"], {})


def group_text(attributes: dict[str, Any]) -> bytes:
    """zarr.json of a group."""
    return sealed({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def sealed(document: dict[str, Any]) -> bytes:
    """Canonical JSON of a Zarr document whose attributes hold the CRC-32C of the text without it."""
    attributes = {**document["attributes"], "crc32c": crc32c(canonical(document))}
    return canonical({**document, "attributes": attributes})


def check_sealed(name: str, text: bytes) -> dict[str, Any]:
    """The document in `text`, if it is exactly what `sealed` wrote."""
    try:
        document: dict[str, Any] = json.loads(text)
        attributes = dict(document["attributes"])
        del attributes["crc32c"]
        intact = sealed({**document, "attributes": attributes}) == text
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise CorruptionError(f"{name}: the metadata does not match its checksum; restore the file from a copy")
    return document


def canonical(document: dict[str, Any]) -> bytes:
    """The one text that stands for a JSON document."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
