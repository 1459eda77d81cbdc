"""What the data's own names say: columns that are there twice, folders that are not data, a label that leaks."""

import bz2
import gzip
import logging
import lzma
from pathlib import Path

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskps import build
from daskps.config import make_job
from daskps.data.columns import Parquet
from daskps.data.delimited import Delimited
from daskps.data.files import list_files
from daskps.data.frame import frame_batch, frame_source
from daskps.data.reader import Source
from daskps.data.schema import Schema, Slot
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DataError

SCHEMA = Schema((Slot(name="a"),))


def test_a_needed_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,a,label\n1,x,0\n")
    twice = pa.Table.from_arrays([pa.array([1]), pa.array(["x"]), pa.array([0])], names=["label", "a", "label"])
    pq.write_table(twice, tmp_path / "a.parquet")
    for name, format in (("a.csv", Delimited(",")), ("a.parquet", Parquet())):
        with pytest.raises(ConfigError, match=rf"{name}: columns .* more than once: \['label'\]"):
            Source([str(tmp_path / name)], format, SCHEMA).index()
        unlabelled = Source([str(tmp_path / name)], format, SCHEMA.unlabelled())  # then it is not needed
        with ComputePool(1) as pool, unlabelled.open(unlabelled.index(), pool) as reader:
            assert reader.read(0, 1).examples == 1
    frame = pd.DataFrame([[1, "x", "y"]], columns=["label", "a", "a"])
    with pytest.raises(ConfigError, match=r"more than once: \['a'\]"):
        frame_source(dd.from_pandas(frame, npartitions=1), SCHEMA)
    with pytest.raises(DataError, match="each column a name of its own"):
        frame_batch(frame, SCHEMA, 0)


def test_what_is_hidden_below_a_folder_is_not_data(tmp_path: Path) -> None:
    folder = tmp_path / "_data" / ".really"  # named by the user, so it counts
    for path in ("a.csv", "day=1/b.csv", ".ipynb_checkpoints/a-checkpoint.csv", "_temporary/0/part-0.csv", "_SUCCESS"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("label,a\n0,x\n")
    wanted = [str(folder / "a.csv"), str(folder / "day=1/b.csv")]
    assert [file.url for file in list_files(str(folder))] == wanted
    assert [file.url for file in list_files(f"{folder}/")] == wanted
    assert [file.url for file in list_files(f"{folder}/**")] == wanted
    assert [file.url for file in list_files(f"{folder}/*")] == wanted[:1]
    assert [file.url for file in list_files(f"{folder}/_*")] == [str(folder / "_SUCCESS")]  # asked for
    assert [file.url for file in list_files(f"{folder}/_temporary/*/*")] == [str(folder / "_temporary/0/part-0.csv")]


def test_a_path_that_is_there_is_no_glob(tmp_path: Path) -> None:
    path = tmp_path / "day[1].csv"
    path.write_text("label,a\n0,x\n")
    assert [file.url for file in list_files(str(path))] == [str(path)]
    assert [file.url for file in list_files(f"{tmp_path}/day[[]?].csv")] == [str(path)]


def test_a_file_that_is_named_twice_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text("label,a\n0,x\n")
    with caplog.at_level(logging.WARNING, "daskps.data"):
        assert len(list_files([str(tmp_path / "a.csv"), str(tmp_path)])) == 1
    assert "a.csv is named twice in the data; it is read once" in caplog.text


@pytest.mark.parametrize("format", ["csv", "parquet", "frame"])
@pytest.mark.parametrize("column", ["label", "weight"])
def test_a_slot_that_reads_the_label_or_the_weight_is_refused(format: str, column: str) -> None:
    data = {"format": format, "paths": [] if format == "frame" else ["x"], "label": "click", "weight": "w"}
    reads = {"label": "click", "weight": "w"}[column]
    for slots in (
        [{"name": "ok"}, {"name": "leak", "column": reads}],
        [{"name": "ok"}, {"name": reads, "kind": "dense"}],
    ):
        job = make_job({"data": data, "slots": slots})
        with (
            ComputePool(1) as pool,
            pytest.raises(ConfigError, match=f"reads the column '{reads}', which is data.{column}"),
        ):
            build.open_training(job, pool, 0, 1)


def test_the_slots_that_criteo_data_has_by_itself_do_not_read_the_label_either() -> None:
    for settings in ({"label": "C3"}, {"weight": "C3"}):
        job = make_job({"data": {"format": "criteo", "paths": ["x"], **settings}})
        with ComputePool(1) as pool, pytest.raises(ConfigError, match="slot 'C3' reads the column 'C3', which is data"):
            build.open_training(job, pool, 0, 1)


def test_columns_that_are_not_there_are_explained(tmp_path: Path) -> None:
    for sign, name in ((";", "a.csv"), ("\t", "b.csv")):
        (tmp_path / name).write_text(f"label{sign}a\n0{sign}x\n")
        with pytest.raises(ConfigError, match="its header has no comma, but"):
            Source([str(tmp_path / name)], Delimited(","), SCHEMA).index()
    folder = tmp_path / "data" / "a=7"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"label": [0]}), folder / "0.parquet")
    with pytest.raises(ConfigError, match=r"\['a'\] are in the names of its folders \(hive partitions\)"):
        Source([str(tmp_path / "data")], Parquet(), SCHEMA).index()


@pytest.mark.parametrize(
    ("name", "kind"), [("a.csv", "gzip"), ("a.csv.bz2", "bzip2"), ("a.csv.xz", "xz"), ("a", "zstd"), ("b", "Parquet")]
)
@pytest.mark.parametrize("columns", [(), ("label", "a")])
def test_a_file_that_is_no_text_is_named_without_its_bytes(
    tmp_path: Path, name: str, kind: str, columns: tuple[str, ...]
) -> None:
    text, path = b"label,a\n0,x\n" * 50, tmp_path / name
    if kind == "Parquet":
        pq.write_table(pa.table({"label": [0], "a": ["x"]}), path)
    else:
        packed = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress, "zstd": pa.Codec("zstd").compress}
        path.write_bytes(packed[kind](text))
    with pytest.raises(DataError, match=f"is not a text file but {kind}") as error:
        Source([str(path)], Delimited(",", columns), SCHEMA).index()
    assert str(error.value).isprintable()
    (tmp_path / "zeros").write_bytes(b"\0\1label,a\n0,x\n")
    with pytest.raises(DataError, match="its first line contains NUL bytes"):
        Source([str(tmp_path / "zeros")], Delimited(","), SCHEMA).index()


def test_the_case_of_an_extension_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "a.csv.GZ").write_bytes(gzip.compress(b"label,a\n0,x\n"))
    assert Source([str(tmp_path / "a.csv.GZ")], Delimited(","), SCHEMA).index().examples == 1
