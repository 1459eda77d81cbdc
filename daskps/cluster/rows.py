"""A node's partitions of one table, opened as the model's log says they are.

In: the model directory's answer (last snapshot, live ones) and which partitions are this node's. Out: the open row
store. Every node opens only its own, so any number of nodes can open a model that any other number has written.
"""

from __future__ import annotations

from collections.abc import Iterable

from daskps.backend.pool import ComputePool
from daskps.cluster.commit import settle
from daskps.cluster.files import Files
from daskps.ssd import Options, Partitions
from daskps.ssd.placement import Placement
from daskps.types import RowLayout


def open_rows(
    files: Files,
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
) -> Partitions:
    """The partitions `owned` below `path` at `snapshot`, or new ones for a model that has none yet."""
    owned = list(owned)
    if snapshot is None:
        for number in owned:  # what a run left behind that never published is nobody's
            files.remove_folder(f"{path}/partition-{number:05d}")
        return Partitions.create(
            *(path, layout),
            pool=pool,
            partitions=placement.partitions,
            hash=placement.hash,
            owned=owned,
            file_rows=file_rows,
            options=options,
        )
    rows = Partitions.open(path, pool=pool, owned=owned, snapshot=snapshot, options=options)
    for partition in rows.stores.values():
        settle(partition, live)
    return rows
