"""The format of a partition on disk: names, sizes, Zarr metadata and CRC-32C checksums (storage/FORMAT.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskps.budget import KEY_BYTES
from daskps.device.native import library
from daskps.errors import ArgumentError
from daskps.ssd.index import PLACES
from daskps.storage.sealed import SealedJson
from daskps.types import RowLayout


def crc32c(*pieces: Any) -> int:
    """Return the CRC-32C of the bytes of all pieces, one after the other."""
    total = 0
    for piece in pieces:
        data = _bytes(piece)
        total = library().ssd_crc32c(data=data, n=len(data), before=total)
    return total


def block_sums(piece: Any, total_bytes: int, block_bytes: int) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each block of `piece`, which is extended with zeros to `total_bytes`."""
    data = _bytes(piece)
    sums = np.empty(-(-total_bytes // block_bytes), np.uint32)
    library().ssd_block_sums(data=data, n=len(data), total=total_bytes, block_bytes=block_bytes, sums=sums)
    return sums


def _bytes(piece: Any) -> npt.NDArray[np.uint8]:
    if isinstance(piece, np.ndarray):
        return piece.reshape(-1).view(np.uint8)
    return np.frombuffer(piece, np.uint8)


MANIFEST_JSON = SealedJson("crc32c", crc32c)
ZARR_JSON = SealedJson("crc32c", crc32c, inside="attributes")  # zarr.json: Zarr allows own fields only there

FORMAT = "daskps-ssd"
VERSION = 1
MANIFEST = "manifest.json"
# Bytes per checksum, and so the smallest read: a page of the disk. A single row costs one small read
# (storage/FORMAT.md, "Reading rows").
BLOCK_BYTES = 4096
# Bytes of rows in a full segment: large enough to be written at full speed, small enough to be collected in memory.
FILE_BYTES = 16 << 20
DATA_ARRAYS = ("keys", "rows", "checksums")
SNAPSHOT_ARRAYS = ("live", "index")


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """The sizes of a segment, from the layout of a row and the number of rows per segment."""

    layout: RowLayout
    file_rows: int  # R: rows of a full segment, a multiple of 8
    block_bytes: int = BLOCK_BYTES  # bytes per checksum

    def __post_init__(self) -> None:
        if self.file_rows < 8 or self.file_rows % 8 or self.file_rows > PLACES // 2:
            raise ArgumentError(f"file_rows must be a multiple of 8 from 8 to {PLACES // 2}, got {self.file_rows}")
        if self.block_bytes < 64 or self.block_bytes % 8:
            raise ArgumentError(f"block_bytes must be a multiple of 8 from 64 on, got {self.block_bytes}")

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return self.layout.row_bytes

    @property
    def keys_bytes(self) -> int:
        """Return the bytes of a segment's chunk of keys."""
        return KEY_BYTES * self.file_rows

    @property
    def rows_bytes(self) -> int:
        """Return the bytes of a segment's chunk of rows."""
        return self.row_bytes * self.file_rows

    @property
    def key_blocks(self) -> int:
        """Return the number of blocks of the keys; their checksums come first in the chunk of checksums."""
        return -(-self.keys_bytes // self.block_bytes)

    @property
    def row_blocks(self) -> int:
        """Return the number of blocks of the rows."""
        return -(-self.rows_bytes // self.block_bytes)

    @property
    def blocks(self) -> int:
        """Return the number of checksums of a segment."""
        return self.key_blocks + self.row_blocks

    @property
    def most_files(self) -> int:
        """Return the largest number of segments that 32-bit places can address."""
        return PLACES // self.file_rows

    def data_bytes(self, rows: int) -> int:
        """Return the bytes on disk of a segment with `rows` rows: keys, rows, checksums; no hole of a short one."""
        return rows * (KEY_BYTES + self.row_bytes) + 4 * self.blocks


def default_file_rows(layout: RowLayout) -> int:
    """Return the rows of a full segment by default: the largest power of two whose rows fit into FILE_BYTES."""
    return max(8, 1 << ((FILE_BYTES // layout.row_bytes).bit_length() - 1))


def chunk_names(number: int) -> tuple[str, str, str]:
    """Return the names of the three files of segment `number`: keys, rows, checksums."""
    return f"keys/c.{number}", f"rows/c.{number}.0", f"checksums/c.{number}"


def array_text(dtype: str, shape: list[int], chunk: list[int], names: list[str], attributes: dict[str, Any]) -> bytes:
    """Return the zarr.json of an uncompressed little-endian array, with its own checksum as an attribute."""
    codec: dict[str, Any] = {"name": "bytes"}
    if dtype != "uint8":
        codec["configuration"] = {"endian": "little"}
    return ZARR_JSON.write(
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


def field_documents(layout: RowLayout) -> list[dict[str, Any]]:
    """Return the fields of a row as JSON values: name, number of values and type."""
    return [{"name": field.name, "count": field.width, "dtype": field.dtype} for field in layout.fields]


def data_array_texts(shape: SegmentShape, files: int) -> dict[str, bytes]:
    """Return the zarr.json of each of the three data arrays, long enough for `files` segments."""
    rows, file_rows, width = files * shape.file_rows, shape.file_rows, shape.layout.width
    fields = field_documents(shape.layout)
    return {
        "keys": array_text("uint64", [rows], [file_rows], ["row"], {}),
        "rows": array_text("float32", [rows, width], [file_rows, width], ["row", "value"], {"fields": fields}),
        "checksums": array_text(
            "uint32", [files * shape.blocks], [shape.blocks], ["block"], {"block_bytes": shape.block_bytes}
        ),
    }


def bytes_array_text(length: int) -> bytes:
    """Return the zarr.json of an array of bytes with one chunk, for live bits or a saved index."""
    return array_text("uint8", [length], [max(1, length)], ["byte"], {})


def group_text(attributes: dict[str, Any]) -> bytes:
    """Return the zarr.json of a group."""
    return ZARR_JSON.write({"zarr_format": 3, "node_type": "group", "attributes": attributes})
