"""A trained model answers alike however it is asked: by its validation data, by files, by frames, by batches."""

from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import daskps
from daskps import model as handle
from daskps.data.synthetic import Synthetic
from daskps.errors import ArgumentError, ConfigError, DataError, StoreError
from tests.data.criteo_rows import criteo_text

SLOTS = 4
MADE = {"slots": SLOTS, "keys_per_slot": 500, "seed": 3}
JOB: dict[str, Any] = {
    "tables": {"main": {"dimension": 4}},
    "model": {"hidden": [8]},
    "slots": [{"name": f"slot{number}", "raw": True} for number in range(SLOTS)],
    "train": {"minibatch_examples": 250},
    "budget": {"memory_bytes": "16MB"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Rows to train on, and others."""
    folder = tmp_path_factory.mktemp("rows")
    for name, examples in (("first", 3_000), ("later", 700)):
        Synthetic(examples=examples, **MADE).write_parquet(folder / f"{name}.parquet")
    return str(folder / "first.parquet"), str(folder / "later.parquet")


@pytest.mark.parametrize("osrp", [None, {"bins": 64}, {"bins": 64, "per_slot": True}])
def test_validation_files_and_frames_give_the_same_answers(
    tmp_path: Path, files: tuple[str, str], osrp: dict[str, Any] | None
) -> None:
    first, later = files
    data = {"format": "parquet", "paths": [first], "validation_paths": [later], "osrp": osrp}
    outcome = daskps.train({**JOB, "out": str(tmp_path / "m"), "data": data}, report=False)
    with daskps.open_model(tmp_path / "m") as model:
        metrics = model.evaluate()
        assert metrics == {**outcome.progress.validations[-1].metrics, "unseen_keys": model.unseen_keys}
        assert model.evaluate(later) == pytest.approx(metrics, rel=1e-6)  # by other blocks of examples
        assert model.evaluate(Path(later)) == model.evaluate([later])
        assert model.evaluate(model.validation()) == metrics
        by_file = np.concatenate([values for _, values in model.predict_batches(model.read(later))])
        by_frame = model.predict(pq.read_table(later).to_pandas())
        np.testing.assert_array_equal(by_frame, by_file)
        unlabelled = pq.read_table(later).to_pandas().assign(label=np.nan)
        np.testing.assert_array_equal(model.predict(unlabelled), by_file)
        np.testing.assert_array_equal(model.predict(unlabelled.drop(columns="label")), by_file)
        assert by_file.std() > 0.01


def predictions(model: daskps.Model, path: Path, format: str | None, labelled: bool) -> np.ndarray:
    """Of a file whose rows are read in order, each with its number."""
    rows, pieces = 0, []
    for part, values in model.predict_batches(model.read(path, format, labelled=labelled)):
        assert part.first_example == rows
        assert labelled or not (part.labels.any() or part.example_weights is not None)
        rows += part.examples
        pieces.append(values)
    return np.concatenate(pieces)


def test_files_without_labels_are_predicted_to_the_bit(
    tmp_path: Path, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "PREDICT_EXAMPLES", 150)  # several batches of few rows
    table = pq.read_table(files[1])
    table = table.append_column("weight", pa.array(np.full(len(table), 0.5, np.float32)))
    pq.write_table(table, tmp_path / "all.parquet")
    pq.write_table(table.drop_columns(["label", "weight"]), tmp_path / "bare.parquet")
    table.to_pandas().to_csv(tmp_path / "all.csv", index=False)
    table.drop_columns(["label", "weight"]).to_pandas().to_csv(tmp_path / "bare.csv", index=False)
    data = {"format": "parquet", "paths": [str(tmp_path / "all.parquet")], "weight": "weight"}
    daskps.train({**JOB, "out": str(tmp_path / "m"), "data": data}, report=False)
    with daskps.open_model(tmp_path / "m") as model:
        expected = predictions(model, tmp_path / "all.parquet", None, labelled=True)
        assert len(expected) == 700
        assert expected.std() > 0.001
        for name, format in [("bare.parquet", None), ("all.parquet", None), ("bare.csv", "csv"), ("all.csv", "csv")]:
            np.testing.assert_array_equal(predictions(model, tmp_path / name, format, labelled=False), expected)
        np.testing.assert_array_equal(model.predict(pq.read_table(tmp_path / "bare.parquet")), expected)
        with pytest.raises(ConfigError, match=r"not there: \['label', 'weight'\].*predictions need neither"):
            model.evaluate(tmp_path / "bare.parquet")
        with pytest.raises(ConfigError, match="begin with a label"):
            next(model.read(tmp_path / "bare.csv", "multislot", labelled=False))


def test_criteo_rows_without_labels_are_predicted_to_the_bit(tmp_path: Path) -> None:
    text = criteo_text(500)
    (tmp_path / "day").write_bytes(text)
    (tmp_path / "test.txt").write_bytes(b"".join(line.partition(b"\t")[2] for line in text.splitlines(keepends=True)))
    job = {name: value for name, value in JOB.items() if name != "slots"}
    data = {"format": "criteo", "paths": [str(tmp_path / "day")]}
    daskps.train({**job, "out": str(tmp_path / "m"), "data": data}, report=False)
    with daskps.open_model(tmp_path / "m") as model:
        expected = predictions(model, tmp_path / "day", None, labelled=True)
        assert len(expected) == 500
        assert expected.std() > 0.001
        np.testing.assert_array_equal(predictions(model, tmp_path / "test.txt", None, labelled=False), expected)


def test_a_model_trained_from_a_frame_reads_parquet(tmp_path: Path, files: tuple[str, str]) -> None:
    first, later = files
    frame = dd.from_pandas(pq.read_table(first).to_pandas(), npartitions=2)
    daskps.train({**JOB, "out": str(tmp_path / "m"), "data": {"format": "frame"}}, frame=frame, report=False)
    metrics = daskps.evaluate(tmp_path / "m", later)
    assert metrics["auc"] > 0.5
    assert metrics["examples"] == 700


def test_what_is_not_there_is_named(tmp_path: Path, files: tuple[str, str]) -> None:
    data = {"format": "parquet", "paths": [files[1]]}
    daskps.train({**JOB, "out": str(tmp_path / "m"), "data": data}, report=False)
    with daskps.open_model(tmp_path / "m") as model:
        with pytest.raises(ArgumentError, match="no slot 'slot9'"):
            model.evaluate_by("slot9", files[1])
        with pytest.raises(ArgumentError, match=r"no table 'mian'.*main"):
            model.pull([1], "mian")
        with pytest.raises(ArgumentError, match=r"no field 'embeding'.*embedding"):
            model.pull([1], field="embeding")
        with pytest.raises(ArgumentError, match="64-bit integers"):
            model.pull([1.5])
        for negative in ([3, -1], np.array([3, -1], np.int32)):  # not the key 2**64 - 1
            for ask in (model.pull, model.contains):
                with pytest.raises(ArgumentError, match=r"from 0 to 2.*, got -1"):
                    ask(negative)
        batch = Synthetic(examples=10, **(MADE | {"slots": SLOTS + 1})).read(0, 10)
        with pytest.raises(ArgumentError, match=r"of 5 slots came, but the model has 4: .*slot3"):
            model.predict(batch)
        with pytest.raises(ArgumentError, match="got a str where batches are wanted"):
            model.evaluate(pq.read_table(files[1]).to_pandas())
        frame = pq.read_table(files[1]).to_pandas()
        with pytest.raises(ConfigError, match="no files of format 'parket'; did you mean 'parquet'"):
            model.evaluate(files[1], "parket")
        with pytest.raises(ArgumentError, match=r"dask\..*DataFrame; give a data frame in memory"):
            model.predict(dd.from_pandas(frame, npartitions=2))
        with pytest.raises(DataError, match=r"the data frame: .*column slot0.* one type"):
            model.predict(frame.assign(slot0=["seven", 7] * 350))
        rows = model.rows()
        model.pull(np.arange(10**6, 10**6 + 50, dtype=np.uint64))  # answered, never inserted
        assert model.rows() == rows
        assert not model.contains([10**6]).any()
    asked = [
        lambda: model.pull([1]),
        lambda: model.contains([1]),
        lambda: model.predict(frame),
        lambda: model.evaluate(files[1]),
        lambda: model.evaluate(),
        lambda: next(model.scan()),
        model.rows,
        model.statistics,
        model.verify,
    ]
    for ask_closed in asked:
        with pytest.raises(StoreError, match="was closed; open it again"):
            ask_closed()
