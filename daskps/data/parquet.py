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
def _footer(file: DataFile) -> tuple[dict[str, pa.DataType], tuple[int, ...]]:
    """Types of the columns, rows of the row groups; kept, because schema and index both ask."""
    with _open(file) as opened:
        metadata = opened.metadata
        rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        return types_of(opened.schema_arrow), rows


class ParquetBlocks:
    """One open file, row group by row group."""

    def __init__(self, blocks: FileBlocks, columns: Sequence[str], threads: bool) -> None:
        self._blocks, self._columns, self._threads = blocks, list(columns), threads
        types, rows = _footer(blocks.file)
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
