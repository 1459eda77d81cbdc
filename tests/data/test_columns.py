"""Parquet columns of every type become the keys that a plain Python twin computes from the values."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.data.bad import BadExamplePolicy
from daskps.data.columns import Parquet
from daskps.data.reader import Source
from daskps.data.schema import Schema, Slot
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DataError
from daskps.types import Batch
from tests.data.text_twins import Row, expect, log_squared, respelled, seed_of

LENIENT = BadExamplePolicy("lenient", max_share=1.0)
TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
]
INTEGER_TYPES = {
    pa.int8(): (-128, 127),
    pa.uint8(): (0, 255),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint64(): (0, 2**64 - 1),
    pa.bool_(): (0, 1),
    pa.dictionary(pa.int32(), pa.int64()): (-(2**63), 2**63 - 1),
}


def read(path: Path, table: pa.Table, schema: Schema, pool: ComputePool, seed: int = 0, **write: Any) -> Batch:
    pq.write_table(table, path, **write)
    source = Source([str(path)], Parquet(), schema, seed, LENIENT)
    with source.open(source.index(), pool) as reader:
        return reader.read(0, table.num_rows)


def twin_key(value: Any, slot: Slot, seed: int) -> list[int]:
    """The bag of one value."""
    if value is None:
        return [xxhash.xxh64_intdigest(b"", seed_of(slot, seed))] if slot.missing_key else []
    if slot.raw:
        return [int(value) % 2**64]
    if slot.kind == "integer":
        value = f"SP{int(value)}" if value <= 2 else str(log_squared(int(value)))
    data = value if isinstance(value, bytes) else str(int(value) if not isinstance(value, str) else value).encode()
    return [xxhash.xxh64_intdigest(respelled(data), seed_of(slot, seed))]


def column(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if kind in INTEGER_TYPES:
        low, high = INTEGER_TYPES[kind]
        values = st.integers(low, high)
        return values.map(bool) if pa.types.is_boolean(kind) else values
    texts = st.text(max_size=40)
    return texts.map(str.encode) if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else texts


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, Schema, list[Row]]:
    """A table of single and list columns of drawn types, with its schema and the examples it should give (seed 3)."""
    examples = draw(st.integers(0, 9))
    slots: list[Slot] = []
    arrays: dict[str, pa.Array] = {
        "label": pa.array([draw(st.sampled_from([0, 1])) for _ in range(examples)], pa.int8())
    }
    bags: list[list[list[int]]] = []
    for number in range(draw(st.integers(1, 5))):
        integers = draw(st.booleans())
        kind = draw(st.sampled_from(list(INTEGER_TYPES) if integers else TEXT_TYPES))
        many = draw(st.booleans()) and not pa.types.is_dictionary(kind)
        raw = integers and draw(st.booleans())
        bucketised = integers and not many and not raw and kind != pa.uint64() and draw(st.booleans())
        missing = "none" if raw else draw(st.sampled_from(["auto", "key", "none"]))
        slot_kind = "multi" if many else "integer" if bucketised else "categorical"
        slot = Slot(name=f"slot {number}", column=f"c{number}", kind=slot_kind, raw=raw, missing=missing)
        values = column(kind)
        entry = st.none() | (st.lists(values, max_size=3) if many else values)
        data = draw(st.lists(entry, min_size=examples, max_size=examples))
        arrays[slot.source] = pa.array(data, pa.list_(kind) if many else kind)
        slots.append(slot)
        if many:
            bags.append(
                [[key for x in xs for key in twin_key(x, slot, 3)] if xs else twin_key(None, slot, 3) for xs in data]
            )
        else:
            bags.append([twin_key(x, slot, 3) for x in data])
    labels = arrays["label"].to_pylist()
    wanted = [Row(labels[example], [bag[example] for bag in bags], [], []) for example in range(examples)]
    return pa.table(arrays), Schema(tuple(slots)), wanted


@settings(max_examples=200, deadline=None)
@given(tables(), st.integers(1, 5), st.booleans(), st.sampled_from(["labelled", "unlabelled", "as if unlabelled"]))
def test_any_columns_give_the_twins_keys(
    tmp_path_factory: pytest.TempPathFactory,
    pool: ComputePool,
    drawn: tuple[pa.Table, Schema, list[Row]],
    group: int,
    dictionary: bool,
    labels: str,
) -> None:
    table, schema, examples = drawn
    if labels != "labelled":
        table = table.drop_columns("label")
        if labels == "as if unlabelled":
            table = table.append_column("label", pa.nulls(len(table), pa.string()))
        schema, examples = schema.unlabelled(), [replace(example, label=0.0) for example in examples]
    path = tmp_path_factory.mktemp("table") / "a.parquet"
    expect(read(path, table, schema, pool, seed=3, row_group_size=group, use_dictionary=dictionary), examples)


def test_a_number_has_one_key_whether_it_is_an_integer_or_text(tmp_path: Path, pool: ComputePool) -> None:
    schema = Schema((Slot(name="id"),))
    arrays = [pa.array([7, -(2**52)]), pa.array(["7", str(-(2**52))]), pa.array([7, -(2**52)], pa.float64())]
    keys = [read(tmp_path / "a.parquet", pa.table({"label": [0, 1], "id": ids}), schema, pool).keys for ids in arrays]
    for found in keys:
        np.testing.assert_array_equal(found, keys[0])


@pytest.mark.parametrize("slot", [Slot(name="a"), Slot(name="a", raw=True), Slot(name="a", kind="integer")])
def test_a_float_that_is_no_number_is_a_missing_value_also_among_distinct_values(
    tmp_path: Path, pool: ComputePool, slot: Slot
) -> None:
    values = pa.array([0.0, 7.0, float("nan"), None, 0.0])
    labels = pa.array([0] * len(values))
    plain, distinct = (
        read(tmp_path / "a.parquet", pa.table({"label": labels, "a": column}), Schema((slot,)), pool)
        for column in (values, values.dictionary_encode())
    )
    assert distinct.keys.tolist() == plain.keys.tolist()
    assert distinct.offsets.tolist() == plain.offsets.tolist()


def test_dense_features_and_weights_come_from_their_columns(tmp_path: Path, pool: ComputePool) -> None:
    schema = Schema(
        (Slot(name="words", kind="multi", weights="scores"), Slot(name="shop")),
        (Slot(name="price", kind="dense", missing_value=-1.0), Slot(name="seen", kind="dense", transform="log")),
        example_weight="w",
    )
    table = pa.table(
        {
            "label": pa.array([True, False, True]),
            "words": [["a", "b"], [], None],
            "scores": [[0.5, 2.0], [], []],
            "shop": ["x", None, "y"],
            "price": pa.array([1.5, None, 3.0], pa.float64()),
            "seen": [0, 1, 2],
            "w": pa.array([1.0, 0.0, 2.5], pa.float32()),
        }
    )
    batch = read(tmp_path / "a.parquet", table, schema, pool)
    assert batch.labels.tolist() == [1, 0, 1]
    assert np.diff(batch.offsets).tolist() == [2, 1, 0, 1, 0, 1]
    assert batch.weights is not None
    assert batch.weights.tolist() == [0.5, 2.0, 1, 1, 1]
    assert batch.dense is not None
    np.testing.assert_allclose(batch.dense, [[1.5, 0], [-1, np.log(2)], [3, np.log(3)]], rtol=1e-6)
    assert batch.example_weights is not None
    assert batch.example_weights.tolist() == [1, 0, 2.5]


BAD_TABLES: list[tuple[dict[str, Any], str, Sequence[int]]] = [
    ({"label": [1, 2, None, 0]}, "example 2, column 1 .label.: the label is not 0 or 1", [1, 2]),
    ({"price": [1.0, float("inf"), float("nan"), None]}, "example 2, column .* .price.: number out of range", [1, 2]),
    ({"ids": [[1], [2, None], [], None]}, "example 2, column .* .ids.: a missing value", [1]),
    ({"n": [1.0, None, 2.5, float("nan")]}, "example 3, column .* .n.: not an integer", [2]),
    ({"n": [1.0, 2.0**53, 3.0, 4.0]}, "example 2, column .* .n.: number out of range", [1]),
    ({"n": pa.array([1, 2**63, 2, 3], pa.uint64())}, "example 2, column .* .n.: number out of range", [1]),
    ({"scores": [[1.0], [1.0], [], []]}, "example 2, column .* .scores.: keys and weights differ in number", [1]),
    ({"w": [1.0, -1.0, None, 1.0]}, "example 2, column .* .w.: a negative example weight", [1, 2]),
]


@pytest.mark.parametrize(("change", "words", "bad"), BAD_TABLES, ids=[next(iter(case[0])) for case in BAD_TABLES])
def test_a_bad_example_is_named_or_skipped(
    tmp_path: Path, pool: ComputePool, change: dict[str, Any], words: str, bad: Sequence[int]
) -> None:
    schema = Schema(
        (Slot(name="ids", kind="multi", weights="scores"), Slot(name="n", kind="integer")),
        (Slot(name="price", kind="dense"),),
        example_weight="w",
    )
    columns: dict[str, Any] = {
        "label": [1, 0, 1, 0],
        "ids": [[1], [2, 3], [], None],
        "scores": [[1.0], [1.0, 2.0], [], []],
    }
    columns |= {"n": [1, 2, 3, 4], "price": [1.0, 2.0, 3.0, 4.0], "w": [1.0] * 4} | change
    table = pa.table(columns)
    batch = read(tmp_path / "a.parquet", table, schema, pool)
    for example in range(4):
        keys = batch.offsets[2 * example + 2] - batch.offsets[2 * example]
        assert (example in bad) == (keys == 0)
        assert batch.example_weights is not None
        assert (example in bad) == (batch.example_weights[example] == 0)
    source = Source([str(tmp_path / "a.parquet")], Parquet(), schema)
    with source.open(source.index(), pool) as reader, pytest.raises(DataError, match=words):
        reader.read(0, 4)


def test_a_bad_example_among_examples_of_one_key_each_has_none(tmp_path: Path, pool: ComputePool) -> None:
    table = pa.table({"label": [1, 5, 0], "a": ["x", "y", "z"], "b": [1, 2, 3]})
    batch = read(tmp_path / "a.parquet", table, Schema((Slot(name="a"), Slot(name="b"))), pool)
    assert batch.offsets.tolist() == [0, 1, 2, 2, 2, 3, 4]
    good = read(
        tmp_path / "b.parquet",
        table.take([0, 2]).set_column(0, "label", [[1, 0]]),
        Schema((Slot(name="a"), Slot(name="b"))),
        pool,
    )
    np.testing.assert_array_equal(batch.keys, good.keys)


def test_a_schema_that_does_not_fit_is_refused_naming_every_column(tmp_path: Path) -> None:
    table = pa.table({"label": ["1"], "a": [[1]], "b": ["x"], "c": [b"x"], "d": pa.array([0], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "a.parquet")
    slots = (Slot(name="a"), Slot(name="b", kind="integer"), Slot(name="c", raw=True), Slot(name="d"))
    with pytest.raises(ConfigError) as caught:
        Source([str(tmp_path)], Parquet(), Schema(slots, (Slot(name="b2", column="b", kind="dense"),))).index()
    for words in ("a is list", "slot 'b' wants integers", "slot 'c' wants", "d is timestamp", "label is string"):
        assert words in str(caught.value)


def test_where_only_labels_are_missing_the_error_says_what_does_without(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "a.parquet")
    for schema, advice in [
        (Schema((Slot(name="a"),), example_weight="w"), r"\['label', 'w'\].*predictions need neither .* as unlabelled"),
        (Schema((Slot(name="b"),)), r"\['label', 'b'\].*Correct the slots' `column` settings$"),
        (Schema((Slot(name="b"),)).unlabelled(), r"\['b'\].*Correct the slots' `column` settings$"),
    ]:
        with pytest.raises(ConfigError, match=advice):
            Source([str(tmp_path)], Parquet(), schema).index()


def test_every_file_must_have_the_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1], "a": ["x"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"label": [1], "b": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"b\.parquet: the schema names columns that are not there: \['a'\]"):
        Source([str(tmp_path)], Parquet(), Schema((Slot(name="a"),))).index()


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1], "a": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-3])
    with pytest.raises(DataError, match=r"a\.parquet is not a whole Parquet file"):
        Source([str(tmp_path)], Parquet(), Schema((Slot(name="a"),))).index()
