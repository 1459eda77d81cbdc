"""A job reads what people keep: files of every format, a Dask DataFrame, and the rows of an earlier model."""

from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from daskps import build
from daskps.config import make_job
from daskps.data.frame import frame_batch
from daskps.data.schema import Slot, key_of
from daskps.device.pool import ComputePool
from daskps.errors import ConfigError, DataError, NonFiniteError
from daskps.model import open_model
from daskps.reports import Progress
from daskps.storage.model_directory import ModelDirectory
from tests.driver.helpers import FRAME_ROWS, Trained, job_of, merged, model_bits, model_rows


def test_the_same_rows_in_any_format_train_the_same_model(
    frame: pd.DataFrame, trained: Trained, tmp_path: Path
) -> None:
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.iloc[:700].to_parquet(tmp_path / "rows-0.parquet", row_group_size=300)
    frame.iloc[700:].to_parquet(tmp_path / "rows-1.parquet")
    bits = {
        model_bits(trained(job_of("csv", [str(tmp_path / "rows.csv")]))[1]),
        model_bits(trained(job_of("parquet", [str(tmp_path / "*.parquet")]))[1]),
        model_bits(trained(job_of("frame", []), frame=dd.from_pandas(frame, npartitions=4))[1]),
    }
    assert len(bits) == 1


def test_a_model_has_a_table_for_each_group_of_slots(frame: pd.DataFrame, trained: Trained, tmp_path: Path) -> None:
    frame.to_csv(tmp_path / "rows.csv", index=False)
    path = trained(job_of("csv", [str(tmp_path / "rows.csv")]))[1]
    assert len(model_rows(path, "main")[0]) == frame["user"].nunique()
    assert len(model_rows(path, "ads")[0]) == frame["ad"].nunique()
    assert model_rows(path, "ads")[1].shape[1] == 2


def test_a_run_that_meets_wild_numbers_keeps_its_last_snapshot(
    frame: pd.DataFrame, trained: Trained, tmp_path: Path
) -> None:
    settings = {"train": {"minibatch_examples": 100, "batch_examples": 100, "snapshot_every_batches": 1}}
    wild = frame.assign(price=np.where(np.arange(FRAME_ROWS) < 1_000, frame["price"], 3e38))
    wild.to_csv(tmp_path / "wild.csv", index=False)
    with pytest.raises(NonFiniteError, match=r"batch \d+ .*mini-batch 10"):
        trained(job_of("csv", [str(tmp_path / "wild.csv")]), settings, out=tmp_path / "wild")
    snapshot = ModelDirectory(str(tmp_path / "wild")).snapshot()
    assert snapshot is not None
    frame.iloc[: snapshot.draft.position].to_csv(tmp_path / "sound.csv", index=False)
    sound = trained(job_of("csv", [str(tmp_path / "sound.csv")]), settings)[1]
    assert model_bits(tmp_path / "wild") == model_bits(sound)


def test_a_frame_job_without_a_frame_says_so(trained: Trained) -> None:
    with pytest.raises(ConfigError, match="hand the Dask DataFrame to train"):
        trained(job_of("frame", []))


def test_a_column_that_is_not_there_is_named_before_training(
    frame: pd.DataFrame, trained: Trained, tmp_path: Path
) -> None:
    frame.drop(columns="ad").to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(ConfigError, match=r"columns that are not there: \['ad'\]"):
        trained(job_of("csv", [str(tmp_path / "rows.csv")]))


def test_new_data_goes_on_from_an_existing_model(trained: Trained, tmp_path: Path) -> None:
    first = {"data": {"synthetic": {"examples": 3_000}}}
    base = trained(first)[1]
    before = model_bits(base)
    more = {"data": {"synthetic": {"examples": 2_000, "seed": 8}}, "start_from": str(base)}
    outcome, path = trained(more, out=tmp_path / "more")
    old, new = model_rows(base)[0], model_rows(path)[0]
    assert outcome.progress.examples == 2_000
    assert set(old.tolist()) < set(new.tolist())
    assert model_bits(base) == before
    assert model_bits(trained(more)[1]) == model_bits(path)
    assert trained(more, out=path)[0].progress.examples == 0  # taken up from its own snapshot, not begun again


def test_a_model_may_come_to_the_snapshot_names_of_the_one_that_it_starts_from(trained: Trained) -> None:
    few = {"data": {"synthetic": {"examples": 1_000}}}
    first, base = trained(few)
    again, path = trained(few, {"start_from": str(base)})
    assert again.snapshot == first.snapshot
    assert again.progress.examples == 1_000
    assert model_bits(path) != model_bits(base)


def test_start_from_nothing_is_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        trained({"start_from": str(tmp_path / "none")})


def test_slots_and_tables_must_fit_each_other() -> None:
    settings = {"data": {"format": "parquet", "paths": ["x"]}, "tables": {"main": {}, "other": {}}}
    with pytest.raises(ConfigError, match="needs slots"):
        build.features(make_job(settings))
    with pytest.raises(ConfigError, match="no slot is in table other"):
        build.features(make_job(merged(settings, {"slots": [{"name": "a"}]})))


