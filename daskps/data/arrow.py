"""Arrow columns as plain arrays over their own buffers: what the native placing of keys takes. Nothing large is copied.

In: one Arrow column of a block. Out: `KeyColumn` (text, integers, or indices into keys of a dictionary, each perhaps in
lists), or floats; both with the status of rows whose value cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from daskps.backend.native import library
from daskps.data.bad import CODES
from daskps.data.keys import bucket_bounds, bucket_keys, small_buckets
from daskps.data.schema import Slot
from daskps.data.slots import BUCKETS, slot_kind
from daskps.types import Floats, Int32s, Int64s, Keys

MISSING_VALUE = CODES["a missing value"]
NOT_AN_INTEGER = CODES["not an integer"]
NOT_A_NUMBER = CODES["not a number"]
OUT_OF_RANGE = CODES["number out of range"]


# The struct KeyColumn of columns.cpp.
_COLUMN = np.dtype(
    [(name, np.int32) for name in "source kind missing_key is_signed".split()]
    + [("seed", np.uint64), ("valid", np.uint64), ("bit_offset", np.int64)]
    + [(name, np.uint64) for name in "lists values data bucket_keys".split()]
)
_TEXT32, _TEXT64, _INTEGERS, _INDICES = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class KeyColumn:
    """The values of one slot in a block of n rows."""

    slot: Slot
    seed: int
    source: int
    values: npt.NDArray[Any]  # offsets of text, integers, or indices
    data: npt.NDArray[Any] | None = None  # bytes of text, or keys of the distinct values
    signed: bool = True
    valid: npt.NDArray[np.uint8] | None = None  # bitmap over rows
    bit_offset: int = 0
    lists: Int64s | None = None  # (n + 1,)
    bad: Int32s | None = None  # (n,) reason, 0 for fine


class KeyColumns:
    """Columns as columns.cpp takes them; it points into their arrays, so it keeps them."""

    def __init__(self, columns: Sequence[KeyColumn]) -> None:
        self.columns = columns
        self._bucket_keys = [bucket_keys(column.seed) if _bucketised(column) else None for column in columns]
        self._plan = np.zeros(len(columns), _COLUMN)
        for number, column in enumerate(columns):
            pointers = (column.lists, column.values, column.data, self._bucket_keys[number])
            head = (column.source, slot_kind(column.slot), column.slot.missing_key, column.signed, column.seed)
            self._plan[number] = (*head, _address(column.valid), column.bit_offset, *map(_address, pointers))

    def place(self, first: int, last: int, status: Int32s, key_base: int, keys: Keys, ends: Int64s) -> int:
        """The keys and bag ends of rows [first, last), whose status this is; returns the number of keys."""
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
    """The column in one piece; dictionaries of several pieces are made one."""
    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def is_list(kind: pa.DataType) -> bool:
    """Whether a row of this type has any number of values."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_key_type(kind: pa.DataType, integers_only: bool) -> bool:
    """Whether single values of this type can be keys. Floats can where they hold whole numbers (pandas with gaps)."""
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


def key_column(array: pa.Array, slot: Slot, seed: int) -> KeyColumn:
    """The column of `slot` from `array`."""
    if is_list(array.type):
        return _list_column(array, slot, seed)
    if pa.types.is_null(array.type):
        array = array.cast(pa.int64())
    if pa.types.is_dictionary(array.type):
        return _dictionary_column(array, slot, seed)
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type) or pa.types.is_floating(array.type):
        return _integer_column(array, slot, seed)
    return _text_column(array, slot, seed)


def _text_column(array: pa.Array, slot: Slot, seed: int) -> KeyColumn:
    kind = array.type
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not wide and not pa.types.is_string(kind) and not pa.types.is_binary(kind):
        array, wide = array.cast(pa.large_binary()), True
    _, offsets, data = array.buffers()
    places = _buffer(offsets, np.int64 if wide else np.int32)[array.offset :]
    return KeyColumn(
        slot,
        seed,
        _TEXT64 if wide else _TEXT32,
        values=places,
        data=_buffer(data, np.uint8),
        valid=_valid(array),
        bit_offset=array.offset,
    )


