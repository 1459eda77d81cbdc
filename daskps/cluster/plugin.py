"""What turns a Dask worker into a place where a Node can live: an executor per stage, and Dask's memory manager off.

In: a worker of any Dask cluster. Out: ``worker.executors`` with one single-thread executor per stage (the paper's "one
thread and one bounded queue per stage"), and a place for the Node, whose state outlives the tasks.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import distributed
from distributed.diagnostics.plugin import NannyPlugin, WorkerPlugin

from daskps.backend.memory import keep_freed_memory
from daskps.cluster.priority import step_back
from daskps.errors import BackendError, StaleError

STAGES = ("read", "dedup", "pull", "load", "train", "push", "control")
THREADS = len(STAGES) + 2  # a worker runs at most `nthreads` tasks over all its executors
NAME = "daskps"
AHEAD = ("read", "dedup", "pull", "load", "push")  # stages that no step waits for


class NodePlugin(WorkerPlugin):
    """Holds one Node per worker. Registering it twice changes nothing."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.node: Any = None
        self.opening: str | None = None  # the path of a model, while its node is made

    def setup(self, worker: distributed.Worker) -> None:
        if worker.state.nthreads < THREADS:
            raise BackendError(
                f"the worker {worker.address} has {worker.state.nthreads} threads, a node needs {THREADS} (one per "
                f"stage and two to spare): start it with `dask worker {worker.scheduler.address} --nworkers 1 "
                f"--nthreads {THREADS} --memory-limit 0`; cores to compute with are set in the job (cluster.cores)"
            )
        for stage in STAGES:
            first = step_back if stage in AHEAD else None
            executor = ThreadPoolExecutor(1, thread_name_prefix=f"daskps-{stage}", initializer=first)
            worker.executors[f"daskps-{stage}"] = executor
        keep_freed_memory()
        # A node keeps to its own budgets; Dask would pause or kill it at limits that it does not know of.
        for limit in ("memory_target_fraction", "memory_spill_fraction", "memory_pause_fraction"):
            setattr(worker.memory_manager, limit, False)

    async def teardown(self, worker: distributed.Worker) -> None:
        node, self.node = self.node, None
        if node is not None:  # stages may need the worker's loop to come to their end
            await asyncio.to_thread(node.close)
        for stage in STAGES:
            worker.executors.pop(f"daskps-{stage}").shutdown(wait=False)


class NannyMemoryPlugin(NannyPlugin):
    """Keeps the nanny from killing a node that stays within its budgets."""

    name = f"{NAME}-nanny"
    restart = False

    def setup(self, nanny: distributed.Nanny) -> None:
        nanny.memory_manager.memory_terminate_fraction = False


def plugin_here() -> NodePlugin:
    """The plugin of the worker that runs the calling task."""
    plugin = distributed.get_worker().plugins.get(NAME)
    if not isinstance(plugin, NodePlugin):
        raise StaleError(
            f"no node on the worker {distributed.get_worker().address}: it was started after the run, "
            "or it was lost and restarted; the driver starts the run again from its last snapshot"
        )
    return plugin
