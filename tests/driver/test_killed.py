"""kill -9 at any moment, of a worker or of the client: the run ends with the bits of a run that was left alone.

Four kills by default; 50 with `pytest tests/driver/test_killed.py -m slow`, on a cluster that has no worker to
spare, so that a lost one must come back first.
"""

import itertools
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from distributed import Client

from daskps.config import make_job
from daskps.driver import driver
from daskps.driver.dask import run_job
from daskps.reports import Progress
from daskps.storage.model_directory import ModelDirectory
from daskps.storage.record import read_record
from tests.driver.helpers import (
    CHECKED,
    FEW,
    GREEDY,
    SHORT,
    SMALL,
    Alone,
    Settings,
    Trained,
    merged,
    model_bits,
    worker_processes,
)

Kill = tuple[str, float]  # whom, and after which share of the run's time


def kills(seed: int) -> Iterator[Kill]:
    """Without end: of a worker and of the client in turn."""
    rng = random.Random(seed)
    for whom in itertools.cycle(("worker", "client")):
        yield whom, rng.random()


def job_settings(path: Path) -> Settings:
    return merged(SMALL, FEW, CHECKED, SHORT, {"out": str(path)})


def as_client(address: str | None, settings: Settings) -> None:
    """A process whose client trains."""
    run_job(make_job(settings), client=address)


def start_client(address: str | None, settings: Settings) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.driver.test_killed"])  # importing daskps takes longer than the run
    process = context.Process(target=as_client, args=(address, settings))
    process.start()
    return process


def run_seconds(client: Client, path: Path) -> float:
    """What such a run takes here when it is left alone, from opening to closing, and not for the first time."""
    for name in ("first", "second"):
        started = time.monotonic()
        run_job(make_job(job_settings(path / name)), client=client)
    return time.monotonic() - started


def run_and_kill(client: Client, kill: Kill, seconds: float, path: Path) -> bool:
    """Train with a kill on the way, and once more if it was the client's; whether anybody was killed."""
    (whom, moment), settings = kill, job_settings(path)
    killed: list[int] = []
    if whom == "client":
        process = start_client(client.scheduler.address, settings)
        time.sleep(moment * seconds)
        process.kill()
        process.join()
        killed += [pid for pid in (process.pid,) if process.exitcode == -signal.SIGKILL and pid is not None]
        run_job(make_job(settings), client=client)
        return bool(killed)
    processes = client.run(os.getpid)
    victim = processes[sorted(processes)[round(moment * 1000) % 2]]

    def strike() -> None:
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)

    timer = threading.Timer(moment * seconds, strike)
    timer.start()
    try:
        run_job(make_job(settings), client=client)
    finally:
        struck = bool(killed)
        timer.cancel()
        timer.join()
    return struck


def check_record(path: Path, metrics: dict[str, float], nodes: int = 2) -> None:
    """Every batch is in the record once, as its last incarnation trained it."""
    lines = list(read_record(path, "batch"))
    assert [line["batch"] for line in lines] == [*range(len(lines))]
    assert [line["position"] for line in lines] == [*range(500, lines[-1]["stop_position"] + 1, 500)]
    assert lines[-1]["metrics"] == metrics
    lives = [line["incarnation"] for line in lines]
    assert lives == sorted(lives)
    for line in lines:
        assert {node for node, *_ in line["stages"]} == {*range(nodes)}


@pytest.fixture(scope="module")
def seconds(workers: Client, tmp_path_factory: pytest.TempPathFactory) -> float:
    return run_seconds(workers, tmp_path_factory.mktemp("left-alone"))


@pytest.mark.parametrize("kill", list(itertools.islice(kills(1), 4)), ids=str)
def test_a_killed_run_ends_with_the_same_bits(
    kill: Kill, workers: Client, seconds: float, alone: Alone, tmp_path: Path
) -> None:
    workers.wait_for_workers(4)
    run_and_kill(workers, kill, seconds, tmp_path / "killed")
    assert model_bits(tmp_path / "killed") == alone()[1]
    check_record(tmp_path / "killed", alone()[0].metrics)


