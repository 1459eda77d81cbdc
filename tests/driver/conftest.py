"""Fixtures that train a small job on one node or on many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from distributed import Client

from daskps.config import make_job
from daskps.driver.dask import local_workers, run_job
from daskps.driver.driver import Outcome
from tests.driver.helpers import (
    CHECKED,
    FEW,
    FRAME_ROWS,
    SMALL,
    WORKERS,
    Alone,
    Settings,
    Trained,
    merged,
    model_bits,
    worker_processes,
)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Client]:
    """One in-process cluster for all small runs: making one takes longer than most of them."""
    with local_workers(1, processes=False) as client:
        yield client


@pytest.fixture
def trained(tmp_path: Path, cluster: Client) -> Callable[..., tuple[Outcome, Path]]:
    """Train SMALL with changes; return the outcome and the model's directory, a new one for each call."""
    runs = iter(range(1_000_000))

    def run(*changes: Settings, out: Path | None = None, **options: Any) -> tuple[Outcome, Path]:
        path = out or tmp_path / f"model{next(runs)}"
        job = make_job(merged(SMALL, *changes, {"out": str(path)}))
        return run_job(job, client=cluster, **options), path

    return run


@pytest.fixture(scope="session")
def workers() -> Iterator[Client]:
    """Four worker processes; one cluster for all tests, as it takes seconds to make."""
    with worker_processes(WORKERS) as client:
        yield client


@pytest.fixture
def on_nodes(tmp_path: Path, workers: Client) -> Trained:
    """Train SMALL with changes on `nodes` nodes."""
    runs = iter(range(1_000))

    def run(nodes: int, *changes: Settings, out: Path | None = None, **options: Any) -> tuple[Outcome, Path]:
        workers.wait_for_workers(WORKERS)  # an earlier test may have lost one
        path = out or tmp_path / f"nodes{next(runs)}"
        job = make_job(merged(SMALL, FEW, CHECKED, *changes, {"out": str(path), "cluster": {"nodes": nodes}}))
        return run_job(job, client=workers, **options), path

    return run


@pytest.fixture(scope="session")
def known() -> dict[str, tuple[Outcome, str]]:
    """Outcome and bits of one node by changes to the job, kept for all tests."""
    return {}


@pytest.fixture
def alone(trained: Trained, known: dict[str, tuple[Outcome, str]]) -> Alone:
    """Return outcome and bits of one node in this process; each job is trained once for all tests."""

    def run(*changes: Settings) -> tuple[Outcome, str]:
        if repr(changes) not in known:
            outcome, path = trained(FEW, *changes)
            known[repr(changes)] = outcome, model_bits(path)
        return known[repr(changes)]

    return run


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Clicks that depend on the user, with strings, integers and a dense feature; `job_of` makes jobs of it."""
    rng = np.random.default_rng(5)
    users, ads = rng.integers(0, 200, FRAME_ROWS), rng.integers(0, 50, FRAME_ROWS)
    clicks = rng.random(FRAME_ROWS) < 1 / (1 + np.exp(1.0 - 2.0 * (users % 2)))
    return pd.DataFrame(
        {
            "label": clicks.astype(int),
            "user": [f"u{user}" for user in users],
            "ad": ads,
            "price": rng.random(FRAME_ROWS).astype(np.float32),
        }
    )
