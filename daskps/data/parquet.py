"""Parquet files: columns as slots, list columns as multi slots, floats as dense features. Each row group is one block.

Input: Parquet files of any writer. Output: Arrow tables of the needed columns. The index takes the numbers of examples
from the footers, so it is cheap. Text columns are read as dictionaries: each distinct value is hashed once per row
group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from daskps.data.columns import ColumnParser, check_types, needed, types_of
from daskps.data.files import DataFile, is_local, list_files
from daskps.data.format import FileBlocks
from daskps.data.schema import Schema, hash_bytes
from daskps.errors import DataError

DECODING = 1.5  # memory while a column of a row group is decoded and prepared, as a multiple of its size


@dataclass(frozen=True, slots=True)
class Parquet:
    """Format of Parquet files. With `threads`, pyarrow decodes the columns of a row group in parallel."""

    threads: bool = True
    blocks_ahead: ClassVar[int] = 2

    def list(self, urls: Sequence[str]) -> list[DataFile]:
        """Return the files in their global order."""
        return list_files(urls)

    def fetch_threads(self, files: Sequence[DataFile]) -> int:
        """Return 1: pyarrow decodes a row group with its own threads."""
        return 1

    def index(self, file: DataFile) -> FileBlocks:
        """Read the number of examples of every row group from the footer."""
        examples = _footer(file)[1]
        digests = np.array([_footer_digest(file)], np.uint64)
        return FileBlocks(file, np.cumsum([0, *examples]).astype(np.int64), np.empty(0, np.int64), digests)

    def most_block_bytes(self, blocks: FileBlocks, columns: Sequence[str]) -> int:
        """Return the decoded bytes of the largest row group, estimated from the footer."""
        sizes = _footer(blocks.file)[2]
        return sum(sizes.get(name, 0) for name in columns)

    def open(self, blocks: FileBlocks, columns: Sequence[str]) -> ParquetBlocks:
        """Open an indexed file, to read `columns`."""
        return ParquetBlocks(blocks, columns, self.threads)

    def digest(self, blocks: FileBlocks, examples: int, fetch: Callable[[int], pa.Table]) -> int:
        """Return the digest of size and footer of the whole file, for any number of `examples`: a Parquet file cannot
        grow. It is weaker than the digest of text: it misses changed values that leave the offsets, sizes and
        statistics of all column chunks the same."""
        return int(blocks.digests[0])

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> ColumnParser:
        """Return a parser. Raise ConfigError if the schema does not fit the columns of a file."""
        for file in files:
            schema.check_columns(_footer(file)[3], file.url)  # types by name would hide duplicates
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


def _footer_digest(file: DataFile) -> int:
    """Return the digest of the file's size and the bytes of its footer."""
    fs, path = fsspec.core.url_to_fs(file.url)
    with fs.open(path, "rb") as opened:
        opened.seek(-8, 2)
        size = int.from_bytes(opened.read(4), "little")
        opened.seek(-8 - size, 2)
        return hash_bytes(opened.read(size), file.size_bytes)


@functools.lru_cache(maxsize=4096)
def _footer(file: DataFile) -> tuple[dict[str, pa.DataType], tuple[int, ...], dict[str, int], tuple[str, ...]]:
    """Return from the footer: column types, examples per row group, the most decoded bytes of each column in a row
    group, and the names of all columns, with duplicates. Cached, because schema, index and reader need it."""
    with _open(file) as opened:
        metadata = opened.metadata
        examples = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        sizes: dict[str, int] = {}
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                name, _, inner = column.path_in_schema.partition(".")
                values = max(8 * column.num_values, column.total_uncompressed_size)
                size = int(DECODING * values) + (12 * group.num_rows if inner else 0)  # lists: offsets
                sizes[name] = max(sizes.get(name, 0), size)
        return types_of(opened.schema_arrow), examples, sizes, tuple(opened.schema_arrow.names)


class ParquetBlocks:
    """Open Parquet file, read by row group."""

    def __init__(self, blocks: FileBlocks, columns: Sequence[str], threads: bool) -> None:
        self._blocks, self._columns, self._threads = blocks, list(columns), threads
        types, examples = _footer(blocks.file)[:2]
        if np.any(np.diff(blocks.first_examples) != np.array(examples)):
            raise DataError(f"{blocks.file.url} changed since it was indexed; build the index again")
        self._file = _open(blocks.file, needed(self._columns, types))

    def fetch(self, block: int) -> pa.Table:
        """Return the needed columns of row group `block` as an Arrow table."""
        try:
            return self._file.read_row_group(block, columns=self._columns, use_threads=self._threads)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self._blocks.file.url}: row group {block} (from example {self._blocks.first_examples[block]} on) "
                f"cannot be read: {error}. The file is damaged; fetch it again"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()
