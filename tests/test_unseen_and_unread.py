"""What a model cannot know is told: keys that it has never seen, and examples that could not be read."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import daskps
from daskps.cli.main import main
from daskps.data.schema import Slot, key_of
from daskps.errors import ConfigError
from daskps.storage.sealed import LOG_JSON, checksum

SLOTS = [{"name": "id"}, {"name": "flag"}, {"name": "tags", "kind": "multi", "table": "tags"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on a pandas frame of whole floats with gaps and booleans, written as Parquet."""
    folder = tmp_path_factory.mktemp("unseen")
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 40, 400).astype(float)
    frame = pd.DataFrame(
        {
            "label": (ids % 2 == 0).astype(int),
            "id": np.where(rng.random(400) < 0.1, np.nan, ids),
            "flag": rng.random(400) < 0.5,
            "tags": [["a", "b"][: 1 + int(value)] for value in rng.random(400) < 0.5],
        }
    )
    frame.to_parquet(folder / "rows.parquet")
    frame.assign(tags=["|".join(tags) for tags in frame["tags"]]).to_csv(folder / "rows.csv", index=False)
    job: dict[str, Any] = {
        "out": str(folder / "m"),
        "data": {
            "format": "parquet",
            "paths": [str(folder / "rows.parquet")],
            "bad_lines": "lenient",
            "bad_share": 1.0,
        },
        "slots": SLOTS,
        "tables": {"main": {"dimension": 4}, "tags": {"dimension": 2}},
        "model": {"hidden": [4]},
        "train": {"minibatch_examples": 50},
        "budget": {"memory_bytes": "64MB", "hbm_bytes": "64MB"},
        "cluster": {"partitions": 2},
    }
    daskps.train(job, report=False)
    return folder


def run(*arguments: str) -> tuple[dict[str, Any], str]:
    """What a command says to machines and to people."""
    told = []
    for option in (["--json"], []):
        result = CliRunner().invoke(main, [*arguments, *option])
        assert result.exit_code == 0, result.output
        told.append(result.output)
    return json.loads(told[0].strip().splitlines()[-1]), told[1]


def test_a_model_from_before_key_rules_is_asked_by_the_first_one(model: Path, tmp_path: Path) -> None:
    """Its snapshot names neither numerics nor a rule; by rule 2, "3.0" in a CSV file would have another key."""
    job = {
        "out": str(tmp_path / "m"),
        "data": {"format": "csv", "paths": [str(model / "rows.csv")], "key_rule": 1},
        "slots": [{"name": "id"}],
        "train": {"minibatch_examples": 100},
        "budget": {"memory_bytes": "64MB", "hbm_bytes": "64MB"},
        "cluster": {"partitions": 1},
    }
    daskps.train(job, report=False)
    (manifest,) = tmp_path.glob("m/snapshots/*/manifest.json")
    fields = LOG_JSON.read(manifest.read_bytes(), "manifest")
    settings = fields["draft"]["settings"]
    del settings["numerics"], settings["result"], settings["job"]["data"]["key_rule"]
    manifest.write_bytes(LOG_JSON.write(fields))
    entry = tmp_path / "m" / "log" / "00000002.json"
    entry.write_bytes(
        LOG_JSON.write(LOG_JSON.read(entry.read_bytes(), "entry") | {"manifest": checksum(manifest.read_bytes())})
    )
    predicted = run("predict", str(tmp_path / "m"), str(model / "rows.csv"), "-o", str(tmp_path / "p.parquet"))[0]
    assert predicted["unseen_keys"] == 0
    probabilities = pq.read_table(tmp_path / "p.parquet")["probability"].to_numpy()
    with daskps.open_model(tmp_path / "m") as opened:
        assert opened.evaluate(model / "rows.csv")["unseen_keys"] == 0
        texts = pd.read_csv(model / "rows.csv", dtype=str)
        np.testing.assert_array_equal(opened.predict(texts), probabilities)
        assert opened.unseen_keys == 0
    exported = CliRunner().invoke(main, ["export", str(tmp_path / "m"), "-o", str(tmp_path / "e")])
    assert exported.exit_code == 0, exported.output
    assert json.loads((tmp_path / "e" / "export.json").read_text())["key_rule"] == 1
    with pytest.raises(ConfigError, match=r"numerics 1 .*start_from"):
        daskps.train(job, report=False)


def test_the_same_frame_as_csv_has_the_same_auc_and_no_unseen_keys(model: Path) -> None:
    with daskps.open_model(model / "m") as opened:
        parquet = opened.evaluate(model / "rows.parquet")
        csv = opened.evaluate(model / "rows.csv", "csv")
        assert opened.key_counts["id"] == (400, 0)
        assert csv == parquet
        assert csv["unseen_keys"] == 0
        assert csv["auc"] > 0.9


