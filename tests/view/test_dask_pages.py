"""Dask's own dashboard during a run: every page of it answers, the graph of task groups too."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from distributed import Client

import daskps
from daskps.reports import Progress
from tests.view.browser import Browser, find_chromium
from tests.view.helpers import JOB, needs

BATCHES = 5  # more than are in flight, so that what waits for an earlier batch is in Dask's graph


@pytest.fixture
def at_work(client: Client, tmp_path: Path) -> Iterator[None]:
    """A run that has finished some batches and has others in flight, for as long as the test lasts."""
    reached, go_on = threading.Event(), threading.Event()

    def wait(progress: Progress) -> None:
        if progress.batch == BATCHES:
            reached.set()
            go_on.wait()

    job: dict[str, Any] = {**JOB, "out": str(tmp_path / "m"), "data": {**JOB["data"]}}  # type: ignore[dict-item]
    job["train"] = {"minibatch_examples": 500, "batch_examples": 500}
    run = threading.Thread(target=daskps.train, args=(job,), kwargs={"client": client, "on_progress": wait})
    run.start()
    reached.wait()
    yield
    go_on.set()
    run.join()


def pages(client: Client) -> list[str]:
    """Every page that the scheduler's server has without arguments."""

    def look(dask_scheduler: Any) -> list[str]:
        from distributed.dashboard.scheduler import applications

        return sorted({*applications, "/info/main/workers.html", "/info/main/logs.html", "/json/counts.json"})

    return client.run_on_scheduler(look)  # type: ignore[no-any-return]


def status(address: str) -> int:
    try:
        with urlopen(address) as answer:
            answer.read()
            return int(answer.status)
    except HTTPError as error:
        return error.code


@needs("bokeh")
def test_every_page_of_dask_answers_during_a_run(client: Client, address: str, at_work: None) -> None:
    found = {page: status(f"{address}{page}") for page in pages(client)}
    assert "/groups" in found
    assert {page: code for page, code in found.items() if code != 200} == {}


@needs("bokeh")
@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
def test_every_page_of_dask_is_drawn_in_a_real_browser_during_a_run(
    client: Client, address: str, at_work: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A page that is open asks for news again and again; what fails then is in the scheduler's log alone."""
    drawn = "document.readyState == 'complete' && (!window.Bokeh || Bokeh.documents.some(page => page.roots().length))"
    names = "[...Bokeh.documents[0]._all_models.values()].filter(m => m.type == 'ColumnDataSource')"
    with Browser(tmp_path / "profile") as browser:
        for page in pages(client):
            if page.startswith("/individual-") or page == "/hardware":
                continue  # a part of one of the others, alone; and the one that measures the machine for many seconds
            browser.open(f"{address}{page}")
            browser.wait(f"location.pathname == {page!r} && {drawn}")
            if page == "/groups":
                assert browser.wait(f"{names}.some(source => (source.data.name || []).includes('daskps-train'))")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_the_groups_of_a_run_have_no_cycle(client: Client, at_work: None) -> None:
    def edges(dask_scheduler: Any) -> dict[str, list[str]]:
        groups = dask_scheduler.task_groups.values()
        return {group.name: [before.name for before in group.dependencies] for group in groups}

    left = {
        name: {before for before in after if before != name} for name, after in client.run_on_scheduler(edges).items()
    }
    assert left["daskps-load"] == {"daskps-pull"}
    while free := [name for name, after in left.items() if not after & set(left)]:
        for name in free:
            del left[name]
    assert left == {}  # what is left waits for itself
