"""Parquet: columns as slots, list columns as multi-valued slots, floats as dense features. A row group is a block.

In: files written by anything. Out: Arrow tables of the needed columns. Row counts come from the footers, so the index
costs next to nothing. Text columns are read as dictionaries: each distinct value is hashed once a row group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daskps.data.columns import ColumnParser, check_types, needed, types_of
from daskps.data.files import DataFile, is_local, list_files
from daskps.data.index import FileBlocks
from daskps.data.schema import Schema
from daskps.errors import DataError

DECODING = 1.5  # times what a column of a row group takes, while it is decoded and laid open


@dataclass(frozen=True, slots=True)
class Parquet:
    """The format. `threads` lets pyarrow decode the columns of a row group side by side."""

    threads: bool = True
    blocks_ahead: ClassVar[int] = 2

    def list(self, urls: Sequence[str]) -> list[DataFile]:
        """The files in their global order."""
        return list_files(urls)

    def fetch_threads(self, files: Sequence[DataFile]) -> int:
        """One: pyarrow's own threads decode."""
        return 1

    def index(self, file: DataFile) -> FileBlocks:
        """The rows of every row group, from the footer."""
        rows = _footer(file)[1]
        return FileBlocks(file, np.cumsum([0, *rows]).astype(np.int64), np.empty(0, np.int64))

    def most_block_bytes(self, blocks: FileBlocks, columns: Sequence[str]) -> int:
        """The largest row group as the footer describes it, decoded."""
        sizes = _footer(blocks.file)[2]
        return sum(sizes.get(name, 0) for name in columns)

    def open(self, blocks: FileBlocks, columns: Sequence[str]) -> ParquetBlocks:
        """Open an indexed file."""
        return ParquetBlocks(blocks, columns, self.threads)

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> ColumnParser:
        """Resolve the schema against the columns of every file."""
        for file in files:
            check_types(schema, _footer(file)[0], file.url)
        return ColumnParser(schema, hash_seed)


def _open(file: DataFile, dictionaries: list[str] | None = None) -> pq.ParquetFile:
    fs, path = fsspec.core.url_to_fs(file.url)
    try:
        if is_local(fs):
            return pq.ParquetFile(path, memory_map=True, read_dictionary=dictionaries)
        return pq.ParquetFile(fs.open(path, "rb"), pre_buffer=True, read_dictionary=dictionaries)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file.url} is not a whole Parquet file: {error}. Fetch it again") from error


@functools.lru_cache(maxsize=4096)
def _footer(file: DataFile) -> tuple[dict[str, pa.DataType], tuple[int, ...], dict[str, int]]:
    """Types of the columns, rows of the row groups, most bytes of each column; kept: schema, index and reader ask."""
    with _open(file) as opened:
        metadata = opened.metadata
        rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        sizes: dict[str, int] = {}
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                name, _, inner = column.path_in_schema.partition(".")
                values = max(8 * column.num_values, column.total_uncompressed_size)
                size = int(DECODING * values) + (12 * group.num_rows if inner else 0)  # lists: where each row's begin
                sizes[name] = max(sizes.get(name, 0), size)
        return types_of(opened.schema_arrow), rows, sizes


class ParquetBlocks:
    """One open file, row group by row group."""

    def __init__(self, blocks: FileBlocks, columns: Sequence[str], threads: bool) -> None:
        self._blocks, self._columns, self._threads = blocks, list(columns), threads
        types, rows, _ = _footer(blocks.file)
        if np.any(np.diff(blocks.first_rows) != np.array(rows)):
            raise DataError(f"{blocks.file.url} changed since it was indexed; build the index again")
        self._file = _open(blocks.file, needed(self._columns, types))

    def fetch(self, block: int) -> pa.Table:
        """The needed columns of a row group."""
        try:
            return self._file.read_row_group(block, columns=self._columns, use_threads=self._threads)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self._blocks.file.url}: row group {block} (rows {self._blocks.first_rows[block]} and on) cannot be "
                f"read: {error}. The file is damaged; fetch it again"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()
