"""A run that is left with a cluster is found again by name, can be stopped, and tells its outcome."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import daskps
from daskps.driver.driver import Outcome
from daskps.reports import Progress
from daskps.storage.model_directory import ModelDirectory
from tests.clusters import cluster_in_process

submitting = sys.modules["daskps.api"]  # in the package its name is the function's
LONG = {"format": "synthetic", "synthetic": {"examples": 100_000_000, "slots": 3, "keys_per_slot": 500}}
JOB: dict[str, Any] = {
    "data": {"format": "synthetic", "synthetic": {"examples": 4_000, "slots": 3, "keys_per_slot": 500}},
    "model": {"hidden": [8]},
    "train": {"minibatch_examples": 500, "batch_examples": 500},
    "budget": {"memory_bytes": "16MB"},
    "cluster": {"partitions": 2},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with cluster_in_process(2, dashboard=True) as cluster:
        yield cluster


def test_whoever_connects_finds_the_run_and_its_outcome(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster, set_as_default=False) as client:
        daskps.submit({**JOB, "out": str(tmp_path / "m")}, client, name="left")
    with Client(cluster, set_as_default=False) as other:
        run = daskps.find("left", other)
        result = run.result()
        assert run.status()["position"] == result["position"] == 4_000
        assert (run.status()["state"], result["stopped"]) == ("finished", False)
    with daskps.open_model(result["directory"]) as model:
        assert model.snapshot.id == result["snapshot"]


def test_a_run_that_is_stopped_leaves_a_snapshot(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster, set_as_default=False) as client:
        run = daskps.submit({**JOB, "data": LONG, "out": str(tmp_path / "m")}, client, name="long")
        while run.status()["position"] == 0:
            pass
        with pytest.raises(daskps.DaskpsError, match="under way"):
            daskps.submit({**JOB, "out": str(tmp_path / "other")}, client, name="long")
        run.stop()
        result = run.result()
        assert 0 < result["position"] < 100_000_000
        assert (run.status()["state"], result["stopped"]) == ("stopped", True)
    with daskps.open_model(tmp_path / "m") as model:
        assert model.snapshot.draft.position == result["position"]


@pytest.mark.parametrize("ending", ["stopped", "stopped early", "finished"])
def test_the_state_tells_a_run_that_waits_from_one_that_trains(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    workers_come, batch_done, end = threading.Event(), threading.Event(), threading.Event()

    def train(job: Any, *, on_progress: Any, **_: Any) -> Outcome:
        workers_come.wait()
        progress = Progress(100 if ending == "finished" else 5, 100, 0, stopped_early=ending == "stopped early")
        on_progress(progress)
        batch_done.set()
        end.wait()
        return Outcome(job.out, None, progress)

    monkeypatch.setattr(submitting, "train", train)
    with Client(cluster, set_as_default=False) as client:
        run = daskps.submit({**JOB, "out": str(tmp_path)}, client, name=ending)
        states = [run.status()["state"]]
        workers_come.set()
        batch_done.wait()
        states.append(run.status()["state"])
        end.set()
        result = run.result()
        states.append(run.status()["state"])
    assert states == ["waiting", "running", "stopped" if ending == "stopped" else "finished"]
    assert (result["stopped"], result["stopped_early"]) == (ending == "stopped", ending == "stopped early")


def test_an_unknown_name_lists_the_known_ones(cluster: LocalCluster) -> None:
    with Client(cluster, set_as_default=False) as client, pytest.raises(daskps.DaskpsError, match="left"):
        daskps.find("nobody", client)


def test_runs_of_two_models_share_a_cluster_that_has_workers_for_both(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster, set_as_default=False) as client:
        long = daskps.submit({**JOB, "data": LONG, "out": str(tmp_path / "long")}, client, name="one")
        while long.status()["position"] == 0:
            pass
        short = daskps.submit({**JOB, "out": str(tmp_path / "short")}, client, name="another")
        assert short.result()["position"] == 4_000
        long.stop()
        assert long.result()["snapshot"].startswith("000001-")  # never disturbed: of its first incarnation


def test_what_a_run_raises_is_final(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("label,a\n" + "1,x\n" * 600 + "seven,x\n")
    bad = {"format": "csv", "paths": [str(tmp_path / "bad.csv")]}
    with Client(cluster, set_as_default=False) as client:
        run = daskps.submit({**JOB, "data": bad, "slots": [{"name": "a"}], "out": str(tmp_path / "m")}, client)
        with pytest.raises(daskps.DaskpsError, match="line 602"):
            run.result()
        assert run.status()["state"] == "failed"
    assert ModelDirectory(str(tmp_path / "m")).state().incarnation == 1


def test_a_driver_whose_result_was_lost_with_its_worker_tells_it_again(cluster: LocalCluster, tmp_path: Path) -> None:
    job = {**JOB, "out": str(tmp_path / "m")}
    with Client(cluster, set_as_default=False) as client:
        result = daskps.submit(job, client, name="over").result()
        assert submitting._drive_with(client, job, "over", 0.0) == result  # what Dask then runs
    assert ModelDirectory(str(tmp_path / "m")).state().incarnation == 1


def test_a_scheduler_that_is_slow_to_say_whether_to_stop_ends_no_run(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise TimeoutError

    def train(job: Any, *, should_stop: Any, **_: Any) -> Outcome:
        monkeypatch.setattr("distributed.Variable.get", late)
        assert not should_stop()
        return Outcome(job.out, None, Progress(0, 0, -1))

    monkeypatch.setattr(submitting, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(submitting, "train", train)
    with Client(cluster, set_as_default=False) as client:
        for kind in ("outcome", "begun"):
            submitting._variable("slow", kind, client).set(None)
        assert submitting._drive_with(client, {**JOB, "out": str(tmp_path)}, "slow", 0.0)["position"] == 0


def test_a_driver_that_was_lost_with_its_worker_waits_for_another_one(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def train(job: Any, *, worker_seconds: float, **_: Any) -> Outcome:
        waits.append(worker_seconds)
        raise KeyboardInterrupt  # the worker is killed

    monkeypatch.setattr(submitting, "train", train)
    with Client(cluster, set_as_default=False) as client:
        for kind in ("outcome", "begun"):
            submitting._variable("lost", kind, client).set(None)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                submitting._drive_with(client, {**JOB, "cluster": {"wait_seconds": 77.0}}, "lost", 5.0)
    assert waits == [5.0, 77.0]
