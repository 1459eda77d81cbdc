"""Columnar data: the parser of Arrow tables, which reads their buffers without copying them, and the Parquet format.

Input: an Arrow table per block, and a schema. Output: pieces of a batch; columns.cpp computes the keys. Of a Parquet
file, columns are slots, list columns multi slots, and numbers also dense features; each row group is one block. The
index takes the numbers of examples from the footers, so it is cheap. Text columns are read as dictionaries: each
distinct value is hashed once per row group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from daskps.data.bad import CODES, Origin
from daskps.data.batches import Piece, Shape
from daskps.data.files import DataFile, is_local, list_files
from daskps.data.format import FileBlocks, Part
from daskps.data.schema import (
    BUCKETS,
    Schema,
    Slot,
    bucket_bounds,
    bucket_keys,
    hash_bytes,
    slot_kind,
    slot_seed,
    small_buckets,
)
from daskps.device.native import library
from daskps.errors import ConfigError, DataError
from daskps.types import Floats, Int32s, Int64s, Keys

MISSING_VALUE = CODES["a missing value"]
NOT_AN_INTEGER = CODES["not an integer"]
NOT_A_NUMBER = CODES["not a number"]
OUT_OF_RANGE = CODES["number out of range"]


# The struct KeyColumn of columns.cpp.
_COLUMN = np.dtype(
    [(name, np.int32) for name in "source kind missing_key is_signed key_rule".split()]
    + [("seed", np.uint64), ("valid", np.uint64), ("bit_offset", np.int64)]
    + [(name, np.uint64) for name in "lists values data bucket_keys".split()],
    align=True,
)
DIGITS = {16: 11, 32: 24, 64: 53}  # binary digits of a float's significand, by its width in bits
_TEXT32, _TEXT64, _INTEGERS, _INDICES = range(4)  # `KeyColumn.source`: text by offset width, integers, dictionary


class Hashing(NamedTuple):
    """Seed and key rule with which the values of a slot become keys."""

    seed: int
    key_rule: int


@dataclass(frozen=True, slots=True, eq=False)
class KeyColumn:
    """Values of one slot in a block of n examples, as views of Arrow's buffers."""

    slot: Slot
    hashing: Hashing
    source: int  # _TEXT32, _TEXT64, _INTEGERS or _INDICES
    values: npt.NDArray[Any]  # offsets of text, integers, or indices into a dictionary
    data: npt.NDArray[Any] | None = None  # bytes of text, or keys of the dictionary's values
    signed: bool = True
    valid: npt.NDArray[np.uint8] | None = None  # bitmap of the examples with a value; None: all
    bit_offset: int = 0  # of the first example in `valid`
    lists: Int64s | None = None  # (n + 1,) where each example's values begin; None: one value each
    bad: Int32s | None = None  # (n,) reason number (data/bad.py), 0 for a good example


class KeyColumns:
    """Key columns as structs for columns.cpp. The structs hold addresses, so this object keeps the arrays alive."""

    def __init__(self, columns: Sequence[KeyColumn]) -> None:
        self.columns = columns
        self._bucket_keys = [bucket_keys(column.hashing.seed) if _bucketised(column) else None for column in columns]
        self._plan = np.zeros(len(columns), _COLUMN)
        for number, column in enumerate(columns):
            pointers = (column.lists, column.values, column.data, self._bucket_keys[number])
            head = (column.source, slot_kind(column.slot), column.slot.missing_key, column.signed)
            how = (column.hashing.key_rule, column.hashing.seed)
            self._plan[number] = (*head, *how, _address(column.valid), column.bit_offset, *map(_address, pointers))

    def place(self, first: int, last: int, status: Int32s, key_base: int, keys: Keys, ends: Int64s) -> int:
        """Write keys and bag ends of examples [first, last), which have this `status`. Return the number of keys."""
        written = library().data_parse_columns(
            first=first,
            last=last,
            slots=len(self.columns),
            columns=self._plan,
            least=bucket_bounds(),
            small=small_buckets(),
            buckets=len(bucket_bounds()),
            status=status,
            key_base=key_base,
            keys=keys,
            ends=ends,
        )
        return int(written)