def test_a_run_goes_on_only_where_its_position_names_the_same_row(
    frame: pd.DataFrame, trained: Trained, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, start in (("b", 0), ("c", 500)):
        frame.iloc[start : start + 500].to_csv(folder / f"{name}.csv", index=False)
    job = merged(job_of("csv", [str(folder)]), {"train": {"minibatch_examples": 100, "batch_examples": 100}})
    shuffled = {"data": {"shuffle_window_rows": 70}}
    seen: list[Progress] = []
    stop = {"on_progress": seen.append, "should_stop": lambda: len(seen) >= 7}
    path = trained(job, shuffled, out=tmp_path / "m", **stop)[1]
    position = ModelDirectory(str(path)).snapshot().draft.position
    assert 500 < position < 1_000
    with pytest.raises(DataError, match=r"shuffle_window_rows 70 then, 71 now.* twice or never"):
        trained(job, {"data": {"shuffle_window_rows": 71}}, out=path)
    frame.iloc[1_000:].to_csv(folder / "a.csv", index=False)
    with pytest.raises(
        DataError, match=f"row {position}, .* is not the row that it was: other names or numbers of rows"
    ):
        trained(job, shuffled, out=path)
    (folder / "a.csv").rename(folder / "d.csv")  # behind what was trained on
    assert trained(job, shuffled, out=path)[0].progress.position == 1_500
    frame.iloc[:100].to_csv(folder / "e.csv", index=False)  # the last window of 1,500 rows was short
    with pytest.raises(DataError, match=r"rows 1500 then, 1600 now"):
        trained(job, shuffled, out=path)


def test_synthetic_data_has_the_features_that_the_job_names() -> None:
    named = {"slots": [{"name": "a"}, {"name": "d", "kind": "dense"}]}
    made = {"data": {"format": "synthetic", "synthetic": {"slots": 1, "dense_features": 2}}}
    with pytest.raises(ConfigError, match="names 1 slots and 1 dense features, but the synthetic data has 1 and 2"):
        build.features(make_job(made | named))


@pytest.mark.parametrize("which", ["paths", "validation_paths"])
def test_data_without_rows_is_no_data(frame: pd.DataFrame, trained: Trained, tmp_path: Path, which: str) -> None:
    frame.iloc[:300].to_csv(tmp_path / "rows.csv", index=False)
    frame.iloc[:0].to_csv(tmp_path / "empty.csv", index=False)
    with pytest.raises(DataError, match=r"empty.csv.* has no examples"):
        trained(job_of("csv", [str(tmp_path / "rows.csv")]), {"data": {which: [str(tmp_path / "empty.csv")]}})


def test_several_nodes_read_one_data_frame(frame: pd.DataFrame, trained: Trained, on_nodes: Trained) -> None:
    job = merged(job_of("frame", []), {"cluster": {"partitions": 8}})
    together = on_nodes(2, job, frame=dd.from_pandas(frame, npartitions=3))[1]
    assert model_bits(together) == model_bits(trained(job, frame=dd.from_pandas(frame, npartitions=4))[1])


def test_several_nodes_go_on_from_an_existing_model(trained: Trained, on_nodes: Trained) -> None:
    partitions = {"cluster": {"partitions": 8}}
    base = trained({"data": {"synthetic": {"examples": 3_000}}}, partitions)[1]
    more = merged(partitions, {"data": {"synthetic": {"examples": 2_000, "seed": 8}}, "start_from": str(base)})
    assert model_bits(on_nodes(2, more)[1]) == model_bits(trained(more)[1])


def test_a_frame_is_validated_by_parquet_files(frame: pd.DataFrame, trained: Trained, tmp_path: Path) -> None:
    frame.to_parquet(tmp_path / "later.parquet")
    validated = {"data": {"validation_paths": [str(tmp_path / "later.parquet")]}}
    outcome, path = trained(job_of("frame", []), validated, frame=dd.from_pandas(frame, npartitions=2))
    with open_model(path) as model:
        evaluated = model.evaluate()
        del evaluated["unseen_keys"]  # which a run does not count
        assert [one.metrics for one in outcome.progress.validations] == [evaluated]


def test_criteo_files_have_the_label_and_the_weight_that_the_job_names() -> None:
    data = {"format": "criteo", "paths": ["rows.tsv"], "label": "I1", "weight": "I2"}
    schema = build.job_schema(make_job({"data": data}))
    assert (schema.label, schema.example_weight) == ("I1", "I2")


@pytest.mark.parametrize("key_rule", [1, 2])
def test_readers_and_frames_follow_the_jobs_key_rule(tmp_path: Path, key_rule: int) -> None:
    (tmp_path / "a.csv").write_text("label,id\n0,52.0\n1,True\n")
    data = {"format": "csv", "paths": [str(tmp_path / "a.csv")], "key_rule": key_rule}
    asked = make_job({"data": data, "slots": [{"name": "id"}]})
    slot = Slot(name="id")
    wanted = [key_of(value, slot, key_rule=key_rule) for value in ("52.0", "True")]
    assert (wanted == [key_of(52, slot), key_of(1, slot)]) == (key_rule == 2)
    with ComputePool(1) as pool:
        reader = build.open_training(asked, pool, 0, 1)
        assert reader.read_steps(0, 1)[0].keys.tolist() == wanted
        reader.close()
    frame = frame_batch({"id": ["52.0", "True"]}, build.job_schema(asked), 0)
    assert frame.keys.tolist() == wanted
