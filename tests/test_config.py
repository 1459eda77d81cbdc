"""A job is checked whole before anything starts, and a wrong one is explained."""

from pathlib import Path

import pytest

from daskps.config import MOST_BLOCKS, make_job, override, parse_bytes, read_job
from daskps.errors import ConfigError
from daskps.model.architecture import MAX_BLOCKS, MAX_STEP_EXAMPLES

SYNTHETIC = {"data": {"format": "synthetic"}}


def test_few_settings_are_required() -> None:
    job = make_job(SYNTHETIC)
    assert job.data.synthetic is not None
    assert job.tables["main"].dimension == 8


@pytest.mark.parametrize(
    ("text", "count"), [("500MB", 500_000_000), ("2 GiB", 2 * 1024**3), ("1.5k", 1500), ("7", 7), ("3 B", 3)]
)
def test_bytes_may_carry_a_unit(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "data: is required"),
        (SYNTHETIC | {"trian": {}}, "trian: unknown setting; did you mean 'train'?"),
        (SYNTHETIC | {"train": {"dept": 2}}, "train.dept: unknown setting; did you mean 'depth'?"),
        (SYNTHETIC | {"tables": {"main": {"dimensio": 2}}}, "did you mean 'dimension'?"),
        (SYNTHETIC | {"slots": [{"name": "a", "tabel": "b"}]}, "slots.0.tabel: unknown setting; did you mean 'table'?"),
        (SYNTHETIC | {"slots": [{"name": "a"}, {"name": "a"}]}, "slots named more than once: a"),
        (SYNTHETIC | {"slots": [{"name": "a", "table": "man"}]}, "did you mean 'main'?"),
        (SYNTHETIC | {"budget": {"memory_bytes": "3 apples"}}, "cannot read '3 apples' as a number of bytes"),
        (SYNTHETIC | {"model": {"kind": "lr"}}, "set dimension = 1"),
        (SYNTHETIC | {"model": {"optimizer": {"kind": "ftrl"}}}, "sgd, adagrad or adam, not ftrl"),
        (SYNTHETIC | {"tables": {"main": {"optimizer": {"kind": "sgd", "beta1": 0.5}}}}, "sgd has no setting beta1"),
        (SYNTHETIC | {"cluster": {"nodes": 9}}, "9 nodes need at least as many partitions"),
        ({"data": {"format": "criteo"}}, "format 'criteo' needs paths"),
        ({"data": {"format": "synthetic", "paths": "x"}}, "synthetic data has no paths"),
        ({"data": {"format": "synthetic", "weight": "w"}}, "synthetic data has no weight; leave it out"),
        ({"data": {"format": "synthetic", "shuffle_window_rows": 9}}, "synthetic data has no shuffle_window_rows"),
        ({"data": {"format": "synthetic", "validation_paths": "x"}}, "validation_rows are of synthetic data"),
        ({"data": {"format": "csv", "paths": "x", "synthetic": {}}}, "csv data has no synthetic"),
        ({"data": {"format": "frame", "validation_rows": 9, "synthetic": {}}}, "no synthetic, validation_rows; leave"),
        ({"data": {"format": "synthetic", "hash_seed": -1}}, "data.hash_seed: Input should be greater than or equal"),
        ({"data": {"format": "csv", "paths": "x", "label": ""}}, "data.label: String should have at least 1 character"),
        (SYNTHETIC | {"tables": {"..": {}, "a/b": {}, "ok.2": {}}}, "a table's name is that of its folder"),
        (SYNTHETIC | {"train": {"early_stopping_patience": 2}}, "no validation data to stop by"),
        (SYNTHETIC | {"train": {"minibatch_examples": 2**20 + 1}}, "train.minibatch_examples: Input should be less"),
        (SYNTHETIC | {"train": {"minibatch_examples": 8193, "block_examples": 2}}, "block_examples to at least 3"),
    ],
)
def test_a_wrong_job_is_explained(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(settings)
    assert words in str(caught.value)


def test_a_step_may_be_as_large_as_its_sums_allow() -> None:
    train = make_job(SYNTHETIC | {"train": {"minibatch_examples": 2**20, "block_examples": 256}}).train
    assert (train.minibatch_examples, MOST_BLOCKS * train.block_examples) == (MAX_STEP_EXAMPLES, MAX_STEP_EXAMPLES)
    assert MOST_BLOCKS == MAX_BLOCKS


def test_everything_wrong_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_job({"train": {"depth": 0, "epochs": "many"}})
    assert [word in str(caught.value) for word in ("data", "train.depth", "train.epochs")] == [True] * 3


def test_a_default_that_follows_from_a_wrong_setting_is_no_mistake_of_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(SYNTHETIC | {"train": {"epochs": -2}})
    assert "train.epochs" in str(caught.value)
    assert "block_examples" not in str(caught.value)


def test_assignments_change_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[data]\nformat = "synthetic"\n[train]\nepochs = 1\n')
    job = read_job(path, ["train.epochs=3", "model.hidden=[4, 2]", "budget.memory_bytes=1GiB", "name=run one"])
    assert (job.train.epochs, job.model.hidden, job.budget.memory_bytes, job.name) == (3, (4, 2), 1024**3, "run one")


def test_an_assignment_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write path\.to\.key=value"):
        override({}, ["train.epochs"])


def test_a_missing_or_broken_job_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the job file"):
        read_job(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[data\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_job(tmp_path / "bad.toml")


def test_speed_settings_do_not_decide_the_result() -> None:
    slow = make_job(SYNTHETIC | {"train": {"depth": 1, "batch_examples": 10}, "budget": {"memory_bytes": 10**6}})
    fast = make_job(SYNTHETIC | {"train": {"depth": 4}, "cluster": {"cores": 2}})
    assert slow.result_fields() == fast.result_fields()
    assert make_job(SYNTHETIC | {"seed": 5}).result_fields() != fast.result_fields()


@pytest.mark.parametrize("change", [{"hash_seed": 5}, {"osrp": {"bins": 64}}])
def test_what_gives_a_feature_its_key_decides_the_result(change: dict[str, object]) -> None:
    other = make_job(SYNTHETIC | {"data": {"format": "synthetic", **change}})
    assert other.result_fields() != make_job(SYNTHETIC).result_fields()
