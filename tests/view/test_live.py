"""A run as it is seen on a cluster: the page in Dask's dashboard, the Prometheus metrics, the names of its tasks."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.request import urlopen

import pytest
from distributed import Client

from daskps.driver.driver import Outcome
from daskps.types import Stage
from daskps.view.figures import TIERS
from tests.view.browser import Browser, find_chromium
from tests.view.helpers import needs

SOURCE = "[...Bokeh.documents[0]._all_models.values()].find(model => model.type == 'ColumnDataSource')"


def test_every_batch_is_an_event_of_the_scheduler(client: Client, outcome: Outcome) -> None:
    told = [event for _, event in client.get_events("daskps")]  # of all runs on this cluster
    names, expected = [event["event"] for event in told], ["start", *["batch"] * 8, "end"]
    first = next((at for at in range(len(names)) if names[at : at + 10] == expected), None)
    assert first is not None, names
    events = told[first : first + 10]
    assert sum(event["examples"] for event in events if event["event"] == "batch") == 8_000


@needs("prometheus_client")
def test_dasks_own_endpoint_has_the_metrics(address: str, outcome: Outcome) -> None:
    text = urlopen(f"{address}/metrics").read().decode()
    values = dict(re.findall(r"^(daskps_[^ ]+) ([^ \n]+)$", text, re.M))
    assert float(values["daskps_examples_total"]) % 8_000 == 0
    assert float(values["daskps_batches_total"]) >= 8
    assert float(values['daskps_metric{job="seen",metric="auc"}']) == pytest.approx(outcome.metrics["auc"])
    for tier in TIERS:
        assert f'daskps_hit_ratio{{job="seen",tier="{tier}"}}' in values
    for stage in Stage:
        assert float(values[f'daskps_stage_tasks{{stage="{stage}"}}']) == 0  # nothing is left behind
        assert float(values[f'daskps_stage_busy_seconds_total{{stage="{stage}"}}']) > 0


@needs("bokeh")
def test_dasks_navigation_bar_names_the_page(address: str, outcome: Outcome) -> None:
    assert '<a href="daskps">' in urlopen(f"{address}/status").read().decode()


@needs("bokeh")
@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
def test_the_page_draws_every_batch_in_a_real_browser(address: str, outcome: Outcome, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{address}/daskps")
        browser.wait("window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].roots().length")
        assert browser.wait(f"{SOURCE}.data.batch.length") == 8
        assert browser.evaluate(f"{SOURCE}.data['auc auc'].at(-1)") == pytest.approx(outcome.metrics["auc"])
        titles = browser.evaluate(
            "[...Bokeh.documents[0]._all_models.values()].filter(m => m.type == 'Title').map(m => m.text)"
        )
        assert {"AUC", "Hit rates", "Bytes in each tier", "Examples per second"} <= set(titles)
        words = browser.evaluate(
            "[...Bokeh.documents[0]._all_models.values()].filter(m => m.type == 'Div').map(m => m.text).join()"
        )
        assert "seen: finished" in words
        assert browser.evaluate("document.querySelectorAll('canvas, div.bk-Figure, [class*=bk-]').length") > 0


@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
def test_the_report_shows_its_charts_in_a_real_browser(outcome: Outcome, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(Path(str(outcome.report)).as_uri())
        assert browser.wait("document.querySelectorAll('svg[data-chart]').length") == 6
        assert browser.evaluate("document.querySelectorAll('svg.timeline rect').length") >= 8 * len(Stage)
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        fetched = browser.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert fetched == []  # nothing from outside
        browser.evaluate(
            "(svg => svg.dispatchEvent(new PointerEvent('pointermove', {clientX: svg.getBoundingClientRect().x + 99})))"
            "(document.querySelector('svg[data-chart]'))"
        )
        assert "progressive" in browser.evaluate("document.querySelector('.tip:not([hidden])').textContent")


def test_tasks_bear_the_names_of_their_stages(client: Client, outcome: Outcome) -> None:
    names = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.task_prefixes))
    assert {f"daskps-{stage}" for stage in Stage} <= set(names)
