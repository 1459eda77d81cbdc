"""A run that stops goes on from its last snapshot, and ends with the bits of a run that was left alone."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daskps.device.pool import ComputePool
from daskps.driver.dask import DaskBackend
from daskps.driver.driver import Driver
from daskps.errors import ConfigError, DaskpsError, LockedError
from daskps.reports import BatchReport, Progress
from daskps.ssd import TableStore
from daskps.storage.model_directory import ModelDirectory
from tests.driver.helpers import SMALL, Trained, model_bits, stopper


def test_a_stopped_run_goes_on_to_the_same_bits(trained: Trained, tmp_path: Path) -> None:
    whole = trained()[1]
    stopped, path = trained(out=tmp_path / "stopped", **stopper(2))
    assert stopped.progress.position < 6_000
    trained({"train": {"depth": 4, "batch_examples": 500}}, out=path)
    assert model_bits(path) == model_bits(whole)


def test_periodic_snapshots_are_published_and_old_ones_dropped(trained: Trained) -> None:
    path = trained({"train": {"snapshot_every_batches": 1, "keep_snapshots": 2}})[1]
    snapshots = ModelDirectory(str(path)).snapshots()
    assert [snapshot.draft.batch for snapshot in snapshots] == [4, 5]
    assert snapshots[-1].draft.position == 6_000


def minutes_pass(monkeypatch: pytest.MonkeyPatch, minutes: float) -> Callable[[Progress], None]:
    """Let the driver's clock go on by so many minutes with every batch, and by nothing else."""
    now = [0.0]
    monkeypatch.setattr(DaskBackend, "time", lambda _: now[0])

    def go_on(_: Progress) -> None:
        now[0] += 60 * minutes

    return go_on


def test_a_run_leaves_a_snapshot_every_five_minutes_without_being_told(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained()[1]
    settings = {"train": {"batch_examples": 500, "keep_snapshots": 20, "depth": 1}}
    path = trained(settings, on_progress=minutes_pass(monkeypatch, 2.0))[1]
    batches = [snapshot.draft.batch for snapshot in ModelDirectory(str(path)).snapshots()]
    assert batches == [3, 6, 9, 11]  # of minutes 6, 12 and 18, and the end
    assert model_bits(path) == model_bits(whole)


def test_a_snapshot_by_time_waits_19_times_as_long_as_the_last_one_took(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushes = iter([30.0, 1.0, 15.0, 1.0])  # minutes

    def slow(report: BatchReport) -> BatchReport:
        times = tuple(
            replace(stage, started=stage.ended - 60 * next(pushes)) if stage.stage == "push" else stage
            for stage in report.stages
        )
        return replace(report, stages=times) if report.token.snapshot else report

    finish = Driver._finish

    async def finish_slowly(driver: Driver, flight: Any) -> None:
        if flight.token.snapshot:
            flight.answers = [slow(report) for report in flight.answers]
        await finish(driver, flight)

    monkeypatch.setattr(Driver, "_finish", finish_slowly)
    settings = {"train": {"batch_examples": 500, "keep_snapshots": 20, "depth": 1}}
    path = trained(settings, on_progress=minutes_pass(monkeypatch, 100.0))[1]
    batches = [snapshot.draft.batch for snapshot in ModelDirectory(str(path)).snapshots()]
    assert batches == [1, 7, 8, 11]  # 570 minutes after the first one, 19 after the second, 285 after the third


def test_an_error_leaves_the_last_snapshot_and_the_run_goes_on(trained: Trained, tmp_path: Path) -> None:
    whole = trained()[1]

    def fail(progress: Progress) -> None:
        if progress.batch == 3:
            raise DaskpsError("the notebook was closed")

    with pytest.raises(DaskpsError, match="the notebook was closed"):
        trained({"train": {"snapshot_every_batches": 1}}, out=tmp_path / "failed", on_progress=fail)
    outcome, path = trained(out=tmp_path / "failed")
    assert outcome.progress.examples < 6_000
    assert model_bits(path) == model_bits(whole)


def test_more_epochs_go_on_where_fewer_ended(trained: Trained, tmp_path: Path) -> None:
    # 5,000 rows are whole steps: only then do one epoch and the next meet between two steps.
    rows = {"data": {"synthetic": {"examples": 5_000}}}
    whole = trained(rows, {"train": {"epochs": 2}})[1]
    path = trained(rows, out=tmp_path / "longer")[1]
    trained(rows, {"train": {"epochs": 2}}, out=path)
    assert model_bits(path) == model_bits(whole)


def test_a_finished_run_has_nothing_to_do(trained: Trained) -> None:
    first, path = trained()
    again, _ = trained(out=path)
    assert again.progress.examples == 0
    assert again.snapshot == first.snapshot


def test_other_settings_are_refused(trained: Trained) -> None:
    path = trained()[1]
    with pytest.raises(ConfigError, match="holds a model of other settings"):
        trained({"seed": 9}, out=path)


def test_another_order_of_tables_is_another_model(trained: Trained, tmp_path: Path) -> None:
    tables = {"main": SMALL["tables"]["main"], "other": SMALL["tables"]["main"]}
    slots = {"slots": [{"name": f"s{at}", "table": "other" if at else "main"} for at in range(5)]}
    path = trained({"tables": tables}, slots, out=tmp_path / "stopped", **stopper(2))[1]
    with pytest.raises(ConfigError, match="the order of tables"):
        trained({"tables": None}, {"tables": dict(reversed(tables.items()))}, slots, out=path)


def test_validations_and_early_stopping_are_the_same_after_interruptions(trained: Trained, tmp_path: Path) -> None:
    """Stopped between two validations and right before one, in the first pass and in a later one."""
    settings = {
        "data": {"validation_rows": 1_000},
        "tables": {"main": {"optimizer": {"kind": "sgd", "learning_rate": 50.0}}},
        "train": {"epochs": 4, "validate_every_batches": 2, "early_stopping_patience": 3, "snapshot_every_batches": 1},
    }
    whole, path = trained(settings)
    assert whole.progress.stopped_early
    out = tmp_path / "interrupted"
    for batches in (1, 2, 3, 6):
        part = trained(settings, out=out, **stopper(batches))[0].progress
    last = trained(settings, out=out)[0].progress
    assert [one.batch for one in last.validations] == [one.batch for one in whole.progress.validations]
    assert [one.metrics for one in last.validations] == [one.metrics for one in whole.progress.validations]
    assert part.position < last.position == whole.progress.position
    assert model_bits(out) == model_bits(path)
    again = trained(settings, out=out)[0].progress
    assert again.examples == 0, "a run that has stopped early has nothing to do"


def test_a_model_that_another_process_writes_to_is_left_to_it(trained: Trained) -> None:
    few = {"data": {"synthetic": {"examples": 2_000}}}
    path = trained(few, **stopper(1))[1]
    before = ModelDirectory(str(path)).state()
    with (
        ComputePool(1) as pool,
        TableStore.open(path / "tables" / "main", pool=pool, owned=[1], snapshot=before.last),
        pytest.raises(LockedError, match=f"process {os.getpid()} is writing"),
    ):
        trained(few, {"cluster": {"wait_seconds": 0.1}}, out=path)
    assert ModelDirectory(str(path)).state() == before  # so whoever writes may still publish
    assert trained(few, out=path)[0].progress.position == 2_000
