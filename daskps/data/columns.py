"""Tables of columns (Parquet, data frames) to batches.

In: Arrow tables, a block each. Out: pieces of a batch. The columns of a block are laid open once, in the background;
threads of the compute pool then place keys for runs of rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from daskps.backend.native import library
from daskps.data.arrow import (
    KeyColumn,
    KeyColumns,
    float_column,
    is_key_type,
    is_list,
    key_column,
    list_bounds,
    single_chunk,
)
from daskps.data.bad import CODES, Origin
from daskps.data.files import DataFile
from daskps.data.index import Part
from daskps.data.keys import slot_seed
from daskps.data.piece import Piece, Shape
from daskps.data.schema import Schema
from daskps.errors import ConfigError
from daskps.types import Floats, Int32s, Int64s

BAD_LABEL = CODES["the label is not 0 or 1"]
BAD_WEIGHT = CODES["a negative example weight"]
UNEVEN = CODES["keys and weights differ in number"]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnBlock:
    """A block laid open; shapes over its n rows."""

    rows: int
    labels: Floats  # (n,)
    slots: KeyColumns
    slot_weights: dict[int, tuple[Int64s, Floats]]  # slot: where each row's weights begin, and the weights
    dense: list[Floats]  # (n,) each
    example_weights: Floats | None  # (n,)
    status: Int32s  # (n,)


def check_types(schema: Schema, types: dict[str, pa.DataType], where: str) -> None:
    """Refuse a schema that does not fit the columns' types, naming each column."""
    schema.check_columns(types, where)
    wrong = []
    for slot in schema.slots:
        kind = types[slot.source]
        single = kind.value_type if is_list(kind) else kind
        if is_list(kind) and slot.kind != "multi":
            wrong.append(f"{slot.source} is {kind}, a list: its slot {slot.name!r} must be of kind multi")
        elif slot.kind == "multi" and not is_list(kind) and not pa.types.is_null(kind):
            hint = (
                ""
                if _numeric(kind)
                else " (Dask turns lists of objects into text unless dataframe.convert-string is off)"
            )
            wrong.append(f"{slot.source} is {kind}, but slot {slot.name!r} is of kind multi and wants a list{hint}")
        elif not is_key_type(single, integers_only=slot.raw or slot.kind == "integer"):
            wanted = "integers" if slot.raw or slot.kind == "integer" else "integers or text"
            wrong.append(f"{slot.source} is {kind}, but slot {slot.name!r} wants {wanted}")
        if slot.weights and not _number_lists(types[slot.weights]):
            wrong.append(f"{slot.weights} is {types[slot.weights]}, but weights want a list of numbers")
    numbers = [dense.source for dense in schema.dense]
    numbers += [name for name in (schema.label, schema.example_weight) if name]
    wrong += [f"{name} is {types[name]}, but must be a number" for name in numbers if not _numeric(types[name])]
    if wrong:
        raise ConfigError(f"{where}: the schema does not fit the columns: {'; '.join(wrong)}")


def _number_lists(kind: pa.DataType) -> bool:
    return _numeric(kind.value_type) if is_list(kind) else bool(pa.types.is_null(kind))


def _numeric(kind: pa.DataType) -> bool:
    types = pa.types
    exact = types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    return bool(exact or types.is_floating(kind) or types.is_null(kind))


