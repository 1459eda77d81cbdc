"""The row index: how many rows every block of every file has, so that any global row is found without reading on.

In: `FileBlocks` of each file, as the formats make them. Out: `RowIndex`, which turns a range of global rows into parts
of blocks. It is small (16 bytes a block), can be kept as JSON, and its fingerprint tells whether data is the same data.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from daskps.data.files import DataFile
from daskps.errors import DataError
from daskps.types import Int64s


@dataclass(frozen=True, slots=True, eq=False)
class FileBlocks:
    """The blocks of one file: runs of rows that are fetched whole."""

    file: DataFile
    first_rows: Int64s  # (blocks + 1,) the file's row at which each block begins; last: the file's rows
    starts: (
        Int64s  # (blocks + 1,) first byte of each block in the plain text; empty where blocks are not ranges of bytes
    )

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return int(self.first_rows[-1])


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [first, last) of one block, counted from the block's start."""

    file: int
    block: int
    first: int
    last: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.last - self.first


class RowIndex:
    """The blocks of all files in global order."""

    def __init__(self, files: Sequence[FileBlocks]) -> None:
        self.files = tuple(files)
        self.file_rows = np.concatenate([[0], np.cumsum([blocks.rows for blocks in files])]).astype(np.int64)

    @property
    def rows(self) -> int:
        """Rows of the whole data set."""
        return int(self.file_rows[-1])

    def parts(self, start: int, stop: int) -> list[Part]:
        """Global rows [start, stop) as parts of blocks, in order."""
        if not 0 <= start <= stop <= self.rows:
            raise DataError(f"rows [{start}, {stop}) were asked for, but the data has rows [0, {self.rows})")
        parts = []
        file = int(np.searchsorted(self.file_rows, start, side="right")) - 1
        while start < stop:
            blocks, base = self.files[file], int(self.file_rows[file])
            inside = min(stop - base, blocks.rows)
            first_rows = blocks.first_rows
            block = int(np.searchsorted(first_rows, start - base, side="right")) - 1
            while start - base < inside:
                begin, end = int(first_rows[block]), int(first_rows[block + 1])
                last = min(inside, end)
                if last > start - base:
                    parts.append(Part(file, block, start - base - begin, last - begin))
                    start = base + last
                block += 1
            file += 1
        return parts

    @property
    def fingerprint(self) -> str:
        """Names the data by its layout: file sizes and rows in order, not where the files are kept."""
        digest = xxhash.xxh3_128()
        for blocks in self.files:
            digest.update(f"{blocks.file.size_bytes} {blocks.rows}\n".encode())
        return digest.hexdigest()

    def files_before(self, row: int) -> str:
        """Names the files that begin before `row`: by their own names and rows, not by folders or what is in them."""
        digest = xxhash.xxh3_128()
        for start, blocks in zip(self.file_rows.tolist(), self.files, strict=False):
            if start < row and blocks.rows:
                digest.update(f"{start} {blocks.file.url.rpartition('/')[2]}\n".encode())
        return digest.hexdigest()

    def to_json(self) -> str:
        """The index as text."""
        files = [
            {
                "url": blocks.file.url,
                "size_bytes": blocks.file.size_bytes,
                "version": blocks.file.version,
                "first_rows": blocks.first_rows.tolist(),
                "starts": blocks.starts.tolist(),
            }
            for blocks in self.files
        ]
        return json.dumps({"daskps_row_index": 1, "files": files})

    @staticmethod
    def from_json(text: str) -> RowIndex:
        """The index that `to_json` wrote."""
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("daskps_row_index") != 1:
            raise DataError("this is not a row index of version 1; build it again")
        return RowIndex(
            [
                FileBlocks(
                    DataFile(item["url"], item["size_bytes"], item["version"]),
                    np.array(item["first_rows"], np.int64),
                    np.array(item["starts"], np.int64),
                )
                for item in value["files"]
            ]
        )

    def check_files(self, files: Sequence[DataFile]) -> None:
        """Refuse an index of other files than these."""
        for old, new in itertools.zip_longest((blocks.file for blocks in self.files), files):
            if old != new:
                raise DataError(f"the row index knows {old}, the data set has {new}: it changed; build the index again")
