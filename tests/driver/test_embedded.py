"""The cluster that needs no set-up: what it leaves alone, from its first moment to its last."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster, get_client
from distributed.batched import BatchedSend

from daskps.driver.dask import REST_SECONDS, DaskBackend, client_for, local_workers, run_blocking
from daskps.node.stages import Request

SLOW_SECONDS = 0.4  # between two messages of a connection: longer than all else takes that happens when a run ends


@pytest.mark.parametrize("at_address", [False, True])
def test_no_connection_waits_to_send_when_the_event_loop_ends(
    at_address: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask's wait ends with a TimeoutError, which a loop that ended in that moment would write to stderr."""
    made: list[BatchedSend] = []
    start = BatchedSend.start

    def note(self: BatchedSend, comm: Any) -> None:
        made.append(self)
        start(self, comm)

    monkeypatch.setattr("daskps.driver.dask.REST_SECONDS", SLOW_SECONDS + 10 * REST_SECONDS)
    options = {"dashboard_address": None, "scheduler_kwargs": {"dashboard_address": ":0"}}
    with LocalCluster(n_workers=0, processes=False, protocol="tcp", **options) as cluster:
        monkeypatch.setattr(BatchedSend, "start", note)
        with client_for(1, cluster.scheduler_address if at_address else None) as client:
            mine = [client.scheduler_comm] if at_address else [*made]
            for one in mine:
                one.interval = SLOW_SECONDS
            client.log_event("daskps-test", 0)
        assert [one for one in mine if one.next_deadline is not None and not one.stopped.is_set()] == []


def test_a_worker_that_is_still_importing_does_not_end_on_ctrl_c() -> None:
    """A terminal sends it to the whole process group at any moment, also to processes that Python is starting."""
    struck: list[int] = []
    before = set(psutil.Process().children(recursive=True))

    def strike() -> None:
        while not struck:
            for child in set(psutil.Process().children(recursive=True)) - before:
                if "spawn_main" in " ".join(child.cmdline()):
                    child.send_signal(signal.SIGINT)
                    struck.append(child.pid)

    thread = threading.Thread(target=strike)
    thread.start()
    with local_workers(1, processes=True) as client:
        thread.join()
        for _ in range(2):  # and at any later moment
            assert [*client.run(os.getpid).values()] == struck
            os.kill(struck[0], signal.SIGINT)


def test_clients_of_tasks_end_with_their_cluster_also_where_another_one_lives(cluster: Client) -> None:
    """Dask closes them with the last worker of a process only; `cluster` has one."""
    with local_workers(1, processes=False) as client:
        assert client.submit(lambda: get_client().status).result() == "running"
        (used,) = client.run(lambda dask_worker: dask_worker._client).values()
    assert used.status == "closed"


def test_a_result_that_does_not_come_in_time_can_be_fetched_later(cluster: Client) -> None:
    """Dask's client would have no result any more after a request that was cancelled while it waited for its turn."""
    backend = DaskBackend(cluster, 30.0)
    task = backend.submit(*backend.present(), Request.HOLDING, "run", 0, "/no/such/model")

    turns = cluster._gather_semaphore  # five
    for _ in range(5):
        cluster.sync(turns.acquire)
    try:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                run_blocking(backend.fetch(task, 0.2))
    finally:
        for _ in range(5):
            cluster.loop.add_callback(turns.release)
    assert run_blocking(backend.fetch(task, 30.0)) is None
    assert cluster.submit(lambda: 5).result(timeout=30) == 5
