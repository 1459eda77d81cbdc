"""A digest of the examples before a position depends on what they say, not on where files are or how they are read."""

import gzip
import itertools
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.data.columns import Parquet
from daskps.data.delimited import Delimited
from daskps.data.format import Format
from daskps.data.frame import frame_source
from daskps.data.reader import Source
from daskps.data.schema import Schema, Slot
from daskps.device.pool import ComputePool

SCHEMA = Schema((Slot(name="a"),))
POOL = ComputePool(1)
HEADER = b"label,a\n"
LINES = st.lists(st.sampled_from([b"0,x", b"1,y", b"0," + b"long" * 20, b"1,\r", b"bad"]), min_size=1, max_size=40)
NUMBERS = itertools.count()


def digest(source: Source, example: int) -> str:
    with source.open(source.index(), POOL) as reader:
        return reader.data_before(example)


def write(folder: Path, lines: list[bytes], compressed: bool, end: bytes = b"\n") -> Source:
    text = HEADER + b"\n".join(lines) + end
    path = folder / f"{next(NUMBERS)}" / ("a.csv.gz" if compressed else "a.csv")
    path.parent.mkdir()
    path.write_bytes(gzip.compress(text) if compressed else text)
    return Source([str(path)], Delimited(","), SCHEMA)


def blocks(source: Source, block_bytes: int) -> Source:
    return Source(source.urls, Delimited(",", block_bytes=block_bytes), SCHEMA)


@settings(max_examples=60, deadline=None)
@given(LINES, st.data(), st.booleans())
def test_the_digest_of_text_is_that_of_the_lines_before_the_example_and_of_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: Any, compressed: bool
) -> None:
    folder = tmp_path_factory.mktemp("text")
    example = data.draw(st.integers(1, len(lines)))
    then = write(folder, lines, compressed)
    wanted = digest(then, example)
    sizes = data.draw(st.lists(st.integers(8, 300), min_size=1, max_size=3))
    assert {digest(blocks(then, size), example) for size in sizes} == {wanted}
    behind = data.draw(LINES)
    assert digest(write(folder, [*lines[:example], *behind], not compressed, b""), example) == wanted
    changed = data.draw(st.integers(0, example - 1))
    other = [*lines[:changed], lines[changed] + b"!", *lines[changed + 1 :]]
    assert digest(blocks(write(folder, other, compressed), sizes[0]), example) != wanted
    if example > 1 and lines[0] != lines[example - 1]:  # nor may they change places
        swapped = [lines[example - 1], *lines[1 : example - 1], lines[0], *lines[example:]]
        assert digest(write(folder, swapped, compressed), example) != wanted


def test_the_header_is_part_of_what_is_before(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"label,a,b\n0,1,2\n")
    (tmp_path / "b.csv").write_bytes(b"label,b,a\n0,1,2\n")
    one, other = (Source([str(tmp_path / name)], Delimited(","), SCHEMA) for name in ("a.csv", "b.csv"))
    assert digest(one, 1) != digest(other, 1)


def test_a_byte_order_mark_is_none(tmp_path: Path) -> None:
    texts = (b"0,x\n1,y\n", b"\xef\xbb\xbf0,x\n1,y\n")
    found = set()
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.csv").write_bytes(text)
        source = Source([str(tmp_path / f"{number}.csv")], Delimited(",", ("label", "a")), SCHEMA)
        found.add((digest(source, 1), digest(source, 2)))
    assert len(found) == 1


def test_all_files_before_the_example_count_and_none_behind(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.csv").write_bytes(HEADER + name.encode().join([b"0,", b"\n1,", b"\n"]))
    source = Source([str(tmp_path)], Delimited(","), SCHEMA)
    then = {example: digest(source, example) for example in range(1, 7)}
    assert len(set(then.values())) == 6
    (tmp_path / "b.csv").write_bytes(HEADER + b"0,b\n1,B\n")
    now = {example: digest(source, example) for example in range(1, 7)}
    assert [example for example in then if then[example] == now[example]] == [1, 2, 3]


@pytest.mark.parametrize("format", [Delimited(","), Parquet()])
def test_a_copy_elsewhere_has_the_same_digest(tmp_path: Path, format: Format) -> None:
    table = pa.table({"label": [0, 1, 0], "a": ["x", "y", "z"]})
    found = set()
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        if isinstance(format, Parquet):
            pq.write_table(table, tmp_path / folder / "a")
        else:
            table.to_pandas().to_csv(tmp_path / folder / "a", index=False)
        found.add(digest(Source([str(tmp_path / folder)], format, SCHEMA), 2))
    assert len(found) == 1


def test_a_parquet_file_counts_whole_by_its_footer_and_size(tmp_path: Path) -> None:
    def of(values: list[str], more: list[str]) -> str:
        for name, column in (("a", values), ("b", more)):
            pq.write_table(pa.table({"label": [0] * len(column), "a": column}), tmp_path / f"{name}.parquet")
        Parquet.index.__globals__["_footer"].cache_clear()
        return digest(Source([str(tmp_path)], Parquet(), SCHEMA), 1)

    then = of(["x", "y"], ["z"])
    assert of(["x", "y"], ["other", "rows"]) == then  # behind
    assert of(["x", "yy"], ["z"]) != then
    assert of(["x", "y", "z"], ["z"]) != then


def test_a_frame_counts_by_where_its_partitions_begin() -> None:
    def of(*lengths: int) -> str:
        frame = pd.DataFrame({"label": np.zeros(sum(lengths), int), "a": "x"})
        bounds = np.cumsum([0, *lengths])
        parts = [frame.iloc[start:stop] for start, stop in itertools.pairwise(bounds)]
        return digest(frame_source(dd.from_map(lambda part: part, parts), SCHEMA), 5)

    assert of(3, 4, 5) == of(3, 4, 6) == of(3, 9)
    assert len({of(3, 4, 5), of(2, 5, 5), of(5, 7)}) == 3


def test_blank_lines_at_the_end_of_a_file_are_no_examples(tmp_path: Path) -> None:
    for end in (b"", b"\n", b"\n\n", b"\r\n\r\n", b"\n\n\r\n\n"):
        for block_bytes in (9, 12, 1 << 20):
            path = tmp_path / "a.csv"
            path.write_bytes(HEADER + b"0,x\n1,y" + end)
            source = Source([str(path)], Delimited(",", block_bytes=block_bytes), SCHEMA)
            with source.open(source.index(), POOL) as reader:
                assert reader.examples == 2
                assert reader.read(0, 2).labels.tolist() == [0, 1]
                if b"\r" not in end:
                    assert reader.data_before(2) == digest(write(tmp_path, [b"0,x", b"1,y"], False), 2)
    path.write_bytes(HEADER + b"\n\n")
    assert source.index().examples == 0
    path.write_bytes(HEADER + b"0,x\n\n1,y\n")
    assert source.index().examples == 3  # in between they are, and bad ones
