"""``daskps settings`` prints every setting of a job, and the schema that editors read accepts every job."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from daskps.config import affects_result, make_job
from tests.cli.helpers import JOB, Run

Json = Callable[..., Any]
PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.fixture
def known(run_json: Json) -> dict[str, dict[str, Any]]:
    """All settings by name."""
    return {item["name"]: item for item in run_json("settings")["settings"]}


def test_every_setting_has_a_description(known: dict[str, dict[str, Any]]) -> None:
    assert [name for name, item in known.items() if not item["meaning"].strip()] == []


def test_every_setting_of_a_job_is_printed(known: dict[str, dict[str, Any]]) -> None:
    slots = [{"name": "ad"}]
    data = {"format": "synthetic", "osrp": {"bins": 4}, "synthetic": {"slots": 1}}
    job = make_job({"data": data, "slots": slots}).model_dump(mode="json")
    job["tables"], job["slots"] = {"*": job["tables"]["main"]}, {"*": job["slots"][0]}

    def names(group: dict[str, Any], path: str = "") -> set[str]:
        found = {path + name for name in group if name != "*"}
        return found.union(*(names(v, f"{path}{name}.") for name, v in group.items() if isinstance(v, dict)))

    assert names(job) <= set(known)
    assert {"tables.*.optimizer.beta1", "slots.*.column", "data.osrp.bins"} <= set(known)


def test_a_setting_tells_type_default_meaning_and_whether_it_affects_the_result(
    known: dict[str, dict[str, Any]], run: Run
) -> None:
    assert known["train.depth"] == {
        "name": "train.depth",
        "type": "integer >= 1 <= 8",
        "required": False,
        "default": 3,
        "affects_result": "no",
        "meaning": "Batches in flight.",
    }
    assert known["data.format"]["required"]
    assert known["train.block_examples"]["default"] == 512
    assert known["budget.disk_bytes"]["type"] == "integer or text or none"
    said = run("settings", "train.depth").stdout
    assert said == "train.depth: integer >= 1 <= 8; default 3; does not affect the result\n    Batches in flight.\n"


def test_what_affects_the_result_is_what_a_snapshot_records(known: dict[str, dict[str, Any]]) -> None:
    tables = {"main": {"dimension": 4}}
    train = {"early_stopping_patience": 1, "validate_every_batches": 1, "batch_examples": 512, "sync_every": 2}
    data = {"format": "synthetic", "validation_rows": 10}
    job = make_job({"data": data, "tables": tables, "train": train, "cluster": {"nodes": 2}})
    recorded = job.result_fields()
    for name, item in known.items():
        group, _, rest = name.partition(".")
        fields = recorded.get(group, {})
        there = group in recorded if group not in ("data", "train", "cluster") else rest.partition(".")[0] in fields
        if rest and "files" not in item["affects_result"]:
            assert there == (item["affects_result"] != "no"), name
    assert affects_result("seed") == affects_result("tables.*.dimension") == "yes"
    assert affects_result("budget.memory_bytes") == affects_result("data.synthetic_") == "no"
    assert affects_result("cluster.nodes") == "with sync_every above 1"


def test_a_path_narrows_and_a_tables_own_name_stands_for_all(run_json: Json) -> None:
    def names(path: str) -> list[str]:
        return [item["name"] for item in run_json("settings", path)["settings"]]

    assert names("budget") == ["budget", "budget.memory_bytes", "budget.hbm_bytes", "budget.disk_bytes"]
    assert names("tables.*.initialiser.scale") == names("tables.main.initialiser.scale")
    assert names("tables.*.optimizer")[1] == "tables.*.optimizer.kind"
    assert names("slots.0.name") == ["slots.*.name"]


@pytest.mark.parametrize(
    ("path", "near"),
    [("train.epoch", "train.epochs"), ("learning_rate", "optimizer.learning_rate"), ("zzz", "known are data, out")],
)
def test_an_unknown_path_is_an_error_that_names_the_nearest(path: str, near: str, run: Run) -> None:
    assert near in run("settings", path, code=2).stderr


def test_the_schema_accepts_every_job_file_and_refuses_what_is_wrong(run: Run) -> None:
    schema = json.loads(run("settings", "--schema").stdout)
    check = jsonschema.Draft202012Validator(schema)
    jobs = [path.read_text() for path in PIPELINES.glob("*.toml")]
    assert len(jobs) > 3
    for text in [*jobs, JOB]:
        check.validate(tomllib.loads(text))
    check.validate({"data": {"format": "csv", "paths": "clicks.csv"}, "budget": {"disk_bytes": "2GiB"}})
    for wrong in ({}, {"data": {"format": "xml"}}, {"data": {"format": "criteo"}, "train": {"epoch": 2}}):
        assert list(check.iter_errors(wrong)), wrong
    assert "leave PATH out" in run("settings", "train", "--schema", code=2).stderr
