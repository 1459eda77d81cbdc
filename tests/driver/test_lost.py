"""Who may be lost, and who takes over: a nanny, a submitted job's client, the worker that its driver runs on.

Run with `python -m pytest tests/driver/test_lost.py -m slow`; tests/test_submit.py has a client that just leaves.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import daskps
from daskps.config import make_job
from daskps.driver.dask import run_job
from daskps.reports import Progress
from tests.driver.helpers import (
    CHECKED,
    FEW,
    SHORT,
    SMALL,
    WORKERS,
    Alone,
    Processes,
    Settings,
    merged,
    model_bits,
    started_by_hand,
)

pytestmark = pytest.mark.slow


def settings_for(path: Path) -> Settings:
    return merged(SMALL, FEW, CHECKED, SHORT, {"out": str(path)})


def submit_and_wait(address: str, settings: Settings, name: str, submitted: Any) -> None:
    """A process whose client leaves a job with the cluster."""
    with Client(address, set_as_default=False) as client:
        daskps.submit(settings, client, name=name)
        submitted.set()
        daskps.find(name, client).result()


def submit_elsewhere(client: Client, settings: Settings, name: str) -> None:
    """Submit from another process, and kill that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.driver.test_lost"])
    submitted = context.Event()
    process = context.Process(target=submit_and_wait, args=(client.scheduler.address, settings, name, submitted))
    process.start()
    submitted.wait()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_submitted_run_outlives_its_client(workers: Client, alone: Alone, tmp_path: Path) -> None:
    workers.wait_for_workers(4)
    submit_elsewhere(workers, settings_for(tmp_path / "m"), "orphan")
    assert daskps.find("orphan", workers).result()["position"] == 4_000
    assert model_bits(tmp_path / "m") == alone()[1]


def kill_own_worker_once(marker: str) -> None:
    """Runs where the driver does: ends its worker's process."""
    if not os.path.exists(marker):
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_submitted_run_outlives_the_worker_of_its_driver(workers: Client, alone: Alone, tmp_path: Path) -> None:
    workers.wait_for_workers(WORKERS)
    just_enough: Settings = {"cluster": {"nodes": WORKERS}}
    run = daskps.submit(merged(settings_for(tmp_path / "m"), just_enough), workers, name="driverless")
    while run.status()["batch"] < 2:
        pass
    (at,) = workers.who_has([run.future]).values() or [()]
    processing = {key: worker for worker, keys in workers.processing().items() for key in keys}
    victim = at[0] if at else next(worker for key, worker in processing.items() if "daskps-driver" in str(key))
    with contextlib.suppress(OSError):
        workers.run(kill_own_worker_once, str(tmp_path / "killed"), workers=[victim])
    assert run.result()["position"] == 4_000
    assert model_bits(tmp_path / "m") == alone()[1]


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[tuple[str, Processes]]:
    """A scheduler and three workers; each nanny is a process."""
    with started_by_hand(tmp_path, 3) as started:
        yield started


def test_a_run_on_workers_started_by_hand_outlives_a_nanny(
    by_hand: tuple[str, Processes], alone: Alone, tmp_path: Path
) -> None:
    address, (_, *nannies) = by_hand
    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(3)
        parents = client.run(os.getppid)
        lost: list[int] = []

        def lose_one(progress: Progress) -> None:
            if progress.batch == 2 and not lost:
                lost.append(parents[sorted(parents)[0]])
                os.kill(lost[0], signal.SIGKILL)

        assert {nanny.pid for nanny in nannies} == set(parents.values())
        outcome = run_job(make_job(settings_for(tmp_path / "m")), client=address, on_progress=lose_one)
        assert lost
        assert outcome.progress.restarts == 1
    assert model_bits(tmp_path / "m") == alone()[1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["gone", "stuck"])
def test_a_run_whose_scheduler_is_lost_says_so_and_is_resumed_by_hand(
    how: signal.Signals, by_hand: tuple[str, Processes], workers: Client, alone: Alone, tmp_path: Path
) -> None:
    address, (scheduler, *_) = by_hand
    settings = merged(settings_for(tmp_path / "m"), {"cluster": {"wait_seconds": 5.0}})

    def lose_scheduler(progress: Progress) -> None:
        if progress.batch == 2:
            scheduler.send_signal(how)

    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(3)
        with pytest.raises(daskps.DaskpsError, match=r"scheduler is gone, or stuck"):
            run_job(make_job(settings), client=client, on_progress=lose_scheduler)
        scheduler.kill()  # a client that closes waits for a scheduler that is stuck
    for process in by_hand[1]:
        process.kill()
        process.wait()
    workers.wait_for_workers(4)
    run_job(make_job(settings), client=workers)
    assert model_bits(tmp_path / "m") == alone()[1]
