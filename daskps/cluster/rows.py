"""A node's partitions of one table, opened as the model's log says they are.

In: the model directory's answer (last snapshot, live ones) and which partitions are this node's. Out: the open row
store. Every node opens only its own, so any number of nodes can open a model that any other number has written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable

from daskps.backend.pool import ComputePool
from daskps.cluster.commit import settle
from daskps.cluster.files import LocalFiles
from daskps.ssd import Options, Partitions
from daskps.ssd.format import LOCK
from daskps.ssd.partitions import partition_name
from daskps.ssd.placement import Placement
from daskps.ssd.where import files_at
from daskps.types import RowLayout


def open_rows(
    path: str,
    layout: RowLayout,
    *,
    placement: Placement,
    owned: Iterable[int],
    snapshot: str | None,
    live: Iterable[str],
    pool: ComputePool,
    file_rows: int | None = None,
    options: Options | None = None,
    base: str | None = None,
    still_mine: Callable[[], None] = lambda: None,
) -> Partitions:
    """The partitions `owned` below `path` at `snapshot`, a published one.

    Without one, new partitions: empty, or copies of those of a table elsewhere, `base`, at its `snapshot`. What a run
    left behind that never published is nobody's, and goes; `still_mine` is called when a partition is locked, so that
    its files are safe from older runs, and raises if they belong to a newer one.
    """
    owned = list(owned)
    if base is None and snapshot is not None:
        rows = Partitions.open(path, pool=pool, owned=owned, snapshot=snapshot, options=options)
        for partition in rows.stores.values():
            settle(partition, live)
        return rows
    for number in owned:
        clear_partition(f"{path}/{partition_name(number)}", still_mine)
    if base is None:
        return Partitions.create(
            *(path, layout),
            pool=pool,
            partitions=placement.partitions,
            hash=placement.hash,
            owned=owned,
            file_rows=file_rows,
            options=options,
        )
    for number in owned:
        copy_partition(f"{base}/{partition_name(number)}", f"{path}/{partition_name(number)}")
    rows = Partitions.open(path, pool=pool, owned=owned, snapshot=snapshot, options=options)
    for partition in rows.stores.values():
        settle(partition, [])  # the base's snapshots are none of this model, which may come to the same names itself
    return rows


def clear_partition(path: str, still_mine: Callable[[], None]) -> None:
    """Remove what is in a partition's folder, if there is one and nobody else writes to it."""
    if not os.path.isdir(path):
        return
    files = files_at(path)
    files.lock()
    try:
        still_mine()
        for name in os.listdir(path):
            if name != LOCK:
                item = os.path.join(path, name)
                shutil.rmtree(item) if os.path.isdir(item) else os.remove(item)
    finally:
        files.close()


def copy_partition(source: str, target: str) -> None:
    """Parameter files are never changed, so links will do where the file system has them.

    All of it is durable then: a store that opens it syncs only what it writes itself.
    """
    shutil.copytree(
        source, target, copy_function=_link_or_copy, ignore=shutil.ignore_patterns(LOCK), dirs_exist_ok=True
    )
    for folder in (os.path.dirname(target), *(folder for folder, _, _ in os.walk(target))):
        LocalFiles().sync(folder)


def _link_or_copy(source: str, target: str) -> None:
    """Chunks never change and may be shared; manifests may not."""
    try:
        if os.path.basename(source).startswith("c."):
            os.link(source, target)
            return
    except OSError:
        pass
    shutil.copyfile(source, target)
    LocalFiles().sync(target)
