"""What the commands do after training: they agree with each other and with the files."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import daskps
from daskps.nn.blas import blas_build
from daskps.view.settings import settings_text
from tests.cli.helpers import Run

Json = Callable[..., Any]


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A model that may be changed."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


def test_training_tells_where_model_and_report_are(trained: tuple[Path, dict[str, Any]]) -> None:
    out, said = trained
    assert said["model"] == str(out)
    assert said["position"] == said["stop_position"] == 8_000
    assert not said["stopped"]
    report = Path(said["report"]).read_text()
    assert "<title>small" in report
    assert "http://" not in report.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in report


def test_the_record_holds_the_figures_of_every_batch(trained: tuple[Path, dict[str, Any]]) -> None:
    paths = sorted((trained[0] / "record").iterdir())  # read without daskps
    head, *lines = (json.loads(line) for path in paths for line in path.read_text().splitlines())
    assert (paths[0].name, head["kind"], head["settings"]["name"]) == ("000001-00000000.jsonl", "run", "small")
    assert sum(line["examples"] for line in lines if line["kind"] == "batch") == 8_000
    assert [line["metrics"] for line in lines if line["kind"] == "validation"][-1] == trained[1]["validation"]


def test_evaluate_repeats_the_validation_of_the_run_to_the_last_bit(
    trained: tuple[Path, dict[str, Any]], run_json: Json
) -> None:
    assert run_json("evaluate", trained[0])["metrics"] == trained[1]["validation"]


def test_evaluate_by_a_slot_tells_every_value_and_they_add_up(
    trained: tuple[Path, dict[str, Any]], run_json: Json, run: Run
) -> None:
    model, overall = trained[0], trained[1]["validation"]
    with daskps.open_model(model) as opened:
        slot = opened.slots["main"][1]
    said = run_json("evaluate", model, "--by", slot)
    weight, labels, losses = (np.array(said[name]) for name in ("weight", "mean_label", "log_loss"))
    assert weight.sum() == overall["examples"]
    assert len(said["keys"]) == said["groups_seen"] > 1
    assert all(isinstance(key, str) and str(int(key)) == key for key in said["keys"])  # jq rounds above 2**53
    assert 0.5 < said["gauc"] <= 1
    np.testing.assert_allclose(np.average(labels, weights=weight), overall["mean_label"], rtol=1e-6)
    np.testing.assert_allclose(np.average(losses, weights=weight), overall["log_loss"], rtol=1e-5)
    assert f"key of {slot}" in run("evaluate", model, "--by", slot).stdout
    assert "no slot" in run("evaluate", model, "--by", "colour", code=2).stderr


def test_predict_writes_a_row_number_and_a_probability_for_every_row(
    model: Path, job_file: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    run("synth", "--job", job_file, "-o", tmp_path / "clicks.parquet")
    said = run_json("predict", model, tmp_path / "clicks.parquet", "-o", tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert said["rows"] == len(found["row"]) == 9_000
    assert found["row"] == list(range(9_000))
    with daskps.open_model(model) as opened:
        same, validation = (
            np.concatenate([probabilities for _, probabilities in opened.predict_batches(batches)])
            for batches in (opened.read(tmp_path / "clicks.parquet"), opened.validation())
        )
    np.testing.assert_array_equal(np.array(found["probability"], np.float32), same)
    # The same examples cut into other blocks: on some CPUs BLAS then rounds in another order.
    np.testing.assert_allclose(np.array(found["probability"][8_000:], np.float32), validation, rtol=2e-6)
    pq.write_table(pq.read_table(tmp_path / "clicks.parquet").drop_columns("label"), tmp_path / "bare.parquet")
    run("predict", model, tmp_path / "bare.parquet", "--unlabelled", "-o", tmp_path / "bare_out.parquet")
    del found["label"]
    assert pq.read_table(tmp_path / "bare_out.parquet").to_pydict() == found
    said = run("predict", model, tmp_path / "bare.parquet", "-o", tmp_path / "no.parquet", code=2).stderr
    assert "not there: ['label']" in said
    assert "unlabelled" in said


def test_predictions_that_fail_leave_what_was_there(model: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    (tmp_path / "out.parquet").write_bytes(b"earlier predictions")
    run("predict", model, tmp_path / "bad.parquet", "-o", tmp_path / "out.parquet", code=3)
    assert (tmp_path / "out.parquet").read_bytes() == b"earlier predictions"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.parquet", "out.parquet"]


def test_a_place_that_cannot_be_written_to_has_its_own_exit_code(model: Path, tmp_path: Path, run: Run) -> None:
    run("synth", "-o", tmp_path / "nowhere" / "x.parquet", "--examples", "10", code=8)


@pytest.mark.parametrize("kind", ["parquet", "numpy"])
def test_an_export_holds_every_row_of_the_model(model: Path, tmp_path: Path, run_json: Json, kind: str) -> None:
    said = run_json("export", model, "-o", tmp_path / "out", "--format", kind, "--state")
    if kind == "parquet":
        table = pq.read_table(tmp_path / "out" / "main.parquet")
        keys = table["key"].to_numpy()
        embedding, state = (np.array(table[name].to_pylist(), np.float32) for name in ("embedding", "accumulator"))
    else:
        keys, embedding, state = (
            np.load(tmp_path / "out" / f"main.{name}.npy") for name in ("keys", "embedding", "accumulator")
        )
    with daskps.open_model(model) as opened:
        assert len(keys) == opened.rows() == said["tables"]["main"]["rows"]
        np.testing.assert_array_equal(embedding, opened.pull(keys))
        np.testing.assert_array_equal(state, opened.pull(keys, field="accumulator"))
        dense = np.load(tmp_path / "out" / "dense.npz")
        for name, array in opened.dense(state=True).items():
            np.testing.assert_array_equal(dense[name], array)


def test_an_export_says_how_features_become_keys_and_rows_are_pooled(
    job_file: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    hashed = ("--set", "data.osrp.bins=50", "--set", "tables.main.pooling=mean", "--set", "data.synthetic.examples=500")
    run("train", job_file, "--out", tmp_path / "m", *hashed)
    said = run_json("export", tmp_path / "m", "-o", tmp_path / "out")
    assert said["osrp"] == {"bins": 50, "per_slot": False, "seed": 0}
    assert (said["tables"]["main"]["pooling"], said["tables"]["main"]["slots"]) == ("mean", ["hashed"])
    assert np.max(pq.read_table(tmp_path / "out" / "main.parquet")["key"]) < 100


def test_an_export_describes_the_network_and_every_feature(tmp_path: Path, run: Run) -> None:
    (tmp_path / "clicks.csv").write_text("label,user,query,price,hour\n" + "1,a,x|y,0.5,3\n0,b,z,1.5,4\n" * 20)
    (tmp_path / "job.toml").write_text(f"""
        data = {{format = "csv", paths = ["{tmp_path}/clicks.csv"]}}
        model = {{kind = "deepfm", hidden = [6, 3]}}
        tables = {{main = {{dimension = 4}}, other = {{dimension = 4}}}}
        slots = [
            {{name = "hour", kind = "dense"}}, {{name = "id", column = "user"}},
            {{name = "cost", column = "price", kind = "dense", transform = "log"}},
            {{name = "query", kind = "multi", table = "other"}},
            {{name = "hours", column = "hour", raw = true}},
        ]
        train = {{minibatch_examples = 8}}
        budget = {{memory_bytes = "16MB"}}
        """)
    run("train", tmp_path / "job.toml", "--out", tmp_path / "m")
    run("export", tmp_path / "m", "-o", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "export.json").read_text())
    assert said["network"] == {"kind": "deepfm", "hidden": [6, 3]}
    assert said["key_rule"] == 2
    plain = {"missing": "auto", "separator": "|", "weights": None}
    assert said["slots"] == [
        plain | {"name": "id", "column": "user", "kind": "categorical", "raw": False, "table": "main"},
        plain | {"name": "query", "column": "query", "kind": "multi", "raw": False, "table": "other"},
        plain | {"name": "hours", "column": "hour", "kind": "categorical", "raw": True, "table": "main"},
    ]
    assert said["dense_features"] == [
        {"name": "hour", "column": "hour", "transform": "none", "missing_value": 0.0},
        {"name": "cost", "column": "price", "transform": "log", "missing_value": 0.0},
    ]
    assert [table["initialiser"] for table in said["tables"].values()] == [{"kind": "uniform", "scale": 0.01}] * 2


def test_an_export_of_hashed_features_names_the_slots_that_were_hashed(
    job_file: Path, tmp_path: Path, run: Run, run_json: Json
) -> None:
    run("train", job_file, "--out", tmp_path / "m", "--set", "data.osrp.bins=50", "--set", "model.kind=lr",
        "--set", "tables.main.dimension=1")  # fmt: skip
    said = run_json("export", tmp_path / "m", "-o", tmp_path / "out")
    assert said["network"] == {"kind": "lr", "hidden": []}
    assert [(slot["name"], slot["table"]) for slot in said["slots"]] == [(f"slot{at}", "main") for at in range(4)]
    run("synth", "--job", job_file, "-o", tmp_path / "clicks.parquet")
    with daskps.open_model(tmp_path / "m") as opened:
        of_file = opened.predict(pq.read_table(tmp_path / "clicks.parquet").slice(8_000))
        validation = np.concatenate([found for _, found in opened.predict_batches(opened.validation())])
    np.testing.assert_allclose(of_file, validation, rtol=2e-6)


def test_an_export_without_state_leaves_the_optimizers_out(model: Path, tmp_path: Path, run: Run) -> None:
    run("export", model, "-o", tmp_path / "out")
    assert pq.read_schema(tmp_path / "out" / "main.parquet").names == ["key", "embedding"]
    assert not any("accumulator" in name for name in np.load(tmp_path / "out" / "dense.npz"))


def test_an_export_does_not_mix_with_what_is_there(model: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "mine").write_text("")
    assert "not empty" in run("export", model, "-o", tmp_path, code=2).stderr


def test_inspect_says_how_large_the_model_is(model: Path, run: Run, run_json: Json) -> None:
    said = run_json("inspect", model)
    with daskps.open_model(model) as opened:
        assert said["tables"]["main"]["rows"] == opened.rows()
        assert [item["id"] for item in said["snapshots"]] == [item.id for item in opened.snapshots()]
    listed = run_json("snapshots", "list", model)["snapshots"]
    assert [item["created"] for item in listed] == [item["created"] for item in said["snapshots"]]
    assert said["health"] == []
    text = run("inspect", model).stdout
    assert f"{said['tables']['main']['rows']:,}" in text
    assert said["blas"] == blas_build()
    assert re.search(rf"BLAS +{re.escape(blas_build())}", text)
    terms = {term["name"]: term for term in said["memory"]}
    assert terms["index"]["bytes"] == 12 * said["tables"]["main"]["rows"]
    assert terms["rows of batches"]["bytes"] > 0, "the record has the size of a batch"
    for term in said["memory"]:
        assert not term["bytes"] or f"{term['bytes']:,}  {term['purpose']}" in text


def test_the_settings_of_a_model_are_a_job_file(model: Path, job_file: Path, tmp_path: Path, run: Run) -> None:
    text = run("inspect", model, "--settings").stdout
    again = daskps.make_job(tomllib.loads(text))
    assert again.result_fields() == daskps.read_job(job_file).result_fields()


def test_settings_may_have_names_that_toml_wants_in_quotes() -> None:
    settings = {"data": {"format": "synthetic"}, "tables": {"a.b": {"dimension": 2}, "größe": {}, "plain": {}}}
    job = daskps.make_job(settings)
    assert daskps.make_job(tomllib.loads(settings_text(job.model_dump(mode="json")))) == job


def test_verify_finds_a_single_changed_byte_and_names_the_file(copy: Path, run: Run) -> None:
    run("verify", copy)
    victim = max(copy.glob("tables/main/*/rows/c*"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    said = run("verify", copy, code=5).stderr
    assert victim.name in said
    assert "Traceback" not in said


def test_rolling_back_makes_an_older_snapshot_the_last(copy: Path, run: Run, run_json: Json) -> None:
    first, last = (item["id"] for item in run_json("snapshots", "list", copy)["snapshots"])
    before = run_json("evaluate", copy, "--snapshot", first)["metrics"]
    run("snapshots", "rollback", copy, first)
    assert run_json("evaluate", copy)["snapshot"] == first
    assert run_json("evaluate", copy)["metrics"] == before
    run("snapshots", "drop", copy, last)
    assert [item["id"] for item in run_json("snapshots", "list", copy)["snapshots"]] == [first]
    assert "no snapshot" in run("evaluate", copy, "--snapshot", last, code=5).stderr


def test_the_last_snapshot_cannot_be_dropped(copy: Path, run: Run, run_json: Json) -> None:
    last = run_json("snapshots", "list", copy)["snapshots"][-1]["id"]
    assert "roll back" in run("snapshots", "drop", copy, last, code=5).stderr


def test_compaction_keeps_every_row_and_frees_what_is_stale(copy: Path, run_json: Json) -> None:
    with daskps.open_model(copy) as opened:
        before = {
            key: row for keys, rows in opened.scan() for key, row in zip(keys.tolist(), rows.tolist(), strict=True)
        }
    said = run_json("compact", copy)
    assert said["bytes_after"] < said["bytes_before"]
    with daskps.open_model(copy) as opened:
        after = {
            key: row for keys, rows in opened.scan() for key, row in zip(keys.tolist(), rows.tolist(), strict=True)
        }
        assert len(opened.snapshots()) == 1
        assert opened.verify() > 0
        assert opened.statistics()["tables"]["main"]["stale_rows"] == 0
    assert after == before


def test_synthetic_data_comes_with_the_best_possible_auc(tmp_path: Path, run_json: Json) -> None:
    said = run_json(
        "synth", "-o", tmp_path / "x.parquet", "--examples", "2000", "--slots", "3", "--keys-per-slot", "50"
    )
    assert pq.read_metadata(tmp_path / "x.parquet").num_rows == 2000
    assert 0.5 < said["best_auc"] < 1


def test_examples_are_as_many_as_asked_for_also_of_a_job(job_file: Path, tmp_path: Path, run_json: Json) -> None:
    assert run_json("synth", "-o", tmp_path / "x.parquet", "--job", job_file, "--examples", "300")["examples"] == 300


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "nosuch"),
        ("nosuch",),
        ("--nosuch",),
        ("snapshots", "drop", "."),
        ("export", ".", "-o", "."),
        ("plan", "--nosuch"),
    ],
)
def test_wrong_usage_is_told_in_json_where_json_is_wanted(
    arguments: tuple[str, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("")
    monkeypatch.chdir(tmp_path)
    said = run(*arguments, "--json", code=2)
    error = json.loads(said.stdout)["error"]
    assert error["exit_code"] == 2
    assert error["message"] in run(*arguments, code=2).stderr.replace("\n", "")
    assert said.stderr == ""


def test_bench_lists_its_parts(run_json: Json) -> None:
    assert "synthetic" in run_json("bench")["parts"]
