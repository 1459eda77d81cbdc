"""The example index is small, can be kept, and notices when its files change."""

import os
from pathlib import Path

import pytest

from daskps.data.delimited import criteo
from daskps.data.format import ExampleIndex
from daskps.data.reader import Source
from daskps.data.schema import criteo_schema
from daskps.device.pool import ComputePool
from daskps.errors import DataError
from tests.data.criteo_rows import criteo_text


def source_of(folder: Path) -> Source:
    return Source([str(folder)], criteo(1000), criteo_schema())


def test_an_index_survives_json(tmp_path: Path, pool: ComputePool) -> None:
    (tmp_path / "a.tsv").write_bytes(criteo_text(100))
    (tmp_path / "b.tsv").write_bytes(b"")
    source = source_of(tmp_path)
    index = source.index()
    copy = ExampleIndex.from_json(index.to_json())
    assert copy.parts(13, 77) == index.parts(13, 77)
    assert copy.fingerprint == index.fingerprint
    with source.open(copy, pool) as reader:
        assert reader.read(99, 100).examples == 1


def test_other_text_is_not_taken_for_an_index() -> None:
    with pytest.raises(DataError, match="not an index of examples"):
        ExampleIndex.from_json('{"files": []}')


def test_parts_cover_the_range_in_order_without_empty_ones(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.tsv").write_bytes(criteo_text(30 * (number % 2)))
    index = source_of(tmp_path).index()
    parts = index.parts(3, 57)
    assert sum(part.examples for part in parts) == 54
    assert all(part.examples > 0 for part in parts)
    assert {part.file for part in parts} == {1, 3}
    assert [(part.file, part.block) for part in parts] == sorted((part.file, part.block) for part in parts)


def test_a_kept_index_is_used_for_files_that_did_not_change_and_only_for_those(tmp_path: Path) -> None:
    data, kept = tmp_path / "data", str(tmp_path / "index.json")
    data.mkdir()
    for name in ("a.tsv", "b.tsv"):
        (data / name).write_bytes(criteo_text(10))
    source = source_of(data)
    first = source.index(cache_url=kept)
    assert first.examples == 20
    stamp = os.stat(data / "a.tsv")
    text = (data / "a.tsv").read_bytes()
    (data / "a.tsv").write_bytes(text.replace(b"\n", b" ", 1))  # same size: only the time of change tells
    os.utime(data / "a.tsv", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert source.index(cache_url=kept).examples == 20  # the kept count, as nothing seems to have changed
    os.utime(data / "a.tsv", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))
    assert source.index(cache_url=kept).examples == 19
    (data / "b.tsv").write_bytes(criteo_text(11))
    assert source.index(cache_url=kept).examples == 20


def test_files_that_changed_since_they_were_indexed_are_refused(tmp_path: Path, pool: ComputePool) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(criteo_text(10))
    source = source_of(tmp_path)
    index = source.index()
    index.check_files(source.format.list(source.urls))
    for text, words in [
        (criteo_text(10)[:-300], "ends at byte .* it changed"),
        (criteo_text(10).replace(b"\n", b" ", 1), "lines in block .* when it was indexed: the file changed"),
    ]:
        path.write_bytes(text)
        with source.open(index, pool) as reader, pytest.raises(DataError, match=words):
            reader.read(0, 10)
    path.write_bytes(criteo_text(11))
    with pytest.raises(DataError, match="it changed; build the index again"):
        index.check_files(source.format.list(source.urls))


def test_a_fingerprint_names_the_data_not_its_place(tmp_path: Path) -> None:
    prints = []
    for name, examples in (("a", 10), ("b", 10), ("c", 11)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.tsv").write_bytes(criteo_text(examples))
        prints.append(source_of(tmp_path / name).index().fingerprint)
    assert prints[0] == prints[1] != prints[2]
