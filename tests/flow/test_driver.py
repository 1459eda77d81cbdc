"""How a run goes on after a loss, and what it says when it cannot: the driver over workers that are only names."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.config import make_job
from daskps.errors import BackendError, PeerError
from daskps.flow.driver import drive, pieces
from daskps.flow.progress import Outcome
from daskps.flow.tasks import Tasks
from daskps.types import Token
from tests.flow.conftest import SMALL, Settings, merged


class Names:
    """A cluster whose workers are there as `seen` says, look by look, and are lost whenever a run begins."""

    def __init__(self, *seen: dict[str, float]) -> None:
        self.seen = list(seen)
        self.begun = 0
        self.now = 0.0
        self.slept: list[float] = []

    def present(self) -> dict[str, float]:
        return self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]

    def prepare(self) -> None:
        self.begun += 1
        raise PeerError(f"a worker was lost in attempt {self.begun}")

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)

    def time(self) -> float:
        return self.now


def run(cluster: Any, seconds: float = 0.0, **settings: Any) -> Outcome:
    changes: Settings = {"cluster": {"nodes": 2, "wait_seconds": 7.0, **settings}}
    job = make_job(merged(SMALL, changes))
    callbacks: Settings = {"on_progress": lambda _: None, "should_stop": lambda: False}
    return asyncio.run(drive(cluster, job, "run", seconds=seconds, **callbacks))


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_run_goes_back_as_often_as_it_may_and_waits_longer_each_time(restarts: int) -> None:
    cluster = Names({"a": 0.0, "b": 0.0})
    with pytest.raises(PeerError, match=f"lost in attempt {restarts + 1}$"):
        run(cluster, restarts=restarts)
    assert cluster.begun == restarts + 1
    assert cluster.slept == [1.0, 2.0, 4.0][:restarts]


def test_a_run_that_lost_a_worker_begins_again_when_enough_are_there() -> None:
    both, one, silent = {"a": 0.0, "b": 0.0}, {"a": 0.0}, {"a": 0.0, "b": 30.0}
    cluster = Names(both, one, silent, one, both)
    with pytest.raises(PeerError, match="lost in attempt 2"):
        run(cluster, restarts=1)
    assert cluster.slept == pytest.approx([1.0, 0.1, 0.1, 0.1])


def test_a_run_may_wait_for_its_first_workers() -> None:
    cluster = Names({"a": 0.0}, {"a": 0.0}, {"a": 0.0, "b": 0.0})
    with pytest.raises(BackendError, match="wants 2 nodes, the cluster has 1 workers"):
        run(cluster)
    with pytest.raises(PeerError, match="lost in attempt 1"):
        run(cluster, seconds=5.0, restarts=0)


def test_a_run_without_enough_workers_says_what_was_lost_and_what_is_missing() -> None:
    cluster = Names({"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 30.0})
    with pytest.raises(PeerError, match=r"lost in attempt 1; the job wants 2 nodes, .* 2 workers, 1 of them silent"):
        run(cluster, restarts=3)
    assert cluster.begun == 1
    assert cluster.now == pytest.approx(1.0 + 7.0, abs=0.2)


def test_a_worker_that_is_gone_or_silent_is_named_with_what_the_run_waits_for() -> None:
    cluster: Any = Names({"a": 0.0, "b": 8.0}, {"a": 0.0}, {"a": 0.0, "b": 12.0})
    tasks = Tasks(cluster, ["a", "b"], "run", wait_seconds=7.0)
    tasks.doing = "stage pull to push, batch 5"
    tasks.look()  # as long as its peers may wait for it
    with pytest.raises(PeerError, match="node 1, stage pull to push, batch 5: the worker b is gone"):
        tasks.look()
    with pytest.raises(PeerError, match=r"node 1, stage pull to push, batch 5: the worker b was not heard of for 12 s"):
        tasks.look()


@given(first=st.integers(0, 50), count=st.integers(1, 200), steps=st.integers(1, 250))
def test_a_cut_batch_has_as_few_pieces_as_fit_and_even_ones(first: int, count: int, steps: int) -> None:
    found = pieces(Token("run", 1, -1, first, first + count), steps)
    sizes = [piece.stop_step - piece.first_step for piece in found]
    assert [step for piece in found for step in range(piece.first_step, piece.stop_step)] == [
        *range(first, first + count)
    ]
    assert len(sizes) == -(-count // steps)
    assert max(sizes) - min(sizes) <= 1


def test_nodes_on_one_machine_are_told_by_the_addresses_of_their_workers() -> None:
    def counts(*workers: str) -> list[int]:
        return Tasks(None, workers, "run", 1.0).nodes_by_machine()  # type: ignore[arg-type]

    assert counts("tcp://10.0.0.1:3", "tls://10.0.0.2:4", "tcp://10.0.0.1:5") == [2, 1, 2]
    assert counts("inproc://10.0.0.1/7/1", "inproc://10.0.0.1/7/4") == [2, 2]
