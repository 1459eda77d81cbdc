"""What a worker becomes when nodes may live on it."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from daskps.backend.memory import keep_freed_memory
from daskps.cluster.plugin import NICENESS, STAGES, NodePlugin
from daskps.flow.embedded import local_workers


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_threads_that_work_ahead_let_training_go_first() -> None:
    with local_workers(1, processes=False) as client:
        client.register_plugin(NodePlugin())
        (worker,) = client.cluster.workers.values()
        executors: dict[str, ThreadPoolExecutor] = worker.executors
        found = {stage: executors[f"daskps-{stage}"].submit(niceness).result() for stage in STAGES}
    here = niceness()
    ahead = min(here + NICENESS, 19) if here == 0 else found["read"]
    assert found == {stage: here if stage == "train" else ahead for stage in STAGES}


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_freed_memory_can_be_kept() -> None:
    assert keep_freed_memory()