def _address(array: npt.NDArray[Any] | None) -> int:
    return 0 if array is None else array.ctypes.data


def _bucketised(column: KeyColumn) -> bool:
    return column.source == _INTEGERS and slot_kind(column.slot) == BUCKETS


def single_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Return the column as one Arrow array; the dictionaries of several chunks are merged."""
    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def is_list(kind: pa.DataType) -> bool:
    """Return True for list types, where an example has any number of values."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_key_type(kind: pa.DataType, integers_only: bool) -> bool:
    """Return True if values of this type can be keys. Floats are allowed for whole numbers, because pandas stores
    integers with missing values as floats."""
    if pa.types.is_dictionary(kind):
        return is_key_type(kind.value_type, integers_only)
    types = pa.types
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_floating(kind) or types.is_null(kind):
        return True
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    views = (types.is_string_view, types.is_binary_view)
    return not integers_only and any(is_kind(kind) for is_kind in (*texts, *views))


def _buffer(buffer: pa.Buffer | None, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.frombuffer(buffer, dtype) if buffer is not None and buffer.size else np.empty(0, dtype)


def _valid(array: pa.Array) -> npt.NDArray[np.uint8] | None:
    return _buffer(array.buffers()[0], np.uint8) if array.null_count else None


def key_column(array: pa.Array, slot: Slot, hashing: Hashing) -> KeyColumn:
    """Convert an Arrow array to the key column of `slot`."""
    if is_list(array.type):
        return _list_column(array, slot, hashing)
    if pa.types.is_null(array.type):
        array = array.cast(pa.int64())
    if pa.types.is_dictionary(array.type):
        return _dictionary_column(array, slot, hashing)
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type) or pa.types.is_floating(array.type):
        return _integer_column(array, slot, hashing)
    return _text_column(array, slot, hashing)


def _text_column(array: pa.Array, slot: Slot, hashing: Hashing) -> KeyColumn:
    kind = array.type
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not wide and not pa.types.is_string(kind) and not pa.types.is_binary(kind):
        array, wide = array.cast(pa.large_binary()), True
    _, offsets, data = array.buffers()
    places = _buffer(offsets, np.int64 if wide else np.int32)[array.offset :]
    return KeyColumn(
        slot,
        hashing,
        _TEXT64 if wide else _TEXT32,
        values=places,
        data=_buffer(data, np.uint8),
        valid=_valid(array),
        bit_offset=array.offset,
    )


def _integer_column(array: pa.Array, slot: Slot, hashing: Hashing) -> KeyColumn:
    bad = None
    if pa.types.is_floating(array.type):
        array, bad = _whole_numbers(array, hashing.key_rule)
    unsigned = pa.types.is_uint64(array.type)
    if unsigned and slot_kind(slot) == BUCKETS:
        over = pc.fill_null(pc.greater(array, pa.scalar(2**63 - 1, pa.uint64())), False).to_numpy(zero_copy_only=False)
        bad = np.where(over, OUT_OF_RANGE, 0).astype(np.int32) if over.any() else None
    if not unsigned and not pa.types.is_int64(array.type):
        array = array.cast(pa.int64())
    return KeyColumn(
        slot,
        hashing,
        _INTEGERS,
        values=_buffer(array.buffers()[1], np.uint64)[array.offset :],
        signed=not unsigned,
        valid=_valid(array),
        bit_offset=array.offset,
        bad=bad,
    )


