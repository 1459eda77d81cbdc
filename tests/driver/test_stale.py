"""A task or message of a run or an incarnation that is over is refused; a newer one is not disturbed."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.config import make_job
from daskps.errors import ConfigError, StaleError, StoreError
from daskps.node.batches import BatchesInFlight, Read
from daskps.node.begin import IncarnationStart
from daskps.node.node import OpenNode
from daskps.node.stages import check_free, close, find_node, holding, release
from daskps.storage.model_directory import ModelDirectory
from daskps.types import Batch, BatchId, Stage
from tests.driver.helpers import SMALL, Trained, merged


def worker(run: str = "run", incarnation: int = 3, path: str = "model") -> Any:
    """A worker on which a node is open."""
    closed: list[str] = []
    node = SimpleNamespace(
        run=run,
        incarnation=SimpleNamespace(number=incarnation),
        directory=SimpleNamespace(path=path),
        close=lambda: closed.append(run),
    )
    return SimpleNamespace(node=node, opening=None, closed=closed)


@pytest.mark.parametrize(("run", "incarnation"), [("other", 3), ("run", 2), ("run", 4)])
def test_a_task_of_another_run_or_incarnation_finds_no_node_and_closes_none(run: str, incarnation: int) -> None:
    here = worker()
    with pytest.raises(StaleError, match=f"cannot pull: incarnation {incarnation} of run {run} has ended"):
        find_node(here, Stage.PULL, run, incarnation)
    close(here, run, incarnation)
    assert here.node is not None
    assert not here.closed
    assert find_node(here, Stage.PULL, "run", 3) is here.node


@pytest.mark.parametrize(("run", "incarnation"), [("other", 3), ("run", 2)])
def test_a_token_of_another_run_or_incarnation_touches_no_batch(run: str, incarnation: int) -> None:
    flights, late = BatchesInFlight("run", 3), BatchId(run, incarnation, 0, 0, 1)
    empty = Batch(0, 1, np.empty(0, np.float32), np.empty(0, np.uint64), np.zeros(1, np.int64))
    for call in (flights.get, flights.begin, flights.number):
        with pytest.raises(StaleError, match="stale: this node is in run run, incarnation 3"):
            call(late)
    with pytest.raises(StaleError, match="stale"):
        flights.add(Read(late, empty, np.zeros(2, np.int64), ("read", 0.0, 0.0, 0.0)))
    with pytest.raises(StaleError, match="not in flight"):
        flights.get(BatchId("run", 3, 0, 0, 1))


def test_a_driver_that_was_overtaken_does_not_close_a_newer_incarnation() -> None:
    here = worker(incarnation=3)
    with pytest.raises(StaleError, match=r"model is open in incarnation 3 of run run; incarnation 2 is over"):
        release(here, "late", 2, "model", True)
    assert not here.closed
    with pytest.raises(StaleError, match="has just opened model"):
        check_free(here)


def test_a_newer_incarnation_closes_the_older_one_wherever_it_is_open() -> None:
    for wanted in (True, False):
        here = worker(incarnation=3)
        release(here, "next", 4, "model", wanted)
        assert (here.node, here.closed) == (None, ["run"])
        check_free(here)


def test_a_node_of_another_model_is_closed_only_on_a_worker_that_the_run_has_claimed() -> None:
    here = worker(path="other")
    release(here, "next", 1, "model", False)
    assert here.node is not None
    release(here, "next", 1, "model", True)
    assert here.closed == ["run"]


def test_a_node_that_sees_another_directory_than_node_0_says_so(tmp_path: Path) -> None:
    job = make_job(merged(SMALL, {"out": str(tmp_path / "m")}))
    words = f"node 1 sees another directory in {tmp_path}/m than node 0, .*here it ends at entry 0.* all workers share"
    with pytest.raises(ConfigError, match=words):
        OpenNode("run", 1, 2, job, IncarnationStart(5, 9, None, None, "id"))


@pytest.mark.parametrize("same_id", [False, True])
def test_equal_numbers_of_incarnation_and_entry_are_not_the_same_incarnation(tmp_path: Path, same_id: bool) -> None:
    """Another model, or a copy of this one that another run has gone on with."""
    job = make_job(merged(SMALL, {"out": str(tmp_path / "m")}))
    there = ModelDirectory(job.out).begin_incarnation("another run")
    begun = IncarnationStart(there.number, there.index, None, None, there.model if same_id else "id")
    with pytest.raises(
        ConfigError, match=r"node 1 sees another directory .*here that is of incarnation 1 of run another run"
    ):
        OpenNode("run", 1, 2, job, begun)


def test_an_incarnation_that_another_run_has_ended_is_over(tmp_path: Path) -> None:
    job = make_job(merged(SMALL, {"out": str(tmp_path / "m")}))
    mine = ModelDirectory(job.out).begin_incarnation("run")
    ModelDirectory(job.out).begin_incarnation("next")
    with pytest.raises(StaleError, match="is in incarnation 2; incarnation 1 of run run is over"):
        OpenNode("run", 1, 2, job, IncarnationStart(mine.number, mine.index, None, None, mine.model))


def test_a_new_model_does_not_begin_over_the_tables_of_another(trained: Trained) -> None:
    """Its log is lost: nobody can tell whether somebody wants the rows."""
    path = trained()[1]
    shutil.rmtree(path / "log")
    before = {file: file.read_bytes() for file in sorted((path / "tables").rglob("*")) if file.is_file()}
    with pytest.raises(StoreError, match=r"partition-00000 belongs to model \w{32} and has the snapshots 000001-"):
        trained({"cluster": {"partitions": 2}}, out=path)
    assert {file: file.read_bytes() for file in sorted((path / "tables").rglob("*")) if file.is_file()} == before


def test_a_worker_has_a_model_from_before_its_node_is_made_until_it_is_closed() -> None:
    """Its partitions are locked all that time, and whoever finds them locked asks whose they are."""
    here = worker()
    here.node.close = lambda: here.closed.append(holding(here, "model"))
    close(here, "run", 3)
    assert here.closed == [True]
    assert holding(here, "model") is None
    here.opening = "next"
    assert (holding(here, "next"), holding(here, "./next"), holding(here, "model")) == (True, True, False)
