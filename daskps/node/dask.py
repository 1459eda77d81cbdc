"""Dask's worker, for a node: one executor per stage, the plugin that holds the node, Dask's memory limits switched off.

Input: a worker of any Dask cluster. Output: ``worker.executors`` with one single-threaded executor per stage (the
paper's "one thread and one bounded queue per stage"), and a plugin that holds the node, whose state outlives the tasks.
Only workers that a run has claimed (`daskps.driver.dask`) are changed. When the run leaves, all of it is undone. No
other module of this folder imports Dask.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import distributed
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.system import MEMORY_LIMIT

from daskps.device.memory import keep_freed_memory, return_freed_memory
from daskps.device.pool import lower_thread_priority
from daskps.errors import StaleError
from daskps.types import Stage
from daskps.wire.transport import ListenOptions

CONTROL = "control"  # executor of all requests that are no stage
EXECUTORS = (*Stage, CONTROL)
THREADS = len(EXECUTORS) + 2  # `nthreads` of a worker: it runs at most that many tasks over all its executors
NAME = "daskps"  # of the plugin
LOW_PRIORITY = tuple(stage for stage in Stage if stage is not Stage.TRAIN)  # they work ahead of training or behind it
MACHINE_BYTES: int = MEMORY_LIMIT  # memory of this machine, or of its container
FRACTIONS = ("memory_target_fraction", "memory_spill_fraction", "memory_pause_fraction")
CLOSE_SECONDS = 60.0  # longest wait for the node of an earlier run to close

_changing: WeakKeyDictionary[Any, asyncio.Lock] = WeakKeyDictionary()  # by worker: lock for entering and leaving runs
# By nanny: its memory_terminate_fraction before, and the owners for which it is switched off.
_spared: WeakKeyDictionary[Any, tuple[Any, set[Any]]] = WeakKeyDictionary()


class NodePlugin(WorkerPlugin):
    """Worker plugin that holds the node and its executors. `owner` is the key of the claim on this worker.

    Tasks reach their worker through it; they use none of Dask's own objects.
    """

    name = NAME

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner
        self.node: Any = None
        self.opening: str | None = None  # path of the model whose node is being opened
        self._executors: dict[str, ThreadPoolExecutor] = {}
        self._fractions: dict[str, Any] = {}
        self._worker: Any = None

    @property
    def address(self) -> str:
        """Address of the worker; it begins with ``inproc`` if that is the user's own process."""
        return str(self._worker.address)

    @property
    def limit_bytes(self) -> int | None:
        """Memory limit that Dask was given for this worker; None without one."""
        limit: int | None = self._worker.memory_manager.memory_limit
        return limit

    def listen_options(self, protocol: str) -> ListenOptions:
        """Return the options for the node's own connections (`cluster.protocol`)."""
        return ListenOptions.of_worker(self._worker, protocol)

    def setup(self, worker: distributed.Worker) -> None:
        """Add the executors and switch off Dask's memory limits."""
        self._worker = worker
        for name in EXECUTORS:
            first = lower_thread_priority if name in LOW_PRIORITY else None
            executor = ThreadPoolExecutor(1, thread_name_prefix=f"daskps-{name}", initializer=first)
            self._executors[f"daskps-{name}"] = executor
        worker.executors.update(self._executors)
        keep_freed_memory()
        # A node keeps its own budgets. Dask would spill, pause or kill at limits that have nothing to do with them.
        for limit in FRACTIONS:
            self._fractions[limit] = getattr(worker.memory_manager, limit)
            setattr(worker.memory_manager, limit, False)

    async def teardown(self, worker: distributed.Worker) -> None:
        """Close the node and undo `setup`."""
        node, self.node = self.node, None
        if node is not None:  # in a thread, because stages may need the worker's event loop to finish
            await asyncio.to_thread(node.close)
        for name, executor in self._executors.items():
            worker.executors.pop(name, None)
            executor.shutdown(wait=False)
        for limit, value in self._fractions.items():
            setattr(worker.memory_manager, limit, value)
        return_freed_memory()


async def enter(owner: Any, dask_worker: distributed.Worker) -> None:
    """Install the plugin for `owner`, who has claimed this worker. Runs on the worker.

    A plugin of another run has no driver any more, and is removed first.
    """
    async with _changing.setdefault(dask_worker, asyncio.Lock()):
        found = dask_worker.plugins.get(NAME)
        if isinstance(found, NodePlugin) and found.owner == owner:
            return
        if found is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await dask_worker.plugin_remove(NAME)
            except TimeoutError:
                raise StaleError(
                    f"the worker {dask_worker.address} could not close the node of an earlier run within "
                    f"{CLOSE_SECONDS:g} s; look at its log, or restart it"
                ) from None
        await dask_worker.plugin_add(NodePlugin(owner), catch_errors=False)


async def leave(owner: Any, dask_worker: distributed.Worker) -> None:
    """Remove the plugin of `owner` and close its node, if it is still open. Runs on the worker."""
    async with _changing.setdefault(dask_worker, asyncio.Lock()):
        found = dask_worker.plugins.get(NAME)
        if isinstance(found, NodePlugin) and found.owner == owner:
            await dask_worker.plugin_remove(NAME)


def spare(owner: Any, dask_worker: distributed.Nanny) -> None:
    """Stop the nanny from killing its worker for its use of memory: a node keeps its own budgets. Runs on the nanny."""
    memory = dask_worker.memory_manager
    _, owners = _spared.setdefault(dask_worker, (memory.memory_terminate_fraction, set()))
    owners.add(owner)
    memory.memory_terminate_fraction = False


def unspare(owner: Any, dask_worker: distributed.Nanny) -> None:
    """Undo `spare`, unless another run uses the worker by now. Runs on the nanny."""
    before, owners = _spared.get(dask_worker, (False, {owner, None}))
    owners.discard(owner)
    if not owners:
        dask_worker.memory_manager.memory_terminate_fraction = before
        del _spared[dask_worker]


def find_plugin() -> NodePlugin | None:
    """Return the plugin of the worker that runs the calling task; None if no run has claimed the worker."""
    plugin = distributed.get_worker().plugins.get(NAME)
    return plugin if isinstance(plugin, NodePlugin) else None


def plugin_here() -> NodePlugin:
    """Return the plugin of the worker that runs the calling task; raise StaleError if it has none."""
    plugin = find_plugin()
    if plugin is None:
        raise StaleError(
            f"no node on the worker {distributed.get_worker().address}: the run has left it, or it was lost and "
            "restarted; the driver starts the run again from its last snapshot"
        )
    return plugin
