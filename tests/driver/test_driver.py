"""How a run goes on after a loss, and what it says when it cannot: the driver over workers that are only names."""

import asyncio
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.config import TrainSettings, make_job
from daskps.driver.driver import Failures, Outcome, drive, pieces
from daskps.driver.sizing import SnapshotPace
from daskps.driver.tasks import Tasks, WorkerClaim
from daskps.errors import BackendError, LockedError, PeerError
from daskps.types import BatchId
from tests.driver.helpers import SMALL, Settings, merged


class Names:
    """A cluster whose workers are there as `seen` says, look by look, and are lost whenever a run begins."""

    def __init__(self, *seen: dict[str, float], locked: Container[int] = ()) -> None:
        self.locked = locked  # attempts that meet a lock
        self.seen = list(seen)
        self.begun = 0
        self.now = 0.0
        self.slept: list[float] = []
        self.not_fit: dict[str, str] = {}
        self.others: dict[str, str] = {}  # workers that other runs have

    def present(self) -> dict[str, float]:
        return self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]

    def unfit(self, workers: Collection[str]) -> dict[str, str]:
        return {worker: self.not_fit[worker] for worker in workers if worker in self.not_fit}

    def claim(self, run: str, nodes: int, model: str, fit: Sequence[str]) -> WorkerClaim:
        idle = [worker for worker in fit if worker not in self.others]
        held = {worker: self.others[worker] for worker in fit if worker in self.others}
        return WorkerClaim(tuple(idle[:nodes])) if len(idle) >= nodes else WorkerClaim((), held)

    def prepare(self, run: str, workers: Sequence[str]) -> None:
        self.begun += 1
        if self.begun in self.locked:
            raise LockedError("process 7 is writing to this partition")
        raise PeerError(f"a worker was lost in attempt {self.begun}")

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)

    def time(self) -> float:
        return self.now


def run(
    cluster: Any, seconds: float = 0.0, should_stop: Callable[[], bool] = lambda: False, **settings: Any
) -> Outcome:
    changes: Settings = {"cluster": {"nodes": 2, "wait_seconds": 7.0, **settings}}
    job = make_job(merged(SMALL, changes))
    callbacks: Settings = {"on_progress": lambda _: None, "should_stop": should_stop}
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


def test_a_run_that_waits_for_workers_ends_when_it_is_asked_to_stop() -> None:
    cluster = Names({"a": 0.0})
    with pytest.raises(BackendError, match=r"wants 2 nodes, .* 1 workers\. Waited 5\.\d* s: start"):
        run(cluster, seconds=3600.0, should_stop=lambda: cluster.now > 5)


def test_a_run_without_enough_workers_says_what_was_lost_and_what_is_missing() -> None:
    cluster = Names({"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 30.0})
    with pytest.raises(PeerError, match=r"lost in attempt 1; the job wants 2 nodes, .* 2 workers, 1 of them silent"):
        run(cluster, restarts=3)
    assert cluster.begun == 1
    assert cluster.now == pytest.approx(1.0 + 7.0, abs=0.2)


def test_a_worker_that_is_gone_or_silent_is_named_with_what_the_run_waits_for() -> None:
    cluster: Any = Names({"a": 0.0, "b": 8.0}, {"a": 0.0}, {"a": 0.0, "b": 12.0})
    tasks = Tasks(cluster, ["a", "b"], "run", wait_seconds=7.0)
    tasks.waiting_for = "stage pull to push, batch 5"
    tasks.check_alive()  # as long as its peers may wait for it
    with pytest.raises(PeerError, match="node 1, stage pull to push, batch 5: the worker b is gone"):
        tasks.check_alive()
    with pytest.raises(PeerError, match=r"node 1, stage pull to push, batch 5: the worker b has been silent for 12 s"):
        tasks.check_alive()


def test_a_lock_is_waited_for_as_long_as_for_a_peer_and_does_not_count() -> None:
    cluster = Names({"a": 0.0, "b": 0.0}, locked=range(100))
    with pytest.raises(LockedError, match="process 7"):
        run(cluster, restarts=0, wait_seconds=200.0)
    assert cluster.slept == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 17.0]
    assert cluster.now == 200.0
    cluster = Names({"a": 0.0, "b": 0.0}, locked=range(1, 6))
    with pytest.raises(PeerError, match="lost in attempt 7"):
        run(cluster, restarts=1, wait_seconds=200.0)  # attempt 6 is the first that counts


def test_the_count_of_restarts_begins_again_with_every_new_snapshot_and_pauses_are_at_most_a_minute() -> None:
    failures = Failures(restarts=2, wait_seconds=300.0)
    for number in range(10):
        assert failures.pause_seconds(False, f"{number}", 0.0) == 1.0
        assert failures.pause_seconds(False, f"{number}", 0.0) == 2.0
    assert failures.pause_seconds(False, "9", 0.0) is None
    many = Failures(restarts=5000, wait_seconds=300.0)
    pauses = [many.pause_seconds(False, None, 0.0) for _ in range(5000)]
    assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(pauses[8:]) == {60.0}


@given(first=st.integers(0, 50), count=st.integers(1, 200), steps=st.integers(1, 250))
def test_a_cut_batch_has_as_few_pieces_as_fit_and_even_ones(first: int, count: int, steps: int) -> None:
    found = pieces(BatchId("run", 1, -1, first, first + count), steps)
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


@given(
    minutes=st.floats(0.01, 60),
    batches=st.lists(st.tuples(st.floats(0, 1000), st.booleans(), st.floats(0, 100)), max_size=60),
)
def test_snapshots_by_time_are_as_far_apart_as_is_asked_and_19_times_what_they_take(
    minutes: float, batches: list[tuple[float, bool, float]]
) -> None:
    """Every batch takes a while, may or may not end with a snapshot, and if it does the snapshot takes a while."""
    pace, now, earliest = SnapshotPace(TrainSettings(snapshot_every_minutes=minutes), 0.0), 0.0, 60 * minutes
    for number, (seconds, may, took) in enumerate(batches):
        now += seconds
        assert pace.is_due(number, now) == (now >= earliest)
        if now >= earliest and may:
            pace.begin()
            assert not pace.is_due(number + 1, now + 1e9)  # one at a time
            now += took
            pace.publish(now, took)
            earliest = now + max(60 * minutes, 19 * took)


@given(every=st.integers(1, 7), minutes=st.floats(0, 1), batches=st.integers(1, 50))
def test_snapshots_every_so_many_batches_ask_no_clock(every: int, minutes: float, batches: int) -> None:
    pace, taken = SnapshotPace(TrainSettings(snapshot_every_batches=every, snapshot_every_minutes=minutes), 0.0), []
    for batch in range(batches):
        if pace.is_due(batch, 1e9 * batch):
            pace.begin()
            taken.append(batch)
            pace.publish(1e9 * batch, 1e6)
    assert taken == [batch for batch in range(batches) if (batch + 1) % every == 0]


def test_a_job_that_says_nothing_of_snapshots_has_one_every_five_minutes() -> None:
    pace = SnapshotPace(TrainSettings(), now=1_000.0)
    assert not pace.is_due(0, 1_299.0)
    assert pace.is_due(1, 1_300.0)


def test_without_minutes_and_batches_no_snapshot_is_due_before_the_end() -> None:
    pace = SnapshotPace(TrainSettings(snapshot_every_minutes=0), 0.0)
    pace.publish(1.0, 0.0)
    assert not pace.is_due(0, 1e12)
