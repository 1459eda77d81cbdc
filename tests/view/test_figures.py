"""Figures of a batch, words for numbers, charts."""

from __future__ import annotations

import logging
from xml.etree import ElementTree

import pytest
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import daskps
from daskps.driver.driver import Outcome
from daskps.view.figures import hit_rates
from daskps.view.report import Bar, Line, line_chart, stacked_chart, ticks, timeline
from daskps.view.words import duration, percent, short, size
from tests.view.helpers import JOB


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_rows_come_from_memory_disk_or_nowhere(hits: int, misses: int, new: int) -> None:
    rates = hit_rates({"keys": 10, "distinct_keys": 4, "hits": hits, "misses": misses, "new_keys": new})
    assert rates["hbm"] == pytest.approx(0.6)
    together = rates["memory"] + rates["disk"] + rates["new"]
    assert together == pytest.approx(1 if hits + misses + new else 0)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e12))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert len(found) <= 12
    assert all(low - span * 1e-3 <= value <= low + span * 1.001 for value in found)


def test_numbers_read_as_people_write_them() -> None:
    assert [duration(value) for value in (5, 95, 7500)] == ["0:05", "1:35", "2:05:00"]
    assert [size(value) for value in (12, 16_035_776, 2e12)] == ["12 B", "16.0 MB", "2.0 TB"]
    assert [short(value) for value in (0.5, 1234, 1_234_567)] == ["0.5", "1.23k", "1.23M"]
    assert percent(0.714) == "71%"


def test_charts_are_well_formed_for_any_number_of_points() -> None:
    for count in (1, 2, 5000):
        line = Line("a & b", "red", range(count), [0.5] * count)
        for text in (
            line_chart([line], x_label="x < y"),
            stacked_chart([line], x_label="x", y_format=percent, kind="percent"),
        ):
            root = ElementTree.fromstring(text)
            drawn = root.find("polyline") if root.find("polyline") is not None else root.find("polygon")
            assert drawn is not None
            assert len(str(drawn.get("points")).split()) <= 800
    bars = [Bar("read", "red", 0.0, 1.0, "title <1>")]
    assert ElementTree.fromstring(timeline(["read"], bars, start=0.0, stop=1.0)).find("rect") is not None


def test_the_log_has_one_line_per_batch_with_fields(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture, client: Client, outcome: Outcome
) -> None:
    with caplog.at_level(logging.INFO, "daskps.run"):
        out = str(tmp_path_factory.mktemp("logged"))
        daskps.train({**JOB, "out": out}, client=client, report=False)
    fields = [vars(record)["daskps"] for record in caplog.records if record.name == "daskps.run"]
    batches = [event for event in fields if event["event"] == "batch"]
    assert len(batches) == 8
    assert batches[-1]["position"] == 8_000
    assert batches[-1]["metrics"] == outcome.metrics  # the same run gives the same bits
