"""A run that is left with a cluster is found again by name, can be stopped, and tells its outcome."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import daskps
from daskps.cluster.plugin import THREADS

JOB: dict[str, Any] = {
    "data": {"format": "synthetic", "synthetic": {"examples": 4_000, "slots": 3, "keys_per_slot": 500}},
    "model": {"hidden": [8]},
    "train": {"minibatch_examples": 500, "batch_examples": 500},
    "budget": {"memory_bytes": "16MB"},
    "cluster": {"partitions": 2},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=1, processes=False, threads_per_worker=THREADS, memory_limit=0, dashboard_address=":0"
    ) as cluster:
        yield cluster


def test_whoever_connects_finds_the_run_and_its_outcome(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster, set_as_default=False) as client:
        daskps.submit({**JOB, "out": str(tmp_path / "m")}, client, name="left")
    with Client(cluster, set_as_default=False) as other:
        run = daskps.find("left", other)
        result = run.result()
        assert run.status()["position"] == result["position"] == 4_000
    with daskps.open_model(result["directory"]) as model:
        assert model.snapshot.id == result["snapshot"]


def test_a_run_that_is_stopped_leaves_a_snapshot(cluster: LocalCluster, tmp_path: Path) -> None:
    long = {"format": "synthetic", "synthetic": {"examples": 100_000_000, "slots": 3, "keys_per_slot": 500}}
    with Client(cluster, set_as_default=False) as client:
        run = daskps.submit({**JOB, "data": long, "out": str(tmp_path / "m")}, client, name="long")
        while run.status()["position"] == 0:
            pass
        with pytest.raises(daskps.DaskpsError, match="under way"):
            daskps.submit({**JOB, "out": str(tmp_path / "other")}, client, name="long")
        run.stop()
        result = run.result()
        assert 0 < result["position"] < 100_000_000
    with daskps.open_model(tmp_path / "m") as model:
        assert model.snapshot.draft.position == result["position"]


def test_an_unknown_name_lists_the_known_ones(cluster: LocalCluster) -> None:
    with Client(cluster, set_as_default=False) as client, pytest.raises(daskps.DaskpsError, match="left"):
        daskps.find("nobody", client)
