"""What a worker becomes when nodes may live on it."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributed import Client, LocalCluster

from daskps.backend.memory import keep_freed_memory
from daskps.cluster.plugin import NICENESS, STAGES, THREADS, NodePlugin


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_threads_that_work_ahead_let_training_go_first() -> None:
    with (
        LocalCluster(
            n_workers=1,
            processes=False,
            threads_per_worker=THREADS,
            memory_limit=0,
            dashboard_address=None,
            worker_dashboard_address=None,
            scheduler_kwargs={"dashboard_address": ":0"},
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.register_plugin(NodePlugin())
        (worker,) = cluster.workers.values()
        executors: dict[str, ThreadPoolExecutor] = worker.executors
        found = {stage: executors[f"daskps-{stage}"].submit(niceness).result() for stage in STAGES}
    here = niceness()
    ahead = min(here + NICENESS, 19) if here == 0 else found["read"]
    assert found == {stage: here if stage == "train" else ahead for stage in STAGES}


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_freed_memory_can_be_kept() -> None:
    assert keep_freed_memory()
