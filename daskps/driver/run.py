"""Running of a driver in this process, on any Dask client or on a local cluster that needs no set-up.

Input: a job and optionally a client. Output: an `Outcome`. Without a client, a single node runs in this process, and
several nodes run in processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from typing import Any

import dask.config
from distributed import Client, LocalCluster
from distributed.utils import LoopRunner, sync

from daskps.config import Job, make_job
from daskps.driver.dask import Workers, run_blocking
from daskps.driver.driver import Outcome, drive
from daskps.errors import PeerError
from daskps.node.dask import THREADS
from daskps.reports import Progress

# Dask's configuration for local clusters.
SETTINGS = {
    # After this time a LocalCluster removes a lost worker for good. Its nanny restarts it, so do not remove it.
    "distributed.deploy.lost-worker-timeout": "1 day",
    # Dask samples stacks every 10 ms and ticks every 20 ms, holding the GIL: a tenth of a small run's time.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
}

REST_SECONDS = 0.05  # wait before an event loop ends; longer than the 10 ms after which a Dask connection sends again


@contextlib.contextmanager
def client_for(nodes: int, given: Client | str | None = None, dashboard_address: str | None = None) -> Iterator[Client]:
    """Yield the given client, or one of a new local cluster that is closed afterwards.

    The local cluster has a dashboard if `dashboard_address` is given.
    """
    if isinstance(given, Client):
        yield given
    elif given is not None:
        with event_loop() as loop:
            try:
                client = Client(given, loop=loop, set_as_default=False)
            except OSError as error:
                words = f"no Dask scheduler answers at {given}: {error}; check the address, or start one"
                raise PeerError(words) from None
            with client:
                yield client
    else:
        quiet = {"silence_logs": logging.CRITICAL}  # errors of tasks are raised to the caller; do not log them too
        if nodes > 1 and getattr(multiprocessing.current_process(), "_inheriting", False):
            # This is a worker process that imports the script it was started from, and the script trains on import. A
            # process in this state cannot start processes; its parent reports the error.
            raise SystemExit(1)
        with contextlib.ExitStack() as stack:
            try:
                workers = local_workers(nodes, processes=nodes > 1, dashboard_address=dashboard_address, **quiet)
                client = stack.enter_context(workers)
            except RuntimeError as error:
                if "failed to start" not in str(error):
                    raise
                raise PeerError(
                    f"the processes of {nodes} nodes did not start; a script that trains on more than one node must do "
                    'so under `if __name__ == "__main__":`, because every process imports it'
                ) from None
            yield client


@contextlib.contextmanager
def local_workers(
    count: int, *, processes: bool, dashboard_address: str | None = None, **options: Any
) -> Iterator[Client]:
    """Yield a client of `count` local workers, in this process or each in its own; close them afterwards."""
    with dask.config.set(SETTINGS), event_loop() as loop:
        if processes:
            sync(loop, _block_ctrl_c)
        with (
            LocalCluster(
                n_workers=count,
                processes=processes,
                threads_per_worker=THREADS,
                memory_limit=0,
                loop=loop,
                dashboard_address=dashboard_address,
                worker_dashboard_address=None,
                scheduler_kwargs={"dashboard_address": dashboard_address or ":0"},  # 8787 may be in use
                **options,
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            yield client
            if not processes:
                sync(loop, _close_worker_clients, cluster)


async def _close_worker_clients(cluster: LocalCluster) -> None:
    """Close the clients that tasks on these workers have asked for, such as the reader of a persisted DataFrame.

    Dask leaves them open while another worker lives in this process. They would ask a scheduler that is gone, every two
    seconds, and log an error each time.
    """
    for worker in cluster.workers.values():
        if worker._client is not None:
            await worker._client.close()


@contextlib.contextmanager
def event_loop() -> Iterator[Any]:
    """Yield an event loop in its own thread; close clients and clusters before leaving the context.

    Some of Dask's connections still wait to send again when they are closed. If the loop ended at that moment, asyncio
    would print to stderr that a TimeoutError was never retrieved. So the loop ends REST_SECONDS later.
    """
    runner = LoopRunner()
    runner.start()
    try:
        yield runner.loop
    finally:
        sync(runner.loop, asyncio.sleep, REST_SECONDS)
        runner.stop()


async def _block_ctrl_c() -> None:
    """Block Ctrl-C in all processes started from this event loop, from their first instruction on.

    A terminal sends SIGINT to the whole process group. The driver decides what to do with it, and needs its nodes for
    a last snapshot; workers end when their parent process does. A thread's signal mask is inherited by the threads and
    processes that it starts. This process still gets the signal in its main thread.
    """
    resource_tracker.ensure_running()  # otherwise multiprocessing starts it later, and clears the mask when it does
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


WORKER_SECONDS = 60.0  # wait for workers at the start: a cluster may still be starting them


def _nothing(progress: Progress) -> None:
    """Ignore progress."""


def train(
    job: Job | Mapping[str, Any],
    *,
    client: Client | str | None = None,
    on_progress: Callable[[Progress], None] = _nothing,
    should_stop: Callable[[], bool] = lambda: False,
    frame: Any = None,
    worker_seconds: float = WORKER_SECONDS,
    accept_changed_data: bool = False,
    resume: bool = True,
) -> Outcome:
    """Train `job` to its end, from its last snapshot if its directory has one.

    `client` is a Dask client or a scheduler's address; without one, a local cluster of `cluster.nodes` nodes is created
    and closed afterwards. `on_progress` is called after every batch. When `should_stop()` returns True, the run ends at
    a batch boundary with a snapshot. When a worker is lost, the run goes back to its last snapshot by itself, at most
    `cluster.restarts` times without a new snapshot. `frame` is the Dask DataFrame of a job whose data format is frame.
    `worker_seconds` is how long to wait at the start for enough workers that no other run has.
    `accept_changed_data` goes on although the data before the last snapshot's position has changed; it is recorded.
    Without `resume`, it is an error if the job's directory has a model already, and the model is not changed.
    """
    job = job if isinstance(job, Job) else make_job(dict(job))
    if client is not None:
        job = job.with_whole_paths()
    with client_for(job.cluster.nodes, client) as connected:
        workers, run = Workers(connected, job.cluster.wait_seconds), uuid.uuid4().hex[:12]
        try:
            return run_blocking(
                drive(
                    workers,
                    job,
                    run,
                    on_progress=on_progress,
                    should_stop=should_stop,
                    frame=frame,
                    seconds=worker_seconds,
                    accept_changed_data=accept_changed_data,
                    resume=resume,
                )
            )
        finally:
            workers.release(run)
