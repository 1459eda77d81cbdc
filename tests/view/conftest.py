"""A cluster with a dashboard, and a run on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from distributed import Client, LocalCluster

import daskps
from daskps.driver.driver import Outcome
from tests.clusters import cluster_in_process
from tests.view.helpers import JOB


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with cluster_in_process(1, dashboard=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="session")
def address(cluster: LocalCluster) -> str:
    """Of the dashboard."""
    return str(cluster.dashboard_link).removesuffix("/status")


@pytest.fixture(scope="session")
def outcome(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A finished run."""
    return daskps.train({**JOB, "out": str(tmp_path_factory.mktemp("seen") / "model")}, client=client)
