"""A data frame in memory as one batch: what people have at hand when they ask a model.

In: a table of pandas, Arrow, polars or cuDF with the columns that the job names; labels are not looked at. Out: a
`Batch`.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from daskps.data.bad import BadRowPolicy, BadRows
from daskps.data.columns import ColumnParser
from daskps.data.files import DataFile
from daskps.data.frame import from_pandas
from daskps.data.index import Part
from daskps.data.piece import allocate, as_batch, scale_logs
from daskps.data.schema import Schema
from daskps.errors import ArgumentError
from daskps.types import Batch

NAME = "the data frame"


def frame_batch(frame: Any, schema: Schema, hash_seed: int) -> Batch:
    """The rows of `frame` in order."""
    table, schema = arrow_table(frame), schema.unlabelled()
    schema.check_columns(table.column_names, NAME)
    parser = ColumnParser(schema, hash_seed)
    block = parser.prepare(table.select(schema.columns))
    part = Part(0, 0, 0, table.num_rows)
    piece = allocate(table.num_rows, parser.most_keys(block, part), parser.shape)
    piece.used = parser.parse(block, part, piece)
    scale_logs(piece.dense, parser.shape.log_columns)
    BadRows(BadRowPolicy(), table.num_rows).examine(piece.status, parser.origin(DataFile(NAME, 0, ""), 0))
    return as_batch(piece, parser.shape, 0)


def arrow_table(frame: Any) -> pa.Table:
    """The same columns in Arrow."""
    if isinstance(frame, pa.Table):
        return frame
    if hasattr(frame, "to_arrow"):  # polars, cuDF
        return frame.to_arrow()
    if hasattr(frame, "to_numpy") and hasattr(frame, "columns"):  # pandas
        return from_pandas(frame, NAME)
    if isinstance(frame, dict):
        return pa.table(frame)
    raise ArgumentError(
        f"cannot read a {type(frame).__module__}.{type(frame).__name__}; give a data frame in memory (of a Dask "
        "DataFrame one partition after the other), an Arrow table, a dictionary of columns or a Batch"
    )