def _whole_numbers(array: pa.Array, key_rule: int) -> tuple[pa.Array, Int32s | None]:
    """Convert floats to int64 and return them with the reason number of each value, or None if all are good.

    NaN is a missing value. Fractions are bad, and so are magnitudes from which floats cannot represent every integer:
    2^53, with key rule 2 also 2^24 for 32-bit floats and 2^11 for 16-bit floats, because as text they would be rounded
    to other numbers.
    """
    limit = 2.0 ** (53 if key_rule == 1 else DIGITS[array.type.bit_width])
    floats = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
    missing = np.isnan(floats)
    conditions = [missing, np.abs(floats) >= limit, floats != np.floor(floats)]
    reasons = np.select(conditions, [0, OUT_OF_RANGE, NOT_AN_INTEGER])
    whole = np.where(missing | (reasons != 0), 0, floats).astype(np.int64)
    return pa.array(whole, mask=missing), reasons.astype(np.int32) if reasons.any() else None


def _dictionary_column(array: pa.DictionaryArray, slot: Slot, hashing: Hashing) -> KeyColumn:
    """Hash each distinct value of the dictionary once. Examples then look up their keys by index."""
    values = key_column(array.dictionary, slot, hashing)
    indices = array.indices
    if not pa.types.is_int32(indices.type):
        indices = indices.cast(pa.int32())
    column = KeyColumn(
        slot,
        hashing,
        _INDICES,
        values=_buffer(indices.buffers()[1], np.int32)[indices.offset :],
        data=_distinct_keys(values, len(array.dictionary)),
        valid=_valid(indices),
        bit_offset=indices.offset,
    )
    missing = array.dictionary.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    if missing.any() or values.bad is not None:
        return _mark_by_dictionary(column, array, values, ~missing)
    return column


def _distinct_keys(values: KeyColumn, count: int) -> Keys:
    """Return one key for each value of the dictionary; the key of a missing value is undefined."""
    filled = replace(values, valid=None)
    keys, ends, status = np.empty(count, np.uint64), np.empty(count, np.int64), np.zeros(count, np.int32)
    KeyColumns([filled]).place(0, count, status, 0, keys, ends)
    return keys


def _mark_by_dictionary(
    column: KeyColumn, array: pa.DictionaryArray, values: KeyColumn, valid: npt.NDArray[np.bool_]
) -> KeyColumn:
    """Mark every example as missing or bad whose dictionary value is missing or bad. `valid` is True for dictionary
    values that are not missing."""
    there = array.indices.is_valid().to_numpy(zero_copy_only=False)
    numbers = np.where(there, array.indices.fill_null(0).to_numpy(zero_copy_only=False), 0)
    good = there & valid[numbers] if len(valid) else there
    bad = None if values.bad is None else np.where(there, values.bad[numbers], 0).astype(np.int32)
    return replace(column, valid=np.packbits(good, bitorder="little"), bit_offset=0, bad=bad)


