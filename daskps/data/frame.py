"""A Dask DataFrame as a data set: what a notebook has at hand. A partition is a block.

In: a data frame of pandas, Arrow or cuDF partitions. Out: Arrow tables of the needed columns. On a cluster the workers
that hold a partition compute it, and its bytes go straight to the node that asks; without one, the reading thread
computes it. Persist a frame that is costly to make, or that would come out otherwise the next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import distributed
import numpy as np
import pyarrow as pa
from dask.base import compute
from dask.delayed import delayed

from daskps.data.bad import BadRowPolicy
from daskps.data.columns import ColumnParser, check_types, types_of
from daskps.data.files import DataFile
from daskps.data.index import FileBlocks
from daskps.data.schema import Schema
from daskps.data.source import STRICT, Source
from daskps.errors import DataError

NAME = "Dask DataFrame"


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The partitions of a data frame, not yet computed."""

    partitions: tuple[Any, ...]  # Delayed
    types: pa.Schema
    blocks_ahead: ClassVar[int] = 2

    def list(self, urls: Sequence[str]) -> list[DataFile]:
        """The frame counts as one file."""
        return [DataFile(NAME, 0, "")]

    def fetch_threads(self, files: Sequence[DataFile]) -> int:
        """One partition at a time: memory is what they take most of."""
        return 1

    def index(self, file: DataFile) -> FileBlocks:
        """Ask every partition for its length."""
        rows = _compute([delayed(len)(partition) for partition in self.partitions])
        return FileBlocks(file, np.cumsum([0, *rows]).astype(np.int64), np.empty(0, np.int64))

    def most_block_bytes(self, blocks: FileBlocks, columns: Sequence[str]) -> int:
        """Unknown until a partition is computed."""
        return 0

    def open(self, blocks: FileBlocks, columns: Sequence[str]) -> FrameBlocks:
        """The partitions, to be fetched by number."""
        return FrameBlocks(self, blocks)

    def parser(self, schema: Schema, hash_seed: int, files: Sequence[DataFile]) -> ColumnParser:
        """Resolve the schema against the frame's columns."""
        check_types(schema, types_of(self.types), NAME)
        return ColumnParser(schema, hash_seed)


def frame_source(frame: Any, schema: Schema, hash_seed: int = 0, bad_rows: BadRowPolicy = STRICT) -> Source:
    """The rows of a Dask DataFrame, in the order of its partitions."""
    schema.check_columns(map(str, frame.columns), NAME)
    columns = frame[schema.columns]
    types = _arrow(columns._meta).schema
    return Source((), Frame(tuple(columns.to_delayed()), types), schema, hash_seed, bad_rows)


def _compute(values: Sequence[Any]) -> list[Any]:
    """On the cluster, if this process or task belongs to one; else here."""
    client = _client()
    if client is None:
        return list(compute(*values, scheduler="synchronous"))
    return list(client.gather(client.compute(list(values)), direct=True))


def _client() -> distributed.Client | None:
    try:
        return distributed.get_client()
    except ValueError:
        return None


def _arrow(partition: Any, name: str = NAME) -> pa.Table:
    """Of pandas or cuDF."""
    if hasattr(partition, "to_arrow"):
        return partition.to_arrow(preserve_index=False)
    return from_pandas(partition, name)


def from_pandas(frame: Any, name: str) -> pa.Table:
    """The same columns in Arrow; DataError if one of objects has no single type."""
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except pa.ArrowException as error:
        raise DataError(f"{name}: {'; '.join(map(str, error.args))}. Give the values of a column one type") from None


class FrameBlocks:
    """Partitions by number."""

    def __init__(self, frame: Frame, blocks: FileBlocks) -> None:
        self._frame, self._blocks = frame, blocks

    def fetch(self, block: int) -> pa.Table:
        """One partition as a table."""
        (partition,) = _compute([self._frame.partitions[block]])
        wanted = int(self._blocks.first_rows[block + 1] - self._blocks.first_rows[block])
        if len(partition) != wanted:
            raise DataError(
                f"{NAME}: partition {block} has {len(partition)} rows, but {wanted} when they were counted; "
                "persist the frame, so that it stays what it is"
            )
        return _arrow(partition, f"{NAME}, partition {block}")

    def close(self) -> None:
        """Nothing is held open."""
