"""Example weights count relative to each other: their unit changes nothing, whatever it is, on any number of nodes."""

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from daskps.model import open_model
from daskps.storage.model_directory import ModelDirectory
from tests.driver.helpers import Settings, Trained, model_bits, model_rows

EXAMPLES = 3000


def weights_of(seed: int = 1) -> np.ndarray:
    """Weights from 0.01 to 100 or so, some of them 0."""
    random = np.random.default_rng(seed)
    weights = np.exp(random.normal(0, 1.5, EXAMPLES)).astype(np.float32)
    weights[random.random(EXAMPLES) < 0.05] = 0
    return weights


def job_on(path: Path, weights: np.ndarray | None, kind: str = "fm") -> Settings:
    """The job of a small file, in which labels follow users and ads."""
    random = np.random.default_rng(3)
    frame = pd.DataFrame({"user": random.integers(0, 300, EXAMPLES), "ad": random.integers(0, 20, EXAMPLES)})
    logits = np.sin(frame["user"]) + np.cos(3 * frame["ad"]) - 0.5
    frame["label"] = (random.random(EXAMPLES) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    if weights is not None:
        frame["w"] = weights
    frame.to_parquet(path)
    return {
        "data": {
            "format": "parquet",
            "paths": [str(path)],
            "synthetic": None,
            "weight": None if weights is None else "w",
        },
        "slots": [{"name": "user"}, {"name": "ad"}],
        "model": {"kind": kind, "hidden": [8]},
        "tables": {"main": {"dimension": 4, "optimizer": {"kind": "sgd", "learning_rate": 0.5}}},
        "train": {"minibatch_examples": 256, "batch_examples": 1024, "block_examples": 64},
        "cluster": {"partitions": 8},
    }


def learned(path: Path) -> str:
    """A hash of rows and dense network, without metrics."""
    directory = ModelDirectory(str(path))
    snapshot = directory.snapshot()
    assert snapshot is not None
    digest = hashlib.sha256()
    for array in model_rows(path):
        digest.update(np.ascontiguousarray(array).tobytes())
    for name, array in sorted(directory.load(snapshot).items()):
        if name.startswith("dense/"):
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("kind", ["fm", "dnn"])
def test_a_power_of_two_times_all_weights_changes_no_bit(kind: str, trained: Trained, tmp_path: Path) -> None:
    outcome, path = trained(job_on(tmp_path / "plain.parquet", weights_of(), kind))
    for power in (-40, 3, 40):
        scaled = job_on(tmp_path / f"{power}.parquet", np.ldexp(weights_of(), power), kind)
        other, model = trained(scaled)
        assert learned(model) == learned(path)
        expected = outcome.metrics | {"weight": np.ldexp(outcome.metrics["weight"], power)}
        assert other.metrics == expected


def test_any_factor_of_all_weights_changes_the_log_loss_by_less_than_a_hundred_thousandth(
    trained: Trained, tmp_path: Path
) -> None:
    data = tmp_path / "plain.parquet"
    path = trained(job_on(data, weights_of()))[1]
    with open_model(path) as model:
        expected = model.evaluate([str(data)])
    assert expected["auc"] > 0.6
    for factor in (1e-12, 3e-7, 0.3, 7e3, 1e12):
        scaled = (weights_of() * np.float64(factor)).astype(np.float32)
        other = trained(job_on(tmp_path / f"{factor}.parquet", scaled))[1]
        with open_model(other) as model:
            found = model.evaluate([str(data)])
        assert found["log_loss"] == pytest.approx(expected["log_loss"], rel=1e-5)
        assert found["auc"] == pytest.approx(expected["auc"], abs=1e-5)


def test_nodes_devices_and_batches_do_not_change_a_bit(on_nodes: Trained, tmp_path: Path) -> None:
    weights = weights_of()
    weights[500] = 1e9  # in the part of one node, but all scale by it
    job = job_on(tmp_path / "all.parquet", weights, "dnn")
    alone = model_bits(on_nodes(1, job)[1])
    assert model_bits(on_nodes(2, job)[1]) == alone
    several: Settings = {"cluster": {"devices": 2}, "train": {"batch_examples": 512, "depth": 4}}
    assert model_bits(on_nodes(2, job, several)[1]) == alone


# Rows and network that numerics 1 trained on the same data without weights.
WITHOUT_WEIGHTS = "b8c1aba3e030b15c6d685a11fe2fcb83be23851d2ee93ffd128518ab72d0e422"


def test_weights_of_one_give_the_bits_of_no_weights_and_those_of_numerics_1(trained: Trained, tmp_path: Path) -> None:
    plain, path = trained(job_on(tmp_path / "none.parquet", None))
    ones, of_ones = trained(job_on(tmp_path / "ones.parquet", np.ones(EXAMPLES, np.float32)))
    assert model_bits(of_ones) == model_bits(path)
    assert ones.metrics == plain.metrics
    assert learned(path) == WITHOUT_WEIGHTS


def test_large_weights_train_at_any_mini_batch(trained: Trained, tmp_path: Path) -> None:
    path = trained(job_on(tmp_path / "none.parquet", None))[1]
    assert learned(trained(job_on(tmp_path / "w.parquet", np.full(EXAMPLES, 2.0**20, np.float32)))[1]) == learned(path)


def test_a_step_of_weight_0_changes_nothing(trained: Trained, tmp_path: Path) -> None:
    weights = weights_of()
    weights[512:1024] = 0
    decay = {
        "tables": {"main": {"optimizer": {"kind": "adam", "l2": 0.1}}},
        "model": {"optimizer": {"kind": "adam", "l2": 0.1}},
    }
    job = job_on(tmp_path / "all.parquet", weights)
    whole = trained(job, decay)[1]
    frame = pd.read_parquet(tmp_path / "all.parquet")
    without = job_on(tmp_path / "some.parquet", weights)
    pd.concat([frame[:512], frame[1024:]]).to_parquet(tmp_path / "some.parquet")
    some = trained(without, decay)[1]
    keys, rows = model_rows(whole)
    known, expected = model_rows(some)
    np.testing.assert_array_equal(rows[np.isin(keys, known)], expected)