def test_a_killed_run_goes_on_from_its_last_snapshot_by_time(alone: Alone, tmp_path: Path) -> None:
    """A process with its own node, killed -9 once there is a snapshot by time; a hundredth of a second is due often."""
    longer: Settings = {"data": {"synthetic": {"examples": 40_000}}}
    settings = merged(SMALL, FEW, longer, {"out": str(tmp_path / "m"), "train": {"batch_examples": 500}})
    soon = merged(settings, {"train": {"snapshot_every_minutes": 0.01 / 60}})
    process, directory = start_client(None, soon), ModelDirectory(str(tmp_path / "m"))
    while directory.state().last is None:
        assert process.is_alive()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    found = directory.snapshot()
    assert found is not None
    assert 0 < found.draft.position < 40_000
    assert run_job(make_job(settings)).progress.examples == 40_000 - found.draft.position
    assert model_bits(tmp_path / "m") == alone(longer)[1]
    check_record(tmp_path / "m", alone(longer)[0].metrics, nodes=1)


def test_a_killed_run_with_early_stopping_leaves_the_same_best_model(trained: Trained, tmp_path: Path) -> None:
    """Killed -9 once its best snapshot is there, and again and again; then resumed to the end."""
    path = tmp_path / "m"
    greedy = merged(GREEDY, {"train": {"keep_snapshots": 1, "snapshot_every_minutes": 0, "batch_examples": 500}})
    whole, other = trained(greedy)
    settings, directory = merged(SMALL, greedy, {"out": str(path)}), ModelDirectory(str(path))
    for _ in range(3):
        before = directory.state().index
        process = start_client(None, settings)
        while directory.state().index < before + 2 and process.is_alive():  # its incarnation, and one thing more
            pass
        process.kill()
        process.join()
    last = run_job(make_job(settings))
    assert last.progress.stopped_early
    assert last.progress.validations == whole.progress.validations
    assert model_bits(path) == model_bits(other)
    assert directory.state().live.index(str(directory.state().last)) == 0
    assert len(directory.state().live) == 2


HOLD_LOCK = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
while True:  # the node that had it is killed any moment
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except OSError:
        pass
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_lock_that_outlives_its_node_is_waited_for(
    workers: Client, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes a partition's lock when a worker is killed, as a file server keeps those of a dead machine.

    It lets go when the run has met the lock more often than it may be lost.
    """
    workers.wait_for_workers(4)
    monkeypatch.setattr(driver, "PAUSE_SECONDS", 0.2)
    holders: list[subprocess.Popen[str]] = []
    met: list[str] = []

    def kill(progress: Progress) -> None:
        if progress.batch == 3 and not holders:
            lock = tmp_path / "m" / "tables" / "main" / "partition-00000" / "lock"
            command = [sys.executable, "-c", HOLD_LOCK, str(lock)]
            holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            processes = workers.run(os.getpid)
            os.kill(processes[sorted(processes)[0]], signal.SIGKILL)
            assert holders[0].stdout is not None
            assert holders[0].stdout.readline() == "held\n"

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is writing to this partition" in record.getMessage():
                met.append(record.getMessage())
            if len(met) == 4 and holders[0].poll() is None:
                holders[0].communicate("let go\n")

    logger, handler = logging.getLogger("daskps.driver"), Counting()
    logger.addHandler(handler)
    try:
        settings = merged(job_settings(tmp_path / "m"), {"cluster": {"restarts": 1}})
        outcome = run_job(make_job(settings), client=workers, on_progress=kill)
    finally:
        logger.removeHandler(handler)
        for holder in holders:
            holder.kill()
            holder.wait()
    assert len(met) >= 4
    assert outcome.progress.restarts <= 1
    assert model_bits(tmp_path / "m") == alone()[1]


@pytest.fixture(scope="module")
def pair() -> Iterator[Client]:
    with worker_processes(2) as client:
        yield client


@pytest.mark.slow
def test_fifty_kills(pair: Client, alone: Alone, tmp_path: Path) -> None:
    seconds, struck = run_seconds(pair, tmp_path), 0
    for number, kill in enumerate(itertools.islice(kills(2), 100)):  # a run may be over before its moment has come
        pair.wait_for_workers(2)
        struck += run_and_kill(pair, kill, seconds, tmp_path / str(number))
        assert model_bits(tmp_path / str(number)) == alone()[1], kill
        check_record(tmp_path / str(number), alone()[0].metrics)
        if struck == 50:
            break
    assert struck == 50
