"""The disk tier's index outgrows a small memory budget: a warning comes early, and the advised budget is enough."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.config import make_job
from daskps.driver.driver import Driver
from daskps.driver.tasks import Tasks
from daskps.errors import CapacityError
from daskps.reports import BatchReport, Forecast, Growth, Progress
from daskps.types import BatchId
from tests.driver.helpers import Settings, Trained, model_bits

# Every key is new, and a step has 10,000 of them: the index takes 120 kB more with each of 40 steps.
GROWING: Settings = {
    "data": {"synthetic": {"examples": 40_000, "keys_per_slot": 2**40, "zipf_exponent": 0.0}},
    "tables": {"main": {"dimension": 4, "optimizer": {"kind": "sgd", "learning_rate": 0.01}}},
    "train": {"minibatch_examples": 1_000, "batch_examples": 1_000, "depth": 1},
    "budget": {"memory_bytes": "4MB"},
}


@given(exponent=st.floats(0.1, 1.0), start=st.integers(0, 1), steps=st.integers(8, 60))
def test_growth_by_a_power_of_the_examples_is_foreseen(exponent: float, start: int, steps: int) -> None:
    base = 500 * start  # a model that starts from another

    def rows(position: int) -> int:
        return base + round(100 * position**exponent)

    growth = Growth(0, base)
    assert growth.rows_at(10_000) is None
    for step in range(1, steps + 1):
        growth.add(1_000 * step, rows(1_000 * step))
    stop = 10_000 * steps
    assert growth.rows_at(stop) == pytest.approx(rows(stop), rel=0.05)
    assert growth.position_at(rows(stop)) == pytest.approx(stop, rel=0.05 / exponent)


def test_an_index_that_will_take_the_memory_is_told_early_and_the_advice_helps(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, told = tmp_path / "model", []

    def note(progress: Progress) -> None:
        if progress.warnings and not told:
            told.append(progress.batch)

    often: Settings = {"train": {"snapshot_every_batches": 5}}
    with caplog.at_level(logging.WARNING, "daskps.driver"), pytest.raises(CapacityError) as raised:
        trained(GROWING, often, out=out, on_progress=note)
    (warning,) = [one.getMessage() for one in caplog.records if "will not last" in one.getMessage()]  # once
    words = str(raised.value)
    ended = int(re.findall(r"(?:step|batch) (\d+) ", words)[0])
    assert told[0] < ended / 2
    place = int(re.findall(r"at about row ([\d,]+) of 40,000", warning)[0].replace(",", ""))
    assert place == pytest.approx(1_000 * ended, rel=0.3)
    snapshot = re.findall(r"go on with --resume: snapshot (\S+) holds", words)[0]
    assert int(snapshot.partition("-")[2]) >= ended - 6
    assert "make the batch smaller" not in words
    enough = int(re.findall(r"to at least ([\d,]+)", words)[0].replace(",", ""))
    foreseen = int(re.findall(r"--set budget.memory_bytes=(\d+)", warning)[0])
    assert enough == pytest.approx(foreseen, rel=0.3)
    caplog.clear()
    outcome, _ = trained(GROWING, often, {"budget": {"memory_bytes": enough}}, out=out)
    assert outcome.progress.position == 40_000
    assert not outcome.progress.warnings
    assert enough < 30_000_000  # and no more than about that
    whole = trained(GROWING, often, {"budget": {"memory_bytes": "200MB"}})[1]
    assert model_bits(out) == model_bits(whole)


def test_an_index_that_fits_is_no_reason_for_a_warning(trained: Trained) -> None:
    assert not trained(GROWING, {"budget": {"memory_bytes": "40MB"}})[0].progress.warnings


def test_keys_that_are_all_new_at_first_are_no_reason_for_a_warning(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    """After 2 of 80 steps it looked as if there would be three times the rows that there are at the end."""
    standing: Settings = {
        "data": {"synthetic": {"examples": 24_000, "keys_per_slot": 2_000}},
        "train": {"minibatch_examples": 300, "batch_examples": 300},
        "budget": {"memory_bytes": "1100KB"},
    }
    batches: list[Progress] = []
    trained(GROWING, standing, on_progress=batches.append, should_stop=lambda: len(batches) >= 12)
    assert not batches[-1].warnings
    assert "will not last" not in caplog.text


def test_a_warning_that_no_longer_holds_is_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    job = make_job({"data": {"format": "synthetic", "synthetic": {"examples": 10, "slots": 1}}})
    driver = Driver(Tasks(Mock(), ["worker"], "run", 1.0), job, Progress(0, 10, -1), 1, print, bool)
    driver._info = Mock(rows=10)
    sure = BatchReport(BatchId("run", 1, 0, 0, 1), 0, 1, (), {}, {})
    told = [replace(sure, forecast=Forecast(0, "main", 9, 99, position, 100)) for position in (8, 7)]
    found = []
    for reports in ([told[0]], [told[1], sure], [sure]):
        driver._warn(reports)
        found.append([re.findall(r"at about row (\d)", words)[0] for words in driver.progress.warnings])
    assert found == [["8"], ["7"], []]
    assert caplog.text.count("will not last") == 1


def test_without_a_snapshot_the_error_says_so(trained: Trained) -> None:
    with pytest.raises(CapacityError, match=r"raise budget.memory_bytes .* to at least .*there is no snapshot yet"):
        trained(GROWING)