def list_bounds(array: pa.Array) -> tuple[Int64s, pa.Array]:
    """Return where each example's values begin (n + 1,), and the values. Arrow may store values for a null list."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return (np.arange(len(array) + 1) + array.offset) * size, array.values
    if not len(array):
        return np.zeros(1, np.int64), array.values
    return array.offsets.to_numpy().astype(np.int64), array.values


def _list_column(array: pa.Array, slot: Slot, hashing: Hashing) -> KeyColumn:
    lists, values = list_bounds(array)
    column = key_column(values, slot, hashing)
    bad = np.zeros(len(array), np.int32)
    for reasons in (column.bad, _nulls(values)):
        if reasons is not None:
            bad = np.maximum(bad, _worst(reasons, lists))
    if array.null_count:
        bad[~array.is_valid().to_numpy(zero_copy_only=False)] = 0
    return replace(column, valid=_valid(array), bit_offset=array.offset, lists=lists, bad=bad if bad.any() else None)


def _nulls(values: pa.Array) -> Int32s | None:
    missing: npt.NDArray[np.bool_] = values.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    return np.where(missing, MISSING_VALUE, 0).astype(np.int32) if missing.any() else None


def _worst(reasons: Int32s, lists: Int64s) -> Int32s:
    """Return the largest reason number among the values of each example."""
    worst = np.zeros(len(lists) - 1, np.int32)
    examples = np.repeat(np.arange(len(worst)), np.diff(lists))
    np.maximum.at(worst, examples, reasons[lists[0] : lists[-1]])
    return worst


def float_column(array: pa.Array, missing: float | None) -> tuple[Floats, Int32s | None]:
    """Convert the column to float32 and return it with the reason number of each value, or None if all are good.

    A missing value becomes `missing`, or is bad if that is None. NaN and infinity are bad.
    """
    absent = array.is_null().to_numpy(zero_copy_only=False)
    wide = array.cast(pa.float64(), safe=False).fill_null(0.0 if missing is None else missing)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(wide.to_numpy(zero_copy_only=False).astype(np.float32))
    reasons = np.select([np.isnan(values), np.isinf(values)], [NOT_A_NUMBER, OUT_OF_RANGE])
    if missing is None:
        reasons = np.where(absent, MISSING_VALUE, reasons)
    return values, reasons.astype(np.int32) if reasons.any() else None


BAD_LABEL = CODES["the label is not 0 or 1"]
BAD_WEIGHT = CODES["a negative example weight"]
UNEVEN = CODES["keys and weights differ in number"]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnBlock:
    """Block of n examples, prepared for parsing."""

    examples: int
    labels: Floats  # (n,)
    slots: KeyColumns
    slot_weights: dict[int, tuple[Int64s, Floats]]  # by slot: where each example's weights begin (n + 1,), the weights
    dense: list[Floats]  # (n,) each
    example_weights: Floats | None  # (n,)
    status: Int32s  # (n,) reason and column as in data/bad.py, 0 for a good example


def check_types(schema: Schema, types: dict[str, pa.DataType], where: str) -> None:
    """Raise ConfigError if the schema does not fit the types of the columns; the message names every such column."""
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
    """Parser of columnar data: converts the columns of a block, then fills pieces of a batch from them."""

    task_examples = 8192  # examples; some milliseconds of work

    def __init__(self, schema: Schema, hash_seed: int) -> None:
        self._schema = schema
        self._hashing = [Hashing(slot_seed(hash_seed, slot.name), schema.key_rule) for slot in schema.slots]
        self._columns = schema.columns
        self.shape = Shape(
            slots=len(schema.slots),
            dense=len(schema.dense),
            weighted=schema.weighted,
            example_weighted=bool(schema.example_weight),
            fixed=all(slot.kind != "multi" and slot.missing_key for slot in schema.slots),
            log_columns=schema.log_columns,
        )

    def prepare(self, table: pa.Table) -> ColumnBlock:
        """Convert the columns of a block. Types are checked again, because the types of object columns in a data frame
        are known only now."""
        check_types(self._schema, types_of(table.schema), "a block of the data")
        schema, status = self._schema, np.zeros(table.num_rows, np.int32)
        arrays = {name: single_chunk(table.column(name)) for name in self._columns}

        def set_status(column: str, bad: Int32s | None) -> None:
            """Set the status of bad examples that have none yet: the first bad column counts, as in text parsers."""
            if bad is not None:
                code = bad | ((self._columns.index(column) + 1) << 8)
                np.copyto(status, code, where=(bad != 0) & (status == 0))

        labels = np.zeros(table.num_rows, np.float32)
        if schema.label:
            labels, bad = float_column(arrays[schema.label], None)
            wrong = (labels != 0) & (labels != 1)
            wrong |= False if bad is None else bad != 0
            if schema.label_needed:
                set_status(schema.label, np.where(wrong, BAD_LABEL, 0).astype(np.int32))
            else:
                labels = np.where(wrong, np.float32(np.nan), labels)
        slots: list[KeyColumn] = []
        slot_weights: dict[int, tuple[Int64s, Floats]] = {}
        for number, slot in enumerate(schema.slots):
            slots.append(key_column(arrays[slot.source], slot, self._hashing[number]))
            set_status(slot.source, slots[-1].bad)
            if slot.weights:
                lists, weights, bad = _weights(arrays[slot.weights], slots[-1], arrays[slot.source])
                slot_weights[number] = (lists, weights)
                set_status(slot.weights, bad)
        dense = []
        for feature in schema.dense:
            values, bad = float_column(arrays[feature.source], feature.missing_value)
            dense.append(values)
            set_status(feature.source, bad)
        example_weights = None
        if schema.example_weight:
            example_weights, bad = float_column(arrays[schema.example_weight], None)
            set_status(schema.example_weight, bad)
            set_status(schema.example_weight, np.where(example_weights < 0, BAD_WEIGHT, 0).astype(np.int32))
        if schema.label and not schema.label_needed:
            labels[status != 0] = 0
            set_status(schema.label, np.where(np.isnan(labels), BAD_LABEL, 0).astype(np.int32))
        return ColumnBlock(table.num_rows, labels, KeyColumns(slots), slot_weights, dense, example_weights, status)

    def most_keys(self, payload: ColumnBlock, part: Part) -> int:
        """Return an upper bound for the number of keys: all values of lists, and one for each slot of each example."""
        first, last = part.first, part.last
        return sum(
            part.examples if column.lists is None else int(column.lists[last] - column.lists[first]) + part.examples
            for column in payload.slots.columns
        )

    def parse(self, payload: ColumnBlock, part: Part, out: Piece) -> int:
        """Write the examples of `part` to `out`. Return the number of keys."""
        at = slice(part.first, part.last)
        status = payload.status[at]
        unlabelled = np.isnan(payload.labels[at])  # only the label is bad (label_needed is False)
        good = (status == 0) | unlabelled
        out.status[:] = status
        out.labels[:] = np.where(good, payload.labels[at], 0)
        for number, values in enumerate(payload.dense):
            out.dense[:, number] = np.where(good, values[at], 0)
        if out.example_weights is not None and payload.example_weights is not None:
            out.example_weights[:] = np.where(good, payload.example_weights[at], 0)
        skipped = np.where(good, 0, status) if unlabelled.any() else status
        used = payload.slots.place(part.first, part.last, skipped, out.key_base, out.keys, out.ends)
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

    def origin(self, file: DataFile, first_example: int) -> Origin:
        """Return the location of example `first_example` of `file`, for messages."""
        return Origin(file.url, first_example, unit="example", columns=tuple(self._columns))


def _weights(array: pa.Array, keys: KeyColumn, key_array: pa.Array) -> tuple[Int64s, Floats, Int32s | None]:
    """Return the weights of a slot's keys: where each example's weights begin, the weights, and the reason number of
    each example, or None if all are good. An example with different numbers of keys and weights is bad."""
    lists, values = list_bounds(array)
    floats, bad_values = float_column(values, None)
    lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), np.diff(lists), 0)
    key_lengths = np.ones(len(array), np.int64) if keys.lists is None else np.diff(keys.lists)
    key_lengths = np.where(key_array.is_valid().to_numpy(zero_copy_only=False), key_lengths, 0)
    bad = np.where(lengths != key_lengths, UNEVEN, 0).astype(np.int32)
    if bad_values is not None:
        examples = np.repeat(np.arange(len(array)), np.diff(lists))
        np.maximum.at(bad, examples, bad_values[lists[0] : lists[-1]])
    return lists, floats, bad if bad.any() else None


def types_of(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the type of every column by name."""
    return dict(zip(schema.names, schema.types, strict=True))


def needed(columns: Iterable[str], types: dict[str, pa.DataType]) -> list[str]:
    """Return the columns of text or bytes, to be read as dictionaries: each distinct value is then hashed once, not
    once per example."""
    text = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    return [name for name in columns if any(is_kind(types[name]) for is_kind in text)]


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