class ColumnParser:
    """Lays blocks open and fills pieces from them."""

    task_rows = 8192  # some milliseconds of work

    def __init__(self, schema: Schema, hash_seed: int) -> None:
        self._schema = schema
        self._seeds = [slot_seed(hash_seed, slot.name) for slot in schema.slots]
        self._columns = schema.columns
        self.shape = Shape(
            slots=len(schema.slots),
            dense=len(schema.dense),
            weighted=schema.weighted,
            example_weighted=bool(schema.example_weight),
            fixed=all(slot.kind != "multi" and slot.missing_key for slot in schema.slots),
            log_columns=tuple(number for number, dense in enumerate(schema.dense) if dense.scale == "log"),
        )

    def prepare(self, table: pa.Table) -> ColumnBlock:
        """Lay the columns of a block open. Types are checked again: a data frame tells those of objects only now."""
        check_types(self._schema, types_of(table.schema), "a block of the data")
        schema, status = self._schema, np.zeros(table.num_rows, np.int32)
        arrays = {name: single_chunk(table.column(name)) for name in self._columns}

        def note(column: str, bad: Int32s | None) -> None:
            """The first bad column of a row is the one that is reported, in the order of the text parsers."""
            if bad is not None:
                code = bad | ((self._columns.index(column) + 1) << 8)
                np.copyto(status, code, where=(bad != 0) & (status == 0))

        labels = np.zeros(table.num_rows, np.float32)
        if schema.label:
            labels, bad = float_column(arrays[schema.label], None)
            wrong = (labels != 0) & (labels != 1)
            note(schema.label, np.where(wrong | (0 if bad is None else bad != 0), BAD_LABEL, 0).astype(np.int32))
        slots: list[KeyColumn] = []
        slot_weights: dict[int, tuple[Int64s, Floats]] = {}
        for number, slot in enumerate(schema.slots):
            slots.append(key_column(arrays[slot.source], slot, self._seeds[number]))
            note(slot.source, slots[-1].bad)
            if slot.weights:
                lists, weights, bad = _weights(arrays[slot.weights], slots[-1], arrays[slot.source])
                slot_weights[number] = (lists, weights)
                note(slot.weights, bad)
        dense = []
        for feature in schema.dense:
            values, bad = float_column(arrays[feature.source], feature.missing)
            dense.append(values)
            note(feature.source, bad)
        example_weights = None
        if schema.example_weight:
            example_weights, bad = float_column(arrays[schema.example_weight], None)
            note(schema.example_weight, bad)
            note(schema.example_weight, np.where(example_weights < 0, BAD_WEIGHT, 0).astype(np.int32))
        return ColumnBlock(table.num_rows, labels, KeyColumns(slots), slot_weights, dense, example_weights, status)

    def most_keys(self, payload: ColumnBlock, part: Part) -> int:
        """Exactly the values of lists, one for each other slot."""
        first, last = part.first, part.last
        return sum(
            part.rows if column.lists is None else int(column.lists[last] - column.lists[first]) + part.rows
            for column in payload.slots.columns
        )

    def parse(self, payload: ColumnBlock, part: Part, out: Piece) -> int:
        """Fill `out` from the rows of `part`."""
        at = slice(part.first, part.last)
        status = payload.status[at]
        good = status == 0
        out.status[:] = status
        out.labels[:] = payload.labels[at] * good
        for number, values in enumerate(payload.dense):
            out.dense[:, number] = np.where(good, values[at], 0)
        if out.example_weights is not None and payload.example_weights is not None:
            out.example_weights[:] = np.where(good, payload.example_weights[at], 0)
        used = payload.slots.place(part.first, part.last, status, out.key_base, out.keys, out.ends)
        if out.weights is not None:
            self._place_weights(payload, part, out, out.weights[:used])
        return used

    def _place_weights(self, payload: ColumnBlock, part: Part, out: Piece, weights: Floats) -> None:
        weights[:] = 1
        for number, (lists, values) in payload.slot_weights.items():
            library().data_place_weights(
                first=part.first,
                last=part.last,
                slots=self.shape.slots,
                slot=number,
                key_base=out.key_base,
                ends=out.ends,
                key_lists=payload.slots.columns[number].lists,
                lists=lists,
                values=values,
                weights=weights,
            )

    def origin(self, file: DataFile, first_row: int) -> Origin:
        """Names rows of `file`."""
        return Origin(file.url, first_row, unit="row", columns=tuple(self._columns))


def _weights(array: pa.Array, keys: KeyColumn, key_array: pa.Array) -> tuple[Int64s, Floats, Int32s | None]:
    """The weights beside a slot's keys; a row whose numbers of keys and weights differ is bad."""
    lists, values = list_bounds(array)
    floats, bad_values = float_column(values, None)
    lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), np.diff(lists), 0)
    key_lengths = np.ones(len(array), np.int64) if keys.lists is None else np.diff(keys.lists)
    key_lengths = np.where(key_array.is_valid().to_numpy(zero_copy_only=False), key_lengths, 0)
    bad = np.where(lengths != key_lengths, UNEVEN, 0).astype(np.int32)
    if bad_values is not None:
        rows = np.repeat(np.arange(len(array)), np.diff(lists))
        np.maximum.at(bad, rows, bad_values[lists[0] : lists[-1]])
    return lists, floats, bad if bad.any() else None


def types_of(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Name and type of every column."""
    return dict(zip(schema.names, schema.types, strict=True))


def needed(columns: Iterable[str], types: dict[str, pa.DataType]) -> list[str]:
    """Columns of text or bytes: Parquet keeps their distinct values, which are hashed once instead of in every row."""
    text = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    return [name for name in columns if any(is_kind(types[name]) for is_kind in text)]
