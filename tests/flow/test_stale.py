"""What comes late from a run or an epoch that is over is refused where it arrives; a newer epoch is never disturbed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.node import Flights, Read
from daskps.config import make_job
from daskps.errors import StaleError, TrainingError
from daskps.flow.begin import Begun
from daskps.flow.open_node import OpenNode
from daskps.flow.stages import check_free, close, find_node, holding, release
from daskps.types import Batch, Token
from tests.flow.conftest import SMALL, merged


def worker(run: str = "run", epoch: int = 3, path: str = "model") -> Any:
    """A worker on which a node is open."""
    closed: list[str] = []
    node = SimpleNamespace(
        run=run,
        epoch=SimpleNamespace(number=epoch),
        directory=SimpleNamespace(path=path),
        close=lambda: closed.append(run),
    )
    return SimpleNamespace(node=node, opening=None, closed=closed)


@pytest.mark.parametrize(("run", "epoch"), [("other", 3), ("run", 2), ("run", 4)])
def test_a_task_of_another_run_or_epoch_finds_no_node_and_closes_none(run: str, epoch: int) -> None:
    here = worker()
    with pytest.raises(StaleError, match=f"cannot pull: epoch {epoch} of run {run} has ended"):
        find_node(here, "pull", run, epoch)
    close(here, run, epoch)
    assert here.node is not None
    assert not here.closed
    assert find_node(here, "pull", "run", 3) is here.node


@pytest.mark.parametrize(("run", "epoch"), [("other", 3), ("run", 2)])
def test_a_token_of_another_run_or_epoch_touches_no_batch(run: str, epoch: int) -> None:
    flights, late = Flights("run", 3), Token(run, epoch, 0, 0, 1)
    empty = Batch(0, 1, np.empty(0, np.float32), np.empty(0, np.uint64), np.zeros(1, np.int64))
    for call in (flights.get, flights.begin, flights.number):
        with pytest.raises(StaleError, match="stale: this node is in run run epoch 3"):
            call(late)
    with pytest.raises(StaleError, match="stale"):
        flights.add(Read(late, empty, np.zeros(2, np.int64), ("read", 0.0, 0.0, 0.0)))
    with pytest.raises(StaleError, match="not in flight"):
        flights.get(Token("run", 3, 0, 0, 1))


def test_a_driver_that_was_overtaken_does_not_close_a_newer_epoch() -> None:
    here = worker(epoch=3)
    with pytest.raises(StaleError, match=r"model is open in epoch 3 of run run; epoch 2 is over"):
        release(here, "late", 2, "model", True, False)
    assert not here.closed
    with pytest.raises(StaleError, match="has just opened model"):
        check_free(here)


def test_a_newer_epoch_closes_the_older_one_wherever_it_is_open() -> None:
    for wanted in (True, False):
        here = worker(epoch=3)
        release(here, "next", 4, "model", wanted, False)
        assert (here.node, here.closed) == (None, ["run"])
        check_free(here)


def test_a_run_that_starts_again_takes_no_worker_from_another_model() -> None:
    here = worker(path="other")
    release(here, "next", 1, "model", False, False)
    assert here.node is not None
    with pytest.raises(TrainingError, match="now trains other"):
        release(here, "next", 1, "model", True, True)
    assert here.node is not None
    release(here, "next", 1, "model", True, False)
    assert here.closed == ["run"]


def test_a_node_that_sees_another_directory_than_node_0_says_so(tmp_path: Path) -> None:
    job = make_job(merged(SMALL, {"out": str(tmp_path / "m")}))
    with pytest.raises(StaleError, match=f"node 1 sees no epoch 5 in {tmp_path}/m, .* machines of all workers share"):
        OpenNode("run", 1, 2, job, Begun(5, 9, None, None))


def test_a_worker_has_a_model_from_before_its_node_is_made_until_it_is_closed() -> None:
    """Its partitions are locked all that time, and whoever finds them locked asks whose they are."""
    here = worker()
    here.node.close = lambda: here.closed.append(holding(here, "model"))
    close(here, "run", 3)
    assert here.closed == [True]
    assert holding(here, "model") is None
    here.opening = "next"
    assert (holding(here, "next"), holding(here, "./next"), holding(here, "model")) == (True, True, False)
