"""A job is checked whole before anything starts, and a wrong one is explained."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.config import Job, complete, make_job, override, read_job, recorded_job
from daskps.data.order import Steps, cut_blocks
from daskps.errors import ConfigError
from daskps.mem.eviction import POLICIES
from daskps.nn.architecture import MAX_BLOCKS, MAX_STEP_EXAMPLES
from daskps.settings import parse_bytes

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


def slot(format: str, settings: dict[str, object], **data: object) -> dict[str, object]:
    return {"data": {"format": format, "paths": "x", **data}, "slots": [settings]}


def main(**settings: object) -> dict[str, object]:
    return {"tables": {"main": settings}}


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
        (SYNTHETIC | {"cluster": {"eviction": "fifo"}}, "no policy 'fifo'; there are lru_lfu, lru, lfu"),
        (SYNTHETIC | {"model": {"kind": "lr"}}, "set dimension = 1"),
        (SYNTHETIC | {"model": {"optimizer": {"kind": "ftrl"}}}, "sgd, adagrad or adam, not ftrl"),
        (SYNTHETIC | {"tables": {"main": {"optimizer": {"kind": "sgd", "beta1": 0.5}}}}, "sgd has no setting beta1"),
        (
            SYNTHETIC | {"model": {"optimizer": {"epsilon": 0}}},
            "model.optimizer: epsilon = 0.0: adagrad would divide 0 by 0",
        ),
        (SYNTHETIC | main(optimizer={"epsilon": 1e-50}), "tables.main.optimizer: epsilon = 1e-50: adagrad would"),
        (
            SYNTHETIC | main(optimizer={"kind": "adam", "epsilon": 0}),
            "adam would divide 0 by 0 at the first gradient of",
        ),
        (SYNTHETIC | main(optimizer={"kind": "ftrl", "beta": 0}), "set beta or initial_accumulator or l2 above 0"),
        (SYNTHETIC | main(optimizer={"learning_rate": math.inf}), "main.optimizer.learning_rate: must be a finite"),
        (SYNTHETIC | main(optimizer={"learning_rate": 1e-60}), "main.optimizer.learning_rate: must be above 0, in"),
        (
            SYNTHETIC | main(optimizer={"kind": "adam", "beta2": 0.99999999}),
            "optimizer.beta2: must be at least 0 and below",
        ),
        (SYNTHETIC | main(initialiser={"scale": math.nan}), "tables.main.initialiser.scale: must be a finite number"),
        (
            SYNTHETIC | main(initialiser={"scale": -1.0}),
            "tables.main.initialiser: scale = -1.0: uniform wants at least 0",
        ),
        (SYNTHETIC | {"cluster": {"nodes": 9}}, "9 nodes need at least as many partitions"),
        ({"data": {"format": "criteo"}}, "format 'criteo' needs paths"),
        ({"data": {"format": "synthetic", "paths": "x"}}, "synthetic data has no paths"),
        ({"data": {"format": "synthetic", "weight": "w"}}, "synthetic data has no weight; leave it out"),
        ({"data": {"format": "synthetic", "shuffle_window_rows": 9}}, "synthetic data has no shuffle_window_rows"),
        ({"data": {"format": "synthetic", "validation_paths": "x"}}, "synthetic data has synthetic, validation_rows"),
        ({"data": {"format": "csv", "paths": "x", "synthetic": {}}}, "csv data has no synthetic"),
        ({"data": {"format": "frame", "validation_rows": 9, "synthetic": {}}}, "no synthetic, validation_rows; leave"),
        ({"data": {"format": "synthetic", "hash_seed": -1}}, "data.hash_seed: Input should be greater than or equal"),
        ({"data": {"format": "csv", "paths": "x", "label": ""}}, "data.label: String should have at least 1 character"),
        (
            {"data": {"format": "cvs", "paths": "x"}},
            "data.format: there is no such format; did you mean 'csv'? (got 'cvs')",
        ),
        (
            {"data": {"format": "csv", "paths": "x", "token_weights": False}},
            "(token_weights: libsvm, libffm, multislot)",
        ),
        ({"data": {"format": "libsvm", "paths": "x", "unknown_slots": "ignore"}}, "libsvm data has no unknown_slots"),
        ({"data": {"format": "csv", "paths": "x", "dense_integers": True}}, "csv data has no dense_integers"),
        (slot("criteo", {"name": "I1"}, dense_integers=True), "data.dense_integers is for jobs without slots"),
        (slot("csv", {"name": ""}), "slots.0.name: String should have at least 1 character"),
        (slot("csv", {"name": "a", "raw": True, "kind": "integer"}), "slots.0: a slot of kind integer has no raw"),
        (slot("csv", {"name": "a", "raw": True, "missing": "key"}), "there is none for a missing value"),
        (slot("csv", {"name": "a", "separator": ";"}), "of kind categorical has no separator; kinds with it: multi"),
        (slot("csv", {"name": "a", "kind": "multi", "separator": "||"}), "must be one byte and no line end, got '||'"),
        (slot("csv", {"name": "a", "kind": "multi", "transform": "log"}), "no transform; kinds with it: dense"),
        (slot("csv", {"name": "a", "kind": "dense", "missing": "key"}), "a slot of kind dense has no missing; kinds"),
        (slot("csv", {"name": "a", "kind": "dense", "missing_value": math.inf}), "0.missing_value: must be a finite"),
        (
            slot("csv", {"name": "a", "kind": "multi", "weights": "w"}),
            "slot 'a': weights is not a setting of csv data, only of parquet, frame",
        ),
        (
            slot("parquet", {"name": "a", "kind": "multi", "separator": ";"}),
            "slot 'a': separator is not a setting of parquet data, only of criteo, csv",
        ),
        (slot("libffm", {"name": "a", "kind": "dense", "transform": "log"}), "transform is not a setting of libffm"),
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


def test_an_optimizer_that_divides_by_more_than_0_needs_no_epsilon_and_a_recorded_one_is_read() -> None:
    make_job(
        SYNTHETIC
        | main(optimizer={"epsilon": 0, "initial_accumulator": 0.1}, initialiser={"kind": "constant", "scale": -1})
    )
    recorded_job({"job": SYNTHETIC | main(optimizer={"epsilon": 0})}, "a snapshot")


@pytest.mark.parametrize(
    "table",
    [
        {"optimizer": {"learning_rate": 1e-60}},
        {"optimizer": {"kind": "adam", "beta2": 0.99999999}},
        {"optimizer": {"l2": 1e60}},
    ],
)
def test_settings_that_are_refused_by_now_are_read_where_a_snapshot_records_them(table: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_job(SYNTHETIC | main(**table))
    recorded_job({"job": SYNTHETIC | main(**table)}, "a snapshot")


def test_validation_rows_that_say_where_a_run_stops_are_the_models() -> None:
    data = {"format": "synthetic", "validation_rows": 50}
    before = make_job({"data": data, "train": {"early_stopping_patience": 2}})
    assert complete(make_job(SYNTHETIC), before.result_fields()).data.validation_rows == 50
    assert complete(make_job({"data": data | {"validation_rows": 9}}), before.result_fields()).data.validation_rows == 9


def test_a_job_takes_no_setting_of_slots_from_a_model_of_another_format_or_kind() -> None:
    tags = {"name": "tags", "kind": "multi", "separator": ";", "column": "t"}
    count = {"name": "count", "kind": "dense", "transform": "log"}
    files = {"format": "csv", "paths": "x"}
    base = make_job({"data": files, "slots": [tags, count]}).identity_fields()
    parquet = {"data": {"format": "parquet", "paths": "x"}, "slots": [{"name": "tags"}, {"name": "count"}]}
    taken = complete(make_job(parquet), base)
    assert [(slot.kind, slot.separator, slot.transform) for slot in taken.slots] == [
        ("multi", "|", "none"),
        ("dense", "|", "log"),
    ]
    assert complete(make_job({"data": files, "slots": [{"name": "tags"}]}), base).slots[0].separator == ";"
    other = {"data": files, "slots": [{"name": "tags"}, {"name": "count", "kind": "integer"}]}
    assert complete(make_job(other), base).slots[1].transform == "none"
    criteo = make_job({"data": {"format": "criteo", "paths": "x", "dense_integers": True}}).identity_fields()
    assert not complete(make_job(parquet), criteo).data.dense_integers
    assert complete(make_job({"data": {"format": "criteo", "paths": "x"}}), criteo).data.dense_integers


def test_a_model_made_before_keeps_its_beta() -> None:
    before = SYNTHETIC | main(optimizer={"kind": "ftrl", "learning_rate": 0.1, "beta": 1.0})
    job = complete(
        make_job(SYNTHETIC | main(optimizer={"kind": "ftrl", "learning_rate": 0.1})), make_job(before).result_fields()
    )
    assert job.tables["main"].optimizer.beta == 1.0


def test_a_step_may_be_as_large_as_its_sums_allow() -> None:
    train = make_job(SYNTHETIC | {"train": {"minibatch_examples": 2**20, "block_examples": 256}}).train
    assert (train.minibatch_examples, MAX_BLOCKS * train.block_examples) == (MAX_STEP_EXAMPLES, MAX_STEP_EXAMPLES)


def test_everything_wrong_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_job({"train": {"depth": 0, "epochs": "many"}})
    assert [word in str(caught.value) for word in ("data", "train.depth", "train.epochs")] == [True] * 3


def test_a_default_that_follows_from_a_wrong_setting_is_no_mistake_of_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(SYNTHETIC | {"train": {"epochs": -2}})
    assert "train.epochs" in str(caught.value)
    assert "block_examples" not in str(caught.value)


@pytest.mark.parametrize("name", POLICIES)
def test_every_eviction_policy_can_be_chosen_and_affects_only_speed(name: str) -> None:
    job = make_job(SYNTHETIC | {"cluster": {"eviction": name}})
    assert job.cluster.eviction == name
    assert job.result_fields() == make_job(SYNTHETIC).result_fields()


def test_a_job_with_lru_share_is_accepted_with_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    assert make_job(SYNTHETIC | {"cluster": {"lru_share": 0.3}}).cluster == make_job(SYNTHETIC).cluster
    assert "cluster.lru_share has no effect any more; cluster.eviction" in caplog.text


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


@pytest.mark.parametrize("setting", ["out", "start_from"])
@pytest.mark.parametrize(
    "url",
    [
        *("s3://bucket/m", "memory://m", "hdfs://nn:9000/m", "gs://bucket/m", "S3://bucket/m", "simplecache::s3://b/m"),
        *("https://host/m", "abfs://c@a.example/m", "s3:/bucket/m", "file://host/m", "file://relative", "://m"),
    ],
)
def test_a_model_directory_is_never_a_url(setting: str, url: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: a model directory is a path of a file system, not a URL"):
        make_job(SYNTHETIC | {setting: url})


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        *(("file:///data/m", "/data/m"), ("file://localhost/data/m", "/data/m"), ("file:/data/m", "/data/m")),
        *(("runs/m", "runs/m"), ("/data/a:b", "/data/a:b"), ("a:b/c", "a:b/c"), ("x/2026:/m", "x/2026:/m")),
    ],
)
def test_plain_paths_and_file_urls_are_taken_as_paths(given: str, taken: str) -> None:
    job = make_job(SYNTHETIC | {"out": given, "start_from": given})
    assert (job.out, job.start_from) == (taken, taken)


@settings(deadline=None)
@given(
    minibatch=st.integers(1, 2**20),
    block=st.none() | st.integers(1, 2**20),
    nodes=st.integers(1, 64),
    devices=st.integers(1, 16),
)
def test_the_mini_batch_that_is_named_gives_every_device_examples(
    minibatch: int, block: int | None, nodes: int, devices: int
) -> None:
    def job(examples: int) -> Job:
        size = {} if block is None else {"block_examples": max(block, -(-examples // MAX_BLOCKS))}
        cluster = {"nodes": nodes, "devices": devices, "partitions": 64}
        return make_job(SYNTHETIC | {"train": {"minibatch_examples": examples, **size}, "cluster": cluster})

    def empty(job: Job) -> int:
        """Devices without examples in a full step, as the readers deal them."""
        count, examples = 0, job.train.minibatch_examples
        for rank in range(nodes):
            steps = Steps(examples, nodes, rank, devices, job.train.block_examples)
            first, last = cut_blocks(examples, nodes, job.train.block_examples)[rank : rank + 2]
            starts = steps.device_starts(last - first)
            count += sum(start == stop for start, stop in pairwise(starts))
        return count

    said = job(minibatch).idle_devices()
    assert bool(said) == (empty(job(minibatch)) > 0)
    if said:
        wanted = int(re.search(r"Mini-batches of ([\d,]+)", said)[1].replace(",", ""))  # type: ignore[index]
        if wanted <= 2**20:
            assert not job(wanted).idle_devices()
