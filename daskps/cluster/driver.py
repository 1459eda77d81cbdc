"""The driver: runs batches on all nodes, commits snapshots, and goes back to the last one when a node is lost.

In: a model directory and a crew, all nodes as the driver sees them. Out: a model at the end of its data. It keeps
nothing that a snapshot does not have, so it may die anywhere and be run again anywhere; a driver that was overtaken by
a newer one finds out when it publishes, and stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from daskps.cluster.commit import Draft, Epoch, FileSum, ModelDirectory, Snapshot
from daskps.errors import LockedError, PeerError


@dataclass(frozen=True, slots=True)
class Done:
    """What the nodes say when all of them have pushed a batch."""

    draft: Draft  # its position is the end of this batch
    snapshot: bool  # its pushes ask for a snapshot: one is due, or the data ends here


class Crew(Protocol):
    """All nodes of a run. A lost or stuck one makes any of these raise PeerError."""

    async def open(self, epoch: Epoch, snapshot: Snapshot | None, live: tuple[str, ...]) -> None:
        """Begin an epoch. First every worker, wanted or not, lets go of older epochs; then the crew's partitions settle
        as the log says (`live`) and open at `snapshot`. One that knows of a newer epoch refuses with StaleError."""
        ...

    async def run_batch(self, batch: int) -> Done | None:
        """Run a batch on all nodes until its rows are pushed; None if the data ended before it."""
        ...

    async def prepared(self, snapshot: str, batch: int) -> Mapping[str, Any]:
        """Receipts of all partitions, when they have prepared the snapshot that ends with `batch`."""
        ...

    async def write_arrays(self, snapshot: str) -> Mapping[str, FileSum]:
        """Have one node write the dense arrays, as they are between the snapshot's batch and the next."""
        ...

    async def confirm(self, snapshot: str, live: tuple[str, ...]) -> None:
        """Tell all partitions that the snapshot is published, and which ones they still need."""
        ...

    async def close(self, error: BaseException | None) -> None:
        """End the epoch on every node that can be reached."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How to drive; nothing here changes the result."""

    depth: int = 3  # batches in flight
    keep_snapshots: int = 2
    restarts: int = 3
    pause_seconds: float = 1.0  # before going back to the last snapshot, doubled each time


async def drive(
    model: ModelDirectory,
    crew: Crew,
    run: str,
    plan: Plan,
    report: Callable[[Exception, int], None] = lambda error, restarts_left: None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Snapshot | None:
    """Train from the last snapshot to the end of the data; the last snapshot then."""
    for restart in range(plan.restarts + 1):
        epoch = model.begin_epoch(run)
        try:
            await _run_epoch(epoch, crew, plan)
        except (PeerError, LockedError) as error:
            await crew.close(error)
            if restart == plan.restarts:
                raise
            report(error, plan.restarts - restart)
            await sleep(plan.pause_seconds * 2**restart)
        except (Exception, asyncio.CancelledError) as error:
            await crew.close(error)
            raise
        else:
            await crew.close(None)
            break
    return model.snapshot()


async def _run_epoch(epoch: Epoch, crew: Crew, plan: Plan) -> None:
    model = epoch.directory
    snapshot = model.snapshot()
    await crew.open(epoch, snapshot, model.state().live)
    epoch.collect()
    first = 0 if snapshot is None else snapshot.draft.batch + 1
    batches: dict[int, asyncio.Task[Done | None]] = {}
    committing: asyncio.Task[None] | None = None
    next_batch, ended = first, False
    try:
        while batches or not ended:
            while not ended and len(batches) < plan.depth:
                batches[next_batch] = asyncio.create_task(crew.run_batch(next_batch))
                next_batch += 1
            oldest = min(batches)
            await _first_error(batches[oldest], committing)
            done = batches.pop(oldest).result()
            ended = ended or done is None
            if done is not None and done.snapshot:
                if committing is not None:
                    await committing
                committing = asyncio.create_task(_commit(epoch, crew, done.draft, plan.keep_snapshots))
        if committing is not None:
            await committing
    finally:
        for task in (*batches.values(), *([committing] if committing is not None else [])):
            task.cancel()
        await asyncio.gather(*batches.values(), *([committing] if committing else []), return_exceptions=True)


async def _first_error(wanted: asyncio.Task[Any], other: asyncio.Task[Any] | None) -> None:
    """Wait for `wanted`, but raise at once if `other` fails before."""
    while not wanted.done():
        watched = {wanted} | ({other} if other is not None and not other.done() else set())
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if other is not None and other.done():
            other.result()


async def _commit(epoch: Epoch, crew: Crew, draft: Draft, keep_snapshots: int) -> None:
    name = epoch.name(draft.batch)
    receipts = await crew.prepared(name, draft.batch)
    files = await crew.write_arrays(name)
    epoch.publish_written(draft, files, receipts)
    epoch.keep(keep_snapshots)
    await crew.confirm(name, epoch.directory.state().live)
