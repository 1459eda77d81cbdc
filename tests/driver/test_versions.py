"""Settings and arithmetic change between releases: a model goes on with its own settings, or not at all."""

import logging
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import daskps
from daskps.config import complete, make_job, recorded_job
from daskps.data.formats import foreign_settings
from daskps.errors import ConfigError
from daskps.nn.blas import blas_build
from daskps.storage.model_directory import ModelDirectory
from daskps.version import KEY_RULE, NUMERICS
from tests.driver.helpers import SMALL, Trained, merged, model_bits, stopper

# Every group of settings that affect the result, with a value that is no default.
UNUSUAL = {
    "seed": 4,
    "data": {"hash_seed": 3, "synthetic": {"zipf_exponent": 0.8}},
    "tables": {"main": {"pooling": "mean", "initialiser": {"scale": 0.02}, "optimizer": {"beta1": 0.8, "l2": 1e-4}}},
    "model": {"kind": "deepfm", "optimizer": {"learning_rate": 0.02}},
    "train": {"epochs": 2},
}


def test_a_snapshot_records_its_numerics_and_all_settings_that_affect_the_result(trained: Trained) -> None:
    path = trained(UNUSUAL)[1]
    snapshot = ModelDirectory(str(path)).snapshot()
    assert snapshot is not None
    settings = snapshot.draft.settings
    assert settings["numerics"] == NUMERICS
    assert settings["result"]["data"]["key_rule"] == KEY_RULE
    assert settings["result"]["data"]["synthetic"]["zipf_exponent"] == 0.8
    assert settings["result"]["tables"]["main"]["optimizer"]["beta1"] == 0.8
    assert settings["result"]["train"] == {
        "minibatch_examples": 500,
        "block_examples": 64,
        "sync_every": 1,
        "epochs": 2,
        "early_stopping_patience": 0,
        "best_metric": "log_loss",
    }


def test_a_setting_that_a_resumed_job_does_not_name_is_the_models(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trained(UNUSUAL)[1]
    path = trained(UNUSUAL, out=tmp_path / "resumed", **stopper(2))[1]
    with caplog.at_level(logging.INFO, "daskps.driver"):
        outcome, _ = trained(out=path)  # SMALL names none of the unusual ones
    assert outcome.progress.position == 12_000
    assert model_bits(path) == model_bits(whole)
    assert "tables.main.optimizer.beta1 = 0.8" in caplog.text
    assert "train.epochs = 2" in caplog.text


def test_a_snapshot_records_its_blas_and_a_run_with_another_one_says_so_once_and_goes_on(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "BLAS" in record.getMessage()]
        caplog.clear()
        return found

    path = trained(out=tmp_path / "one", **stopper(1))[1]
    snapshot = ModelDirectory(str(path)).snapshot()
    assert snapshot is not None
    assert snapshot.draft.settings["blas"] == blas_build()
    shutil.copytree(path, tmp_path / "same")
    trained(out=tmp_path / "same")
    assert not told()
    monkeypatch.setattr("daskps.node.node.blas_build", lambda: "mkl 2031.1 Diamond")
    outcome, _ = trained(out=path)
    assert outcome.progress.position == 6_000
    (message,) = told()
    assert f"made with the BLAS {blas_build()}; this run goes on with mkl 2031.1 Diamond" in message
    snapshot = ModelDirectory(str(path)).snapshot()
    assert snapshot is not None
    assert snapshot.draft.settings["blas"] == "mkl 2031.1 Diamond"


def test_a_setting_that_a_resumed_job_names_is_never_replaced(trained: Trained) -> None:
    path = trained(UNUSUAL, **stopper(2))[1]
    with pytest.raises(ConfigError, match=r"holds a model of other settings \(tables"):
        trained({"tables": {"main": {"optimizer": {"beta1": 0.9}}}}, out=path)


def test_a_model_of_other_numerics_is_not_resumed_but_can_be_started_from(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daskps.node.node.NUMERICS", NUMERICS - 1)
    old = trained(**stopper(2))[1]
    monkeypatch.undo()
    before = ModelDirectory(str(old)).state()
    with pytest.raises(ConfigError, match=f"numerics {NUMERICS - 1}.*numerics {NUMERICS}.*start_from = '{old}'"):
        trained(out=old)
    assert ModelDirectory(str(old)).state() == before
    outcome, _ = trained({"start_from": str(old)}, out=tmp_path / "new")
    assert outcome.progress.position == 6_000
    with daskps.open_model(old) as model:  # asking it needs no arithmetic of training
        assert model.rows() > 0


def test_a_snapshot_without_versions_is_of_the_first_ones() -> None:
    settings = make_job(SMALL).model_dump(mode="json")
    del settings["data"]["key_rule"]
    assert recorded_job({"job": settings}, "a snapshot").data.key_rule == 1


def test_a_model_of_another_key_rule_is_started_from_only_with_its_own(trained: Trained, tmp_path: Path) -> None:
    old = trained({"data": {"key_rule": 1}}, **stopper(2))[1]
    with pytest.raises(ConfigError, match=r"keys by rule 1.*rule 2.*Set data.key_rule = 1"):
        trained({"start_from": str(old)}, out=tmp_path / "refused")
    trained({"start_from": str(old), "data": {"key_rule": 1}}, out=tmp_path / "new")
    with daskps.open_model(tmp_path / "new") as model:
        assert model.job.data.key_rule == 1
    outcome, _ = trained(out=old)  # a resumed job takes the model's rule
    assert outcome.progress.position == 6_000


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 9),
            "tables": st.sampled_from([{"main": {}}, {"main": {"optimizer": {"kind": "sgd"}}}]),
            "slots": st.sampled_from([[{"name": "a"}], [{"name": "b", "raw": True}]]),
            "model": st.sampled_from([{"kind": "dnn"}, {"hidden": [4]}, {"optimizer": {"kind": "adam"}}]),
            "train": st.sampled_from([{"epochs": 3}, {"minibatch_examples": 64}]),
        },
    )
)
def test_what_is_named_stays_and_what_is_not_is_filled(changes: dict[str, object]) -> None:
    slots = [{"name": "a", "kind": "integer"}, {"name": "b"}]
    known = make_job(merged(SMALL, UNUSUAL, {"slots": slots}))
    named = {"data": {"format": "synthetic"}, **changes}
    foreign = foreign_settings("synthetic")  # generated data has no files with missing values or separators
    filled = complete(make_job(named), known.result_fields()).model_dump(mode="json", exclude_unset=True)

    def check(mine: object, theirs: object) -> None:
        if isinstance(mine, dict):
            assert isinstance(theirs, dict)
            for name, value in mine.items():
                if name not in foreign:
                    check(value, theirs[name])
        elif isinstance(mine, list) and mine and isinstance(mine[0], dict):
            assert isinstance(theirs, list)
            assert len(mine) == len(theirs)
            for one, other in zip(mine, theirs, strict=True):
                check(one, other)
        else:
            assert mine == theirs

    check(named, filled)
    for group, value in known.result_fields().items():
        if group not in named:
            check(value, filled[group])
