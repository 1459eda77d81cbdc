"""kill -9 at any moment, of a worker or of the client: the run ends with the bits of a run that was left alone.

Four kills by default; 50 with `python -m pytest tests/flow/test_killed.py -m slow`, on a cluster that has no worker to
spare, so that a lost one must come back first.
"""

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from distributed import Client

from daskps.config import make_job
from daskps.flow.train import train
from tests.flow.conftest import CHECKED, FEW, SMALL, Alone, Settings, merged, model_bits, worker_processes

SHORT: Settings = {"train": {"snapshot_every_batches": 2, "batch_examples": 500}, "cluster": {"nodes": 2}}

Kill = tuple[str, float]  # whom, and after which share of the run's time


def kills(seed: int) -> Iterator[Kill]:
    """Without end: of a worker and of the client in turn."""
    rng = random.Random(seed)
    for whom in itertools.cycle(("worker", "client")):
        yield whom, rng.random()


def job_settings(path: Path) -> Settings:
    return merged(SMALL, FEW, CHECKED, SHORT, {"out": str(path)})


def as_client(address: str, settings: Settings) -> None:
    """A process whose client trains."""
    train(make_job(settings), client=address)


def start_client(address: str, settings: Settings) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.flow.test_killed"])  # importing daskps takes longer than the run
    process = context.Process(target=as_client, args=(address, settings))
    process.start()
    return process


def run_seconds(client: Client, path: Path) -> float:
    """What such a run takes here when it is left alone, from opening to closing, and not for the first time."""
    for name in ("first", "second"):
        started = time.monotonic()
        train(make_job(job_settings(path / name)), client=client)
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
        train(make_job(settings), client=client)
        return bool(killed)
    processes = client.run(os.getpid)
    victim = processes[sorted(processes)[round(moment * 1000) % 2]]

    def strike() -> None:
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)

    timer = threading.Timer(moment * seconds, strike)
    timer.start()
    try:
        train(make_job(settings), client=client)
    finally:
        struck = bool(killed)
        timer.cancel()
        timer.join()
    return struck


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
        if struck == 50:
            break
    assert struck == 50