def _integer_column(array: pa.Array, slot: Slot, seed: int) -> KeyColumn:
    bad = None
    if pa.types.is_floating(array.type):
        array, bad = _whole_numbers(array)
    unsigned = pa.types.is_uint64(array.type)
    if unsigned and slot_kind(slot) == BUCKETS:
        over = pc.fill_null(pc.greater(array, pa.scalar(2**63 - 1, pa.uint64())), False).to_numpy(zero_copy_only=False)
        bad = np.where(over, OUT_OF_RANGE, 0).astype(np.int32) if over.any() else None
    if not unsigned and not pa.types.is_int64(array.type):
        array = array.cast(pa.int64())
    return KeyColumn(
        slot,
        seed,
        _INTEGERS,
        values=_buffer(array.buffers()[1], np.uint64)[array.offset :],
        signed=not unsigned,
        valid=_valid(array),
        bit_offset=array.offset,
        bad=bad,
    )


def _whole_numbers(array: pa.Array) -> tuple[pa.Array, Int32s | None]:
    """Floats as int64; NaN is missing; fractions are bad, and so is 2^53 and above, where floats skip integers."""
    floats = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
    missing = np.isnan(floats)
    conditions = [missing, np.abs(floats) >= 2.0**53, floats != np.floor(floats)]
    reasons = np.select(conditions, [0, OUT_OF_RANGE, NOT_AN_INTEGER])
    whole = np.where(missing | (reasons != 0), 0, floats).astype(np.int64)
    return pa.array(whole, mask=missing), reasons.astype(np.int32) if reasons.any() else None


def _dictionary_column(array: pa.DictionaryArray, slot: Slot, seed: int) -> KeyColumn:
    """Hash the distinct values once; rows then look their keys up."""
    values = key_column(array.dictionary, slot, seed)
    indices = array.indices
    if not pa.types.is_int32(indices.type):
        indices = indices.cast(pa.int32())
    column = KeyColumn(
        slot,
        seed,
        _INDICES,
        values=_buffer(indices.buffers()[1], np.int32)[indices.offset :],
        data=_distinct_keys(values, len(array.dictionary)),
        valid=_valid(indices),
        bit_offset=indices.offset,
    )
    missing = array.dictionary.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    if missing.any() or values.bad is not None:
        return _through_dictionary(column, array, values, ~missing)
    return column


def _distinct_keys(values: KeyColumn, count: int) -> Keys:
    """One key for each distinct value; whatever for one that is missing."""
    filled = replace(values, valid=None)
    keys, ends, status = np.empty(count, np.uint64), np.empty(count, np.int64), np.zeros(count, np.int32)
    KeyColumns([filled]).place(0, count, status, 0, keys, ends)
    return keys


def _through_dictionary(
    column: KeyColumn, array: pa.DictionaryArray, values: KeyColumn, valid: npt.NDArray[np.bool_]
) -> KeyColumn:
    """A row is missing or bad where its distinct value is; `valid` tells which of these are there."""
    there = array.indices.is_valid().to_numpy(zero_copy_only=False)
    numbers = np.where(there, array.indices.fill_null(0).to_numpy(zero_copy_only=False), 0)
    good = there & valid[numbers] if len(valid) else there
    bad = None if values.bad is None else np.where(there, values.bad[numbers], 0).astype(np.int32)
    return replace(column, valid=np.packbits(good, bitorder="little"), bit_offset=0, bad=bad)


def list_bounds(array: pa.Array) -> tuple[Int64s, pa.Array]:
    """(n + 1,) where each row's values begin, and the values; a row without a list may still have values."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return (np.arange(len(array) + 1) + array.offset) * size, array.values
    if not len(array):
        return np.zeros(1, np.int64), array.values
    return array.offsets.to_numpy().astype(np.int64), array.values


def _list_column(array: pa.Array, slot: Slot, seed: int) -> KeyColumn:
    lists, values = list_bounds(array)
    column = key_column(values, slot, seed)
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
    """The largest reason among the values of each row."""
    worst = np.zeros(len(lists) - 1, np.int32)
    rows = np.repeat(np.arange(len(worst)), np.diff(lists))
    np.maximum.at(worst, rows, reasons[lists[0] : lists[-1]])
    return worst


def float_column(array: pa.Array, missing: float | None) -> tuple[Floats, Int32s | None]:
    """The column as float32; what is missing becomes `missing`, or bad where that is None; NaN and infinity are bad."""
    absent = array.is_null().to_numpy(zero_copy_only=False)
    wide = array.cast(pa.float64(), safe=False).fill_null(0.0 if missing is None else missing)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(wide.to_numpy(zero_copy_only=False).astype(np.float32))
    reasons = np.select([np.isnan(values), np.isinf(values)], [NOT_A_NUMBER, OUT_OF_RANGE])
    if missing is None:
        reasons = np.where(absent, MISSING_VALUE, reasons)
    return values, reasons.astype(np.int32) if reasons.any() else None
