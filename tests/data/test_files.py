"""Files are found, decompressed and read wherever fsspec reaches, and damage is named with its place."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from daskps.data.columns import Parquet
from daskps.data.delimited import criteo
from daskps.data.files import list_files
from daskps.data.reader import Source
from daskps.data.schema import Schema, Slot, criteo_schema
from daskps.device.pool import ComputePool
from daskps.errors import DataError
from daskps.types import Batch
from tests.data.criteo_rows import criteo_text


def compress(text: bytes, kind: str) -> bytes:
    return gzip.compress(text, 1) if kind == "gz" else pa.Codec("zstd").compress(text).to_pybytes()


def read_all(urls: list[str], pool: ComputePool, block_bytes: int = 3000) -> Batch:
    source = Source(urls, criteo(block_bytes), criteo_schema())
    index = source.index(threads=2)
    with source.open(index, pool) as reader:
        return reader.read(0, index.examples)


def same(left: Batch, right: Batch) -> None:
    for name in ("labels", "keys", "offsets"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    path = tmp_path_factory.mktemp("plain") / "a.tsv"
    path.write_bytes(criteo_text(300))
    with ComputePool(1) as pool:
        return read_all([str(path)], pool)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_text_gives_the_same_batch(tmp_path: Path, pool: ComputePool, wanted: Batch, kind: str) -> None:
    path = tmp_path / f"a.tsv.{kind}"
    path.write_bytes(compress(criteo_text(300), kind))
    same(read_all([str(path)], pool), wanted)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_several_compressed_members_in_one_file_are_one_text(
    tmp_path: Path, pool: ComputePool, wanted: Batch, kind: str
) -> None:
    text = criteo_text(300)
    path = tmp_path / f"a.tsv.{kind}"
    path.write_bytes(compress(text[:5000], kind) + compress(text[5000:], kind))
    same(read_all([str(path)], pool), wanted)


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("kept", [0.999, 0.5, 0.01])
def test_a_truncated_file_is_named_with_its_place(tmp_path: Path, kind: str, kept: float) -> None:
    data = compress(criteo_text(300), kind)
    path = tmp_path / f"a.tsv.{kind}"
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(
        DataError, match=rf"a\.tsv\.{kind}: the (gzip|zstd) file cannot be read past byte \d+ of its text"
    ):
        Source([str(path)], criteo(), criteo_schema()).index()


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    data = bytearray(compress(criteo_text(300), "gz"))
    data[len(data) // 2] ^= 0xFF
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.tsv\.gz: the gzip file cannot be read"):
        Source([str(path)], criteo(), criteo_schema()).index()


@pytest.mark.parametrize("name", ["empty.tsv", "empty.tsv.gz", "empty.tsv.zst"])
def test_an_empty_file_has_no_examples(tmp_path: Path, pool: ComputePool, wanted: Batch, name: str) -> None:
    kind = name.rsplit(".", 1)[-1]
    (tmp_path / name).write_bytes(b"" if kind == "tsv" else compress(b"", kind))
    (tmp_path / "full.tsv").write_bytes(criteo_text(300))
    same(read_all([str(tmp_path)], pool), wanted)
    assert read_all([str(tmp_path / name)], pool).examples == 0


def test_an_empty_batch_has_its_shape(tmp_path: Path, pool: ComputePool) -> None:
    (tmp_path / "a.tsv").write_bytes(b"")
    batch = read_all([str(tmp_path / "a.tsv")], pool)
    assert (batch.slots, batch.offsets.tolist(), len(batch.keys)) == (39, [0], 0)


def test_files_are_read_as_listed_and_by_name_within_a_glob_or_a_directory(
    tmp_path: Path, pool: ComputePool, wanted: Batch
) -> None:
    lines = criteo_text(300).splitlines(keepends=True)
    (tmp_path / "b").mkdir()
    parts = {"a.tsv": lines[:100], "b/0.tsv": lines[100:150], "c.tsv": lines[150:]}
    for name, part in parts.items():
        (tmp_path / name).write_bytes(b"".join(part))
    for hidden in (".crc", "_SUCCESS"):
        (tmp_path / hidden).write_bytes(b"not data")
    same(read_all([str(tmp_path)], pool), wanted)
    same(read_all([str(tmp_path / name) for name in parts] + [str(tmp_path / "*.tsv")], pool), wanted)
    listed = [str(tmp_path / "c.tsv"), str(tmp_path / "*.tsv"), str(tmp_path / "b/*")]
    assert [Path(file.url).name for file in list_files(listed)] == ["c.tsv", "a.tsv", "0.tsv"]


def test_nothing_found_is_an_error_with_the_url(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file at .*nowhere\*"):
        list_files(str(tmp_path / "nowhere*"))
    with pytest.raises(DataError, match=r"no file at .*missing"):
        list_files([str(tmp_path / "missing")])


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/data", recursive=True)


@pytest.mark.parametrize("kind", ["", ".gz"])
def test_a_remote_file_system_gives_the_same_batch(
    memory: fsspec.AbstractFileSystem, pool: ComputePool, wanted: Batch, kind: str
) -> None:
    text = criteo_text(300)
    memory.pipe("/data/a.tsv" + kind, compress(text, "gz") if kind else text)
    same(read_all(["memory://data/*.tsv*"], pool), wanted)


def test_remote_parquet(memory: fsspec.AbstractFileSystem, pool: ComputePool) -> None:
    with memory.open("/data/a.parquet", "wb") as out:
        pa.parquet.write_table(pa.table({"label": [1, 0], "a": ["x", "y"]}), out)
    source = Source(["memory://data"], Parquet(), Schema((Slot(name="a"),)))
    with source.open(source.index(), pool) as reader:
        assert reader.read(0, 2).labels.tolist() == [1, 0]


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskps.data.text.LONGEST_LINE_BYTES", 10_000)
    (tmp_path / "a.tsv").write_bytes(b"1\n" + b"x" * 20_000)
    with pytest.raises(DataError, match="no end of line within 10000 bytes after byte 2"):
        Source([str(tmp_path)], criteo(1000), criteo_schema()).index()


def test_an_object_store_gives_the_same_batch(pool: ComputePool, wanted: Batch, s3: Any) -> None:
    s3.mkdir("clicks")
    lines = criteo_text(300).splitlines(keepends=True)
    s3.pipe("clicks/day/a.tsv", b"".join(lines[:120]))
    s3.pipe("clicks/day/b.tsv.gz", compress(b"".join(lines[120:]), "gz"))
    same(read_all(["s3://clicks/day"], pool), wanted)
