"""Small jobs, clusters to run them on, and the contents of a trained model, bit for bit."""

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
from distributed import Client

from daskps.device.pool import ComputePool
from daskps.driver.dask import local_workers
from daskps.driver.driver import Outcome
from daskps.node.dask import THREADS
from daskps.reports import Progress
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
SHORT: Settings = {"train": {"snapshot_every_batches": 2, "batch_examples": 500}, "cluster": {"nodes": 2}}
GREEDY: Settings = {
    "data": {"synthetic": {"examples": 2_000}, "validation_rows": 1_000},
    "tables": {"main": {"optimizer": {"kind": "adagrad", "learning_rate": 0.5}}},
    "train": {"epochs": 6, "early_stopping_patience": 2, "keep_snapshots": 1, "minibatch_examples": 250},
}
FRAME_ROWS = 1_500  # of the fixture `frame`
SLOTS = [{"name": "user"}, {"name": "ad", "table": "ads"}, {"name": "price", "kind": "dense"}]
TABLES = {"main": {"dimension": 4}, "ads": {"dimension": 2, "optimizer": {"kind": "sgd"}}}


def merged(*layers: Settings) -> Settings:
    """Return all settings in one; later ones win, group by group."""
    result: Settings = {}
    for layer in layers:
        for name, value in layer.items():
            known = result.get(name)
            result[name] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def model_rows(path: Path, table: str = "main") -> tuple[np.ndarray, np.ndarray]:
    """Return all keys of the last snapshot, ascending, and their rows."""
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
    """Return a hash of everything that was learned: rows of all tables, dense network, optimizer state, metrics."""
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


def job_of(format: str, paths: list[str]) -> Settings:
    """Return a job that reads the fixture `frame` from files, or as a frame."""
    return {"data": {"format": format, "paths": paths, "synthetic": None}, "slots": SLOTS, "tables": TABLES}


def stopper(batches: int) -> dict[str, Any]:
    """Return options of `train` that stop it after `batches` batches."""
    seen: list[int] = []

    def note(progress: Progress) -> None:
        seen.append(progress.batch)

    return {"on_progress": note, "should_stop": lambda: len(seen) >= batches}


@contextlib.contextmanager
def worker_processes(count: int, **options: Any) -> Iterator[Client]:
    """Start a cluster of `count` worker processes, each with a nanny that starts it again."""
    with local_workers(count, processes=True, **options) as client:
        yield client


Processes = list["subprocess.Popen[bytes]"]


@contextlib.contextmanager
def started_by_hand(
    folder: Path, workers: int, security: Sequence[str] = (), inside: Sequence[Sequence[str]] = ()
) -> Iterator[tuple[str, Processes]]:
    """Start a scheduler and `workers` nannies, each with one worker, as the message of `NodePlugin` says.

    Yields the scheduler's address and all processes, the scheduler's first. `security` are options of both commands.
    `inside` has for each worker a command that starts its process elsewhere, for example in another mount namespace.
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
