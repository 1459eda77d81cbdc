"""Small jobs, and what is in a trained model, down to the bit."""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskps.config import make_job
from daskps.device.pool import ComputePool
from daskps.driver.driver import Outcome
from daskps.driver.run import local_workers, train
from daskps.node.dask import THREADS
from daskps.ssd import TableStore
from daskps.storage.model_directory import ModelDirectory

Settings = dict[str, Any]
Trained = Callable[..., tuple[Outcome, Path]]
Alone = Callable[..., tuple[Outcome, str]]

SMALL: Settings = {
    "data": {
        "format": "synthetic",
        "synthetic": {"examples": 6_000, "slots": 5, "keys_per_bag": 2, "keys_per_slot": 2_000, "seed": 3},
    },
    "tables": {"main": {"dimension": 4, "optimizer": {"kind": "adam", "learning_rate": 0.01}}},
    "model": {"hidden": [16, 8]},
    "train": {"minibatch_examples": 500, "batch_examples": 1_000, "block_examples": 64},
    "cluster": {"partitions": 3},
}

FEW: Settings = {
    "data": {"synthetic": {"examples": 4_000}},
    "budget": {"memory_bytes": "512MB", "hbm_bytes": "512MB"},  # four nodes fit a small machine
    "cluster": {"partitions": 8, "cores": 1},
}
WORKERS = 4
CHECKED: Settings = {"cluster": {"check_replicas": True, "wait_seconds": 60.0}}


def merged(*layers: Settings) -> Settings:
    """Later settings over earlier ones, group by group."""
    result: Settings = {}
    for layer in layers:
        for name, value in layer.items():
            known = result.get(name)
            result[name] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def model_rows(path: Path, table: str = "main") -> tuple[np.ndarray, np.ndarray]:
    """Every key of the last snapshot, ascending, and its row."""
    directory = ModelDirectory(str(path))
    snapshot = directory.snapshot()
    assert snapshot is not None
    keys, rows = [], []
    with (
        ComputePool(1) as pool,
        TableStore.open(path / "tables" / table, pool=pool, snapshot=snapshot.id, read_only=True) as store,
    ):
        for part_keys, part_rows in store.scan():
            keys.append(part_keys)
            rows.append(part_rows)
    order = np.argsort(np.concatenate(keys))
    return np.concatenate(keys)[order], np.concatenate(rows)[order]


def model_bits(path: Path) -> str:
    """A hash of everything that was learned: rows of all tables, dense network, optimizer state, metrics."""
    directory = ModelDirectory(str(path))
    snapshot = directory.snapshot()
    assert snapshot is not None
    digest = hashlib.sha256()
    for table in sorted(entry.name for entry in (path / "tables").iterdir()):
        for array in model_rows(path, table):
            digest.update(np.ascontiguousarray(array).tobytes())
    for name, array in sorted(directory.load(snapshot).items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Client]:
    """One in-process cluster for all small runs: making one takes longer than most of them."""
    with local_workers(1, processes=False) as client:
        yield client


@pytest.fixture
def trained(tmp_path: Path, cluster: Client) -> Callable[..., tuple[Outcome, Path]]:
    """Train SMALL with changes; the outcome and the model's directory. Every call has a directory of its own."""
    runs = iter(range(1_000_000))

    def run(*changes: Settings, out: Path | None = None, **options: Any) -> tuple[Outcome, Path]:
        path = out or tmp_path / f"model{next(runs)}"
        job = make_job(merged(SMALL, *changes, {"out": str(path)}))
        return train(job, client=cluster, **options), path

    return run


@contextlib.contextmanager
def worker_processes(count: int, **options: Any) -> Iterator[Client]:
    """A cluster of so many worker processes, each with a nanny that starts it again."""
    with local_workers(count, processes=True, **options) as client:
        yield client


Processes = list["subprocess.Popen[bytes]"]


@contextlib.contextmanager
def started_by_hand(
    folder: Path, workers: int, security: Sequence[str] = (), inside: Sequence[Sequence[str]] = ()
) -> Iterator[tuple[str, Processes]]:
    """The address of a scheduler, and its process with those of so many nannies, each with a worker.

    They are started as the message of `NodePlugin` says; `security` are options of both commands. `inside` are, by
    worker, commands that run what follows them, somewhere else.
    """
    logs = [(folder / f"{name}.log").open("w+") for name in ("scheduler", *(f"worker{at}" for at in range(workers)))]
    dask = [sys.executable, "-m", "dask"]
    here = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    processes = [subprocess.Popen([*dask, "scheduler", *here, *security], stderr=logs[0])]
    try:
        found = None
        while found is None:
            assert processes[0].poll() is None, (folder / "scheduler.log").read_text()
            logs[0].seek(0)
            found = re.search(r"Scheduler at:\s+(\w+://\S+)", logs[0].read())
        address = found.group(1)
        command = ["worker", address, "--nworkers", "1", "--nthreads", str(THREADS), "--memory-limit", "0"]
        for number in range(workers):
            own = ["--no-dashboard", "--local-directory", str(folder / f"worker{number}")]
            around = inside[number] if inside else ()
            processes.append(subprocess.Popen([*around, *dask, *command, *own, *security], stderr=logs[1 + number]))
        yield address, processes
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait()
        for log in logs:
            log.close()


@pytest.fixture(scope="session")
def workers() -> Iterator[Client]:
    """Four worker processes; one cluster for all tests, as it takes seconds to make."""
    with worker_processes(WORKERS) as client:
        yield client


@pytest.fixture
def on_nodes(tmp_path: Path, workers: Client) -> Trained:
    """Train SMALL with changes on so many nodes."""
    runs = iter(range(1_000))

    def run(nodes: int, *changes: Settings, out: Path | None = None, **options: Any) -> tuple[Outcome, Path]:
        workers.wait_for_workers(WORKERS)  # an earlier test may have lost one
        path = out or tmp_path / f"nodes{next(runs)}"
        job = make_job(merged(SMALL, FEW, CHECKED, *changes, {"out": str(path), "cluster": {"nodes": nodes}}))
        return train(job, client=workers, **options), path

    return run


@pytest.fixture(scope="session")
def known() -> dict[str, tuple[Outcome, str]]:
    """Of one node, by changes; made by whichever test comes first."""
    return {}


@pytest.fixture
def alone(trained: Trained, known: dict[str, tuple[Outcome, str]]) -> Alone:
    """Outcome and bits of one node in this process."""

    def run(*changes: Settings) -> tuple[Outcome, str]:
        if repr(changes) not in known:
            outcome, path = trained(FEW, *changes)
            known[repr(changes)] = outcome, model_bits(path)
        return known[repr(changes)]

    return run
