"""The cluster that needs no set-up: an in-process one of one node, or local processes for more.

In: nothing, a client, or a scheduler's address. Out: a Dask client whose workers are places for nodes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import dask.config
from distributed import Client, LocalCluster

from daskps.cluster.plugin import THREADS
from daskps.errors import PeerError

SETTINGS = {
    # A worker that is lost again so long after it was lost is given up for good; its nanny knows better.
    "distributed.deploy.lost-worker-timeout": "1 day",
    # Dask samples stacks every 10 ms and ticks every 20, with the interpreter's lock: a tenth of a small run's time.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
}


@contextlib.contextmanager
def client_for(nodes: int, given: Client | str | None = None, dashboard_address: str | None = None) -> Iterator[Client]:
    """The client that was given, or one of a cluster that is closed again afterwards; with a dashboard if asked for."""
    if isinstance(given, Client):
        yield given
    elif given is not None:
        try:
            client = Client(given, set_as_default=False)
        except OSError as error:
            raise PeerError(f"no Dask scheduler answers at {given}: {error}; check the address, or start one") from None
        with client:
            yield client
    else:
        quiet = {"silence_logs": logging.CRITICAL}  # what a task raises comes to the caller, once
        with local_workers(nodes, processes=nodes > 1, dashboard_address=dashboard_address, **quiet) as client:
            yield client


@contextlib.contextmanager
def local_workers(
    count: int, *, processes: bool, dashboard_address: str | None = None, **options: Any
) -> Iterator[Client]:
    """So many workers on this machine as places for nodes, in this process or each in its own; closed afterwards."""
    with (
        dask.config.set(SETTINGS),
        LocalCluster(
            n_workers=count,
            processes=processes,
            threads_per_worker=THREADS,
            memory_limit=0,
            dashboard_address=dashboard_address,
            worker_dashboard_address=None,
            scheduler_kwargs={"dashboard_address": dashboard_address or ":0"},  # 8787 may be somebody else's
            **options,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client
