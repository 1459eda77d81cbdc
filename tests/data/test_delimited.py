"""Delimited text is read as a plain Python twin reads it, good examples and bad ones, wherever blocks are cut."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daskps.data.delimited import Delimited, criteo
from daskps.data.reader import Source
from daskps.data.schema import CRITEO_COLUMNS, Schema, Slot, criteo_schema
from daskps.data.text import _MAGIC
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DataError
from tests.data.criteo_rows import criteo_text
from tests.data.file_checks import check
from tests.data.text_twins import BadLineError, Row, delimited_row, lines_of

EVERY_KIND = Schema(
    slots=(
        Slot(name="user", column="u", missing="none"),
        Slot(name="user again", column="u"),
        Slot(name="count", kind="integer"),
        Slot(name="id", raw=True),
        Slot(name="tags", kind="multi"),
        Slot(name="ids", kind="multi", raw=True, separator=";"),
    ),
    dense=(
        Slot(name="price", kind="dense", missing_value=-1.0),
        Slot(name="count as dense", column="count", kind="dense"),
    ),
    label="click",
    example_weight="weight",
)
COLUMNS = ("u", "unused", "count", "click", "id", "tags", "price", "ids", "weight")


def twin_rows(text: bytes, schema: Schema, columns: list[str], delimiter: bytes, seed: int) -> list[Row | BadLineError]:
    examples: list[Row | BadLineError] = []
    for line in lines_of(text):
        try:
            examples.append(delimited_row(line, schema, list(columns), delimiter, seed))
        except BadLineError as bad:
            examples.append(bad)
    return examples


@pytest.mark.parametrize("block_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_criteo_examples_are_read_as_the_twin_reads_them(
    tmp_path: Path, pool: ComputePool, block_bytes: int, end: bytes
) -> None:
    text = criteo_text(200).replace(b"\n", end)
    path = tmp_path / "day.tsv"
    source = Source([str(path)], criteo(block_bytes), criteo_schema(), hash_seed=5)
    check(path, text, source, twin_rows(text, source.schema, CRITEO_COLUMNS, b"\t", 5), pool)


def test_criteo_examples_without_labels_have_one_column_less(tmp_path: Path, pool: ComputePool) -> None:
    labelled = criteo_text(200)
    text = b"".join(line.partition(b"\t")[2] for line in labelled.splitlines(keepends=True))
    path, schema = tmp_path / "test.txt", criteo_schema().unlabelled()
    source = Source([str(path)], criteo(1000, labelled=False), schema, hash_seed=5)
    check(path, text, source, twin_rows(text, schema, CRITEO_COLUMNS[1:], b"\t", 5), pool)
    for found, told in [
        (source, r"40, the schema wants 39 \(I1 to C26\)"),
        (Source([str(path)], criteo(), criteo_schema()), r"39, the schema wants 40 \(label to C26\)"),
    ]:
        path.write_bytes(labelled if found is source else text)
        with found.open(found.index(), pool) as reader, pytest.raises(DataError, match=f"line 1: .*: {told}"):
            reader.read(0, 1)


fields = st.one_of(
    st.binary(max_size=12).map(lambda x: x.replace(b"\n", b"")),
    st.integers(-(2**66), 2**66).map(lambda x: b"%d" % x),
    st.integers(-5, 20).map(lambda x: b"%d" % x),
    st.floats(width=32).map(lambda x: repr(x).encode()),
    st.floats().map(lambda x: repr(x).encode()),
    st.lists(st.integers(-3, 2**65), max_size=4).map(lambda x: b";".join(b"%d" % y for y in x)),
    st.lists(st.sampled_from([b"a", b"bc", b"\xff\xfe", b""]), max_size=4).map(b"|".join),
    st.sampled_from([b"", b"0", b"1", b"1.0", b"+1", b"-0", b"1e0", b".5", b"5.", b".", b"1e400", b"1e-400", b'"x"']),
)
good = st.tuples(
    st.binary(max_size=40).map(lambda x: x.translate(None, b'\n\r\t,"')),
    st.just(b"x"),
    st.integers(-(2**63), 2**63 - 1).map(lambda x: b"%d" % x),
    st.sampled_from([b"0", b"1"]),
    st.integers(-(2**63), 2**64 - 1).map(lambda x: b"%d" % x),
    st.lists(st.sampled_from([b"a", b"bc", b"\xff\xfe"]), max_size=4).map(b"|".join),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(lambda x: repr(x).encode()),
    st.lists(st.integers(0, 2**64 - 1), max_size=4).map(lambda x: b";".join(b"%d" % y for y in x)),
    st.floats(0, 100, width=32).map(lambda x: repr(x).encode()),
).map(list)


@st.composite
def line(draw: st.DrawFn) -> list[bytes]:
    """A good line, mostly, with some of its fields replaced or a field too many."""
    example = draw(good)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        example[draw(st.integers(0, len(example) - 1))] = draw(fields)
    if draw(st.integers(0, 9)) == 0:
        example = draw(st.lists(fields, max_size=12))
    return example


@settings(max_examples=300, deadline=None)
@given(
    examples=st.lists(line(), max_size=12),
    delimiter=st.sampled_from([b"\t", b","]),
    end=st.sampled_from([b"\n", b"\r\n"]),
    last_end=st.booleans(),
    block_bytes=st.sampled_from([16, 64, 4096]),
    seed=st.integers(0, 2**64 - 1),
    schema=st.sampled_from([EVERY_KIND, EVERY_KIND.unlabelled()]),
)
@example([[b"", b"", b"3", b"1", b"", b"", b"9" * 600, b"", b"1"]], b"\t", b"\n", True, 16, 0, EVERY_KIND)
@example([[b"", b"", b"3", b"x", b"", b"", b"", b"", b""]], b"\t", b"\n", True, 16, 0, EVERY_KIND.unlabelled())
@example([[b"\r"] * 9, [b"\r"]], b"\t", b"\n", False, 16, 0, EVERY_KIND)
def test_any_bytes_are_read_as_the_twin_reads_them(
    tmp_path_factory: pytest.TempPathFactory,
    pool: ComputePool,
    examples: list[list[bytes]],
    delimiter: bytes,
    end: bytes,
    last_end: bool,
    block_bytes: int,
    seed: int,
    schema: Schema,
) -> None:
    text = end.join(delimiter.join(example) for example in examples) + (end if last_end else b"")
    path = tmp_path_factory.mktemp("fuzz") / "examples.txt"
    source = Source(
        [str(path)], Delimited(delimiter.decode(), COLUMNS, block_bytes=block_bytes), schema, hash_seed=seed
    )
    if text.startswith((b"\xef\xbb\xbf", *_MAGIC)):  # a byte order mark, or what no text begins with
        text = b"0" + text
    check(path, text, source, twin_rows(text, schema, COLUMNS, delimiter, seed), pool)


EDGES = [2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**19, 10**20, 3 * 10**20, 2**66 + 5, 10**30]
INTEGER_EDGES = [*EDGES, *(-edge for edge in EDGES), -(2**63) - 1, 0, 2, 3, 65535, 65536]
FLOAT_EDGES = [" 1", "1" * 40, "0." + "0" * 60 + "1", "9" * 511, "9" * 512]
FLOAT_EDGES += (
    "9007199254740993 9007199254740993.0000000001 90071992547409935e-1 1e22 1e23 8.5e22 1e-22 1e-23 3.4028235e38 "
    "3.4028235677973366e38 3.4028236e38 -1e39 1.4e-45 7e-46 1e-320 1e999999999999 0.1 0.30000001192092896 16777217 "
    "16777217.0000001 000000000000000000000.5 +.5e+1 5.e-0 1e 1e+ e5 --1 1_0 0x10 infinity 1.2.3 1f"
).split()


def test_numbers_at_the_edges_are_read_as_the_twin_reads_them(tmp_path: Path, pool: ComputePool) -> None:
    plain = [b"u", b"", b"1", b"1", b"1", b"a", b"1", b"1", b"1"]
    edges = {2: INTEGER_EDGES, 4: INTEGER_EDGES, 7: INTEGER_EDGES, 6: FLOAT_EDGES, 8: FLOAT_EDGES}
    lines = [
        [*plain[:column], str(value).encode(), *plain[column + 1 :]]
        for column, values in edges.items()
        for value in values
    ]
    text = b"".join(b"\t".join(line) + b"\n" for line in lines)
    path = tmp_path / "edges.tsv"
    source = Source([str(path)], Delimited("\t", COLUMNS, block_bytes=512), EVERY_KIND, hash_seed=1)
    check(path, text, source, twin_rows(text, EVERY_KIND, COLUMNS, b"\t", 1), pool)


def test_a_header_names_the_columns_and_a_byte_order_mark_is_not_data(tmp_path: Path, pool: ComputePool) -> None:
    for number, mark in enumerate([b"", b"\xef\xbb\xbf"]):
        (tmp_path / f"{number}.csv").write_bytes(mark + b"item,label\r\na,1\r\nb,0\r\n")
    (tmp_path / "2.csv").write_bytes(b"item,label\n")
    source = Source([str(tmp_path)], Delimited(","), Schema((Slot(name="item"),)))
    index = source.index()
    assert [blocks.examples for blocks in index.files] == [2, 2, 0]
    with source.open(index, pool) as reader:
        batch = reader.read(0, 4)
    assert batch.labels.tolist() == [1, 0, 1, 0]
    assert batch.keys[:2].tolist() == batch.keys[2:].tolist()


def test_the_line_of_a_bad_example_counts_the_header(tmp_path: Path, pool: ComputePool) -> None:
    (tmp_path / "a.csv").write_bytes(b"item,label\na,1\nb,7\n")
    source = Source([str(tmp_path)], Delimited(","), Schema((Slot(name="item"),)))
    with (
        source.open(source.index(), pool) as reader,
        pytest.raises(DataError, match=r"a\.csv, line 3, column 2 \(label\): the label is not 0 or 1"),
    ):
        reader.read(0, 2)


@pytest.mark.parametrize("line", [b'"a,b",1', b'c,"1,0"', b'a,1,"x"'])
def test_a_comma_inside_quotes_is_told_as_a_quoted_field(line: bytes, tmp_path: Path, pool: ComputePool) -> None:
    (tmp_path / "a.csv").write_bytes(b"item,label\na,1\n" + line + b"\na,0")
    source = Source([str(tmp_path)], Delimited(","), Schema((Slot(name="item"),)))
    column = line[: line.index(b'"')].count(b",") + 1
    with (
        source.open(source.index(), pool) as reader,
        pytest.raises(DataError, match=rf"line 3, column {column}.*: a quoted field, .*write the file without quotes"),
    ):
        reader.read(0, 3)


def test_files_whose_headers_differ_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"item,label\na,1\n")
    (tmp_path / "b.csv").write_bytes(b"label,item\n1,a\n")
    with pytest.raises(DataError, match=r"b\.csv has the columns .*'label', 'item'.* but .*a\.csv"):
        Source([str(tmp_path)], Delimited(","), Schema((Slot(name="item"),))).index()


def test_a_schema_that_does_not_fit_is_refused_before_reading_naming_the_columns(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"1\t2\n")
    schema = Schema((Slot(name="item"), Slot(name="C1"), Slot(name="shop", column="s")))
    with pytest.raises(ConfigError, match=r"not there: \['item', 's'\]"):
        Source([str(tmp_path)], criteo(), schema).index()


def test_a_separator_that_is_the_delimiter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"item,label\na,1\n")
    with pytest.raises(ConfigError, match="separator is the delimiter"):
        Source([str(tmp_path)], Delimited(","), Schema((Slot(name="item", kind="multi", separator=","),))).index()


def test_dense_integers_are_log_scaled(tmp_path: Path, pool: ComputePool) -> None:
    example = ["1", "7", "-3", ""] + ["0"] * 10 + ["a"] * 26
    (tmp_path / "a.tsv").write_text("\t".join(example) + "\n")
    source = Source([str(tmp_path)], criteo(), criteo_schema(dense_integers=True))
    with source.open(source.index(), pool) as reader:
        batch = reader.read(0, 1)
    assert batch.slots == 26
    assert batch.dense is not None
    assert batch.dense[0, :3].tolist() == pytest.approx([2.0794415, -1.3862944, 0.0])
