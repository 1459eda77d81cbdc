"""What a worker becomes when nodes may live on it."""

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from daskps.device.memory import keep_freed_memory
from daskps.device.pool import NICENESS
from daskps.driver.dask import local_workers
from daskps.node.dask import EXECUTORS, LOW_PRIORITY, enter
from daskps.wire.link import Link
from daskps.wire.transport import ListenOptions


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def niceness_in_link() -> tuple[int, int]:
    """Of the thread that carries messages, and of the one that serves rows."""
    link = Link(ListenOptions(), alone=True)
    try:
        found: Future[int] = Future()
        link._loop.call(lambda: found.set_result(niceness()))
        return found.result(), link.run_in_owner_thread(niceness)
    finally:
        link.close()


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_threads_that_work_ahead_let_training_and_messages_go_first() -> None:
    with local_workers(1, processes=False) as client:
        client.run(enter, "run")
        (worker,) = client.cluster.workers.values()
        executors: dict[str, ThreadPoolExecutor] = worker.executors
        found = {name: executors[f"daskps-{name}"].submit(niceness).result() for name in EXECUTORS}
        messages, owner = executors["daskps-control"].submit(niceness_in_link).result()
    here = niceness()
    ahead = max(here, NICENESS)
    assert found == {name: ahead if name in LOW_PRIORITY else here for name in EXECUTORS}
    assert (messages, owner) == (here, ahead)


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_freed_memory_can_be_kept() -> None:
    assert keep_freed_memory()
