"""Dask DataFrame as a data set, mostly for notebooks. Each partition is one block.

Input: a data frame with pandas, Arrow or cuDF partitions. Output: Arrow tables of the needed columns. On a cluster,
workers compute a partition and its bytes go directly to the node that asked for it. Without a cluster, the reading
thread computes it. Persist a frame that is expensive to compute, or that may differ when it is computed again. Dask is
imported inside functions: reading files does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from daskps.data.bad import BadExamplePolicy, BadExamples
from daskps.data.batches import allocate, as_batch, scale_logs
from daskps.data.columns import ColumnParser, check_types, types_of
from daskps.data.files import DataFile
from daskps.data.format import FileBlocks, Part
from daskps.data.reader import STRICT, Source
from daskps.data.schema import Schema, hash_bytes
from daskps.errors import ArgumentError, DataError
from daskps.types import Batch

NAME = "Dask DataFrame"


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Format for the partitions of a Dask DataFrame, which are not computed yet."""

    partitions: tuple[Any, ...]  # Delayed
    types: pa.Schema
    blocks_ahead: ClassVar[int] = 2

    def list(self, urls: Sequence[str]) -> list[DataFile]:
        """Return one entry: the frame counts as one file."""
        return [DataFile(NAME, 0, "")]

    def fetch_threads(self, files: Sequence[DataFile]) -> int:
        """Return 1: partitions take much memory, so they are fetched one at a time."""
        return 1

    def index(self, file: DataFile) -> FileBlocks:
        """Compute the length of every partition."""
        from dask.delayed import delayed

        examples = _compute([delayed(len)(partition) for partition in self.partitions])
        return FileBlocks(file, np.cumsum([0, *examples]).astype(np.int64), np.empty(0, np.int64))

    def most_block_bytes(self, blocks: FileBlocks, columns: Sequence[str]) -> int:
        """Return 0: the size is unknown until a partition is computed."""
        return 0

    def open(self, blocks: FileBlocks, columns: Sequence[str]) -> FrameBlocks:
        """Return an object that fetches partitions by number."""
        return FrameBlocks(self, blocks)

    def digest(self, blocks: FileBlocks, examples: int, fetch: Callable[[int], pa.Table]) -> int:
        """Return the digest of the first example numbers of the partitions that begin within the first
        `examples` examples. It does not cover the data itself."""
        return hash_bytes(blocks.first_examples[blocks.first_examples < examples].tobytes(), 0)

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> ColumnParser:
        """Return a parser. Raise ConfigError if the schema does not fit the frame's columns."""
        check_types(schema, types_of(self.types), NAME)
        return ColumnParser(schema, hash_seed)


def frame_source(frame: Any, schema: Schema, hash_seed: int = 0, bad_examples: BadExamplePolicy = STRICT) -> Source:
    """Return a source with the examples of a Dask DataFrame, in the order of its partitions."""
    schema.check_columns(map(str, frame.columns), NAME)
    columns = frame[schema.columns]
    types = _arrow(columns._meta).schema
    return Source((), Frame(tuple(columns.to_delayed()), types), schema, hash_seed, bad_examples)


def _compute(values: Sequence[Any]) -> list[Any]:
    """Compute Dask values: on the cluster if this process or task belongs to one, else in this thread."""
    import distributed
    from dask.base import compute

    try:
        client = distributed.get_client()
    except ValueError:
        return list(compute(*values, scheduler="synchronous"))
    return list(client.gather(client.compute(list(values)), direct=True))


def _arrow(partition: Any, name: str = NAME) -> pa.Table:
    """Convert a pandas or cuDF partition to an Arrow table."""
    if hasattr(partition, "to_arrow"):
        return partition.to_arrow(preserve_index=False)
    return from_pandas(partition, name)


def from_pandas(frame: Any, name: str) -> pa.Table:
    """Convert a pandas frame to an Arrow table. Raise DataError if the objects of a column have different types, or if
    two columns have the same name."""
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(
            f"{name}: {'; '.join(map(str, error.args))}. Give the values of a column one type, and each column a name "
            "of its own"
        ) from None


class FrameBlocks:
    """Partitions of a data frame, fetched by number."""

    def __init__(self, frame: Frame, blocks: FileBlocks) -> None:
        self._frame, self._blocks = frame, blocks

    def fetch(self, block: int) -> pa.Table:
        """Compute partition `block` and return it as an Arrow table. Raise DataError if its length has changed."""
        (partition,) = _compute([self._frame.partitions[block]])
        wanted = int(self._blocks.first_examples[block + 1] - self._blocks.first_examples[block])
        if len(partition) != wanted:
            raise DataError(
                f"{NAME}: partition {block} has {len(partition)} examples, but {wanted} when they were counted; "
                "persist the frame, so that it stays what it is"
            )
        return _arrow(partition, f"{NAME}, partition {block}")

    def close(self) -> None:
        """Do nothing: no file is open."""


FRAME_NAME = "the data frame"


def frame_batch(frame: Any, schema: Schema, hash_seed: int) -> Batch:
    """Return the examples of a data frame in memory as one batch, without labels; for predictions."""
    table, schema = arrow_table(frame), schema.unlabelled()
    schema.check_columns(table.column_names, FRAME_NAME)
    parser = ColumnParser(schema, hash_seed)
    block = parser.prepare(table.select(schema.columns))
    part = Part(0, 0, 0, table.num_rows)
    piece = allocate(table.num_rows, parser.most_keys(block, part), parser.shape)
    piece.used = parser.parse(block, part, piece)
    scale_logs(piece.dense, parser.shape.log_columns)
    BadExamples(BadExamplePolicy(), table.num_rows).examine(piece.status, parser.origin(DataFile(FRAME_NAME, 0, ""), 0))
    return as_batch(piece, parser.shape, 0)


def arrow_table(frame: Any) -> pa.Table:
    """Convert a data frame (pandas, polars, cuDF), an Arrow table or a dictionary of columns to an Arrow table."""
    if isinstance(frame, pa.Table):
        return frame
    if hasattr(frame, "to_arrow"):  # polars, cuDF
        return frame.to_arrow()
    if hasattr(frame, "to_numpy") and hasattr(frame, "columns"):  # pandas
        return from_pandas(frame, FRAME_NAME)
    if isinstance(frame, dict):
        return pa.table(frame)
    raise ArgumentError(
        f"cannot read a {type(frame).__module__}.{type(frame).__name__}; give a data frame in memory (of a Dask "
        "DataFrame one partition after the other), an Arrow table, a dictionary of columns or a Batch"
    )