def test_unseen_keys_are_counted_exactly_over_all_and_by_slot(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("label,id,flag,tags\n1,1,True,a|new|b\n0,999,True,\n1,999.0,2,new|new\n")
    wanted = {"id": (3, 2), "flag": (3, 1), "tags": (5, 3)}
    with daskps.open_model(model / "m") as opened:
        assert opened.contains([key_of(1, Slot(name="id"))], "main").all()
        metrics = opened.evaluate(tmp_path / "rows.csv", "csv")
        assert opened.key_counts == wanted
        assert metrics["unseen_keys"] == opened.unseen_keys == 6 / 11
        frame = pd.DataFrame({"id": [1.0, 999.0], "flag": [True, True], "tags": [["a"], ["new"]]})
        opened.predict(frame)
        assert opened.key_counts == {"id": (2, 1), "flag": (2, 0), "tags": (2, 1)}
        opened.evaluate_by("id", tmp_path / "rows.csv", "csv")
        assert opened.key_counts == wanted
        opened.predict(frame.iloc[:0])
        assert math.isnan(opened.unseen_keys)
    files = [str(model / "m"), str(tmp_path / "rows.csv"), "--format", "csv"]
    by_slot = {slot: {"keys": keys, "unseen": unseen} for slot, (keys, unseen) in wanted.items()}
    for command in (
        ["evaluate", *files],
        ["predict", *files, "-o", str(tmp_path / "p.parquet")],
        ["evaluate", *files, "--by", "id"],
    ):
        value, text = run(*command)
        assert value["unseen_keys"] == 6 / 11
        assert value["key_counts"] == by_slot
        assert "54.5% of 11 (most: id 66.7%, tags 60%, flag 33.3%)" in text


def test_lenient_predict_writes_nulls_for_what_it_could_not_read(model: Path, tmp_path: Path) -> None:
    good = "1,1,True,a|b\n"
    (tmp_path / "rows.csv").write_text(
        f'label,id,flag,tags\n{good}1,"x",True,a\n?,1,True,a|b\n1,2\n?,1,True,a||b\n{good}'
    )
    value, text = run(
        "predict", str(model / "m"), str(tmp_path / "rows.csv"), "--format", "csv", "-o", str(tmp_path / "p")
    )
    table = pq.read_table(tmp_path / "p").to_pydict()
    expected = table["probability"][0]
    assert expected is not None
    assert table["row"] == list(range(6))
    assert table["probability"] == [expected, None, expected, None, None, expected]  # row 2 by its good keys
    assert table["label"] == [1, None, None, None, None, 1]
    assert value["rows"] == 6
    assert value["predicted"] == 3
    assert value["mean_probability"] == pytest.approx(expected)
    assert "3 of 6 examples could not be read and have null" in text
    assert value["key_counts"]["id"] == {"keys": 3, "unseen": 0}


@pytest.mark.parametrize("format", ["parquet", "multislot"])
def test_a_bad_label_alone_spoils_no_prediction_in_other_formats(model: Path, tmp_path: Path, format: str) -> None:
    path = tmp_path / "rows"
    if format == "parquet":
        frame = pd.DataFrame({"label": [1, 7, 7], "id": [1.0, 1.0, 0.5], "flag": True, "tags": [["a"], ["a"], ["a"]]})
        frame.to_parquet(path)
    else:
        path.write_text("1 id:1 flag:1 tags:a\n7 id:1 flag:1 tags:a\n7 id:1 nowhere:1\n")
    with daskps.open_model(model / "m") as opened:
        (batch,) = opened.read(path, format, label_needed=False)
        assert batch.bad is not None
        assert batch.bad.tolist() == [False, False, True]
        assert np.isnan(batch.labels).tolist() == [False, True, False]
        assert np.diff(batch.offsets).reshape(3, 3).tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
        (batch,) = opened.read(path, format)
        assert batch.labels.tolist() == [1, 0, 0]
        assert batch.bad is not None
        assert batch.bad.tolist() == [False, True, True]


def test_evaluate_does_not_count_examples_that_were_skipped(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("label,id,flag,tags\n1,1,True,a\n?,1,True,a\n0,2,True,a\n1,2\n")
    with daskps.open_model(model / "m") as opened:
        metrics = opened.evaluate(tmp_path / "rows.csv", "csv")
        assert sum(count for count, _ in opened.bad_rows.values()) == 2
    assert metrics["examples"] == metrics["weight"] == 2
