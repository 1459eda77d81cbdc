"""Care of a model at rest: dropping snapshots, going back to one, compacting its files.

In: a model directory that no run writes to. Out: the same model in another state on disk; partitions follow the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from daskps.backend.pool import ComputePool
from daskps.cluster.commit import ModelDirectory, Snapshot, settle
from daskps.config import make_job
from daskps.errors import SnapshotError
from daskps.ssd import Partitions

STALE_WORTH_MOVING = 0.02  # of a partition's rows: less is not worth writing all of it again


@dataclass(frozen=True, slots=True)
class Compaction:
    """What compaction did."""

    snapshot: str
    moved_rows: int
    bytes_before: int
    bytes_after: int


def drop_snapshots(path: str, names: Iterable[str]) -> None:
    """Give up snapshots and free what only they needed; the last one stays."""
    directory = ModelDirectory(path)
    last = _last(directory)
    with _tables(directory, last) as tables:  # takes the locks, so that no run is in the way
        directory.drop(tuple(names))
        _settle(directory, tables)


def roll_back(path: str, name: str) -> None:
    """Make an older snapshot the last one. Newer ones stay until dropped."""
    directory = ModelDirectory(path)
    with _tables(directory, _last(directory)):
        directory.roll_back(name)


def compact(path: str) -> Compaction:
    """Write the live rows of partitions with stale ones anew, publish that as the one snapshot, drop all others."""
    directory = ModelDirectory(path)
    last = _last(directory)
    arrays = directory.load(last)
    with _tables(directory, last) as tables:
        stores = [store for table in tables for store in table.stores.values()]
        before = sum(store.disk_bytes for store in stores)
        epoch = directory.begin_epoch("compact")
        _settle(directory, tables)
        moved = 0
        for store in stores:
            figures = store.stats()
            if figures.stale_rows > STALE_WORTH_MOVING * max(figures.live_rows, 1):
                for keys, rows in store.scan():
                    store.append(keys, rows)
                    moved += len(keys)

        def prepare(name: str) -> dict[str, Any]:
            for table in tables:
                table.prepare(name)
            return {}

        def confirm(name: str) -> None:
            for table in tables:
                table.confirm(name)

        snapshot = epoch.commit(last.draft, arrays, prepare, confirm)
        epoch.keep(1)
        _settle(directory, tables)
        after = sum(store.disk_bytes for store in stores)
    return Compaction(snapshot.id, moved, before, after)


def _last(directory: ModelDirectory) -> Snapshot:
    snapshot = directory.snapshot()
    if snapshot is None:
        raise SnapshotError(f"{directory.path} holds no model: nothing was ever published there")
    return snapshot


@contextmanager
def _tables(directory: ModelDirectory, snapshot: Snapshot) -> Iterator[list[Partitions]]:
    """All tables, open for writing; LockedError if a run has them."""
    job = make_job(snapshot.draft.settings["job"])
    with ComputePool(1) as pool, ExitStack() as stack:
        yield [
            stack.enter_context(Partitions.open(f"{directory.path}/tables/{name}", pool=pool, snapshot=snapshot.id))
            for name in job.tables
        ]


def _settle(directory: ModelDirectory, tables: list[Partitions]) -> None:
    live = directory.state().live
    for table in tables:
        for store in table.stores.values():
            settle(store, live)
