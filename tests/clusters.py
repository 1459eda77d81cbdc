"""Clusters of Dask workers in the process of the tests."""

from __future__ import annotations

from typing import Any

from distributed import LocalCluster

from daskps.node.dask import THREADS


def cluster_in_process(workers: int, *, dashboard: bool = False, **options: Any) -> LocalCluster:
    """Start `workers` Dask workers as threads of this process, each with the threads that a node needs.

    `options` are those of LocalCluster. Ports are chosen by the system, so that clusters of other tests do not matter.
    """
    if dashboard:
        options |= {"dashboard_address": ":0"}
    else:
        options |= {"dashboard_address": None, "scheduler_kwargs": {"dashboard_address": ":0"}}
    return LocalCluster(n_workers=workers, processes=False, threads_per_worker=THREADS, memory_limit=0, **options)
