"""Opening of a node's partitions of one table in the state that the commit log decides.

Input: the snapshot to open and the live snapshots, from the model directory, and the numbers of this node's partitions.
Output: the open row store. Every node opens only its own partitions, so any number of nodes can open a model that any
other number of nodes has written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from daskps.device.pool import ComputePool
from daskps.errors import StoreError
from daskps.ssd import Options, TableStore, recovery
from daskps.ssd.format import MANIFEST
from daskps.ssd.table_store import partition_name
from daskps.storage.files import LOCK, files_at, fsync_path
from daskps.storage.model_directory import apply_live
from daskps.storage.partition import Placement
from daskps.types import RowLayout


@dataclass(frozen=True, slots=True)
class Base:
    """Table of another model whose rows a new table begins with (`start_from`)."""

    path: str
    model: str  # id
    digests: Mapping[str, str] = field(default_factory=dict)  # of its partitions' files, as far as they are known


def open_rows(
    path: str,
    layout: RowLayout,
    *,
    placement: Placement,
    owned: Iterable[int],
    snapshot: str | None,
    live: Iterable[str],
    pool: ComputePool,
    model: str,
    digests: Mapping[str, str] | None = None,
    file_rows: int | None = None,
    options: Options | None = None,
    base: Base | None = None,
    still_mine: Callable[[], None] = lambda: None,
) -> TableStore:
    """Open the partitions `owned` below `path` at `snapshot`, a published snapshot of the model with the id `model`.

    `digests` are the published digests of the snapshot's files, where known.

    Without `snapshot`, create new, empty partitions. With `base`, a table of another model, create copies of its
    partitions at its `snapshot`. Files left by a run of this model that never published anything are removed; files of
    another model are kept, and are an error. `still_mine` is called while a partition is locked, when no older run can
    write to its files; it raises if they belong to a newer run.
    """
    owned = list(owned)
    if base is None and snapshot is not None:
        rows = TableStore.open(
            path, pool=pool, owned=owned, snapshot=snapshot, model=model, digests=digests, options=options
        )
        for partition in rows.stores.values():
            apply_live(partition, live, discard_unpublished=True)
        return rows
    for number in owned:
        clear_partition(f"{path}/{partition_name(number)}", model, still_mine)
    if base is None:
        return TableStore.create(
            *(path, layout),
            pool=pool,
            partitions=placement.partitions,
            hash=placement.hash,
            owned=owned,
            model=model,
            file_rows=file_rows,
            options=options,
        )
    assert snapshot is not None
    for number in owned:
        name = partition_name(number)
        copy_partition(f"{base.path}/{name}", f"{path}/{name}", snapshot, was=base.model, now=model)
    rows = TableStore.open(
        path, pool=pool, owned=owned, snapshot=snapshot, model=model, digests=base.digests, options=options
    )
    for partition in rows.stores.values():
        # This model has none of the base's snapshots, and may later use the same ids itself.
        apply_live(partition, [], discard_unpublished=True)
    return rows


def check_clearable(path: str, model: str) -> None:
    """Raise StoreError if the folder `path` is a partition of a model with another id than `model`."""
    files = files_at(path)
    if files.size(MANIFEST) < 0:
        return
    manifest = recovery.read_manifest(files)
    published = [snapshot.id for snapshot in manifest.snapshots if snapshot.state == "confirmed"]
    if manifest.model == model or not (manifest.model or published):  # versions without model ids left such folders
        return
    raise StoreError(
        f"{path} belongs to model {manifest.model or '(made before models had ids)'} and has the snapshots "
        f"{', '.join(published) or 'none'}, but the log here is that of model {model}, which has none; nothing was "
        "removed: choose another `out`, or remove that model yourself if it is not needed"
    )


def clear_partition(path: str, model: str, still_mine: Callable[[], None]) -> None:
    """Remove the contents of a partition's folder, if it exists, is not locked and belongs to this model."""
    if not os.path.isdir(path):
        return
    files = files_at(path)
    files.lock()
    try:
        still_mine()
        check_clearable(path, model)
        for name in sorted(os.listdir(path), key=lambda name: name == MANIFEST):  # last: it says whose folder this is
            if name != LOCK:
                item = os.path.join(path, name)
                shutil.rmtree(item) if os.path.isdir(item) else os.remove(item)
    finally:
        files.close()


def copy_partition(source: str, target: str, snapshot: str, *, was: str, now: str) -> None:
    """Copy the files that `snapshot` needs from a partition of model id `was` to a partition of model id `now`.

    Segments are immutable, so hard links are used where the file system has them. Everything is synced to disk here,
    because a store that opens the copy syncs only its own writes. The manifest is written last: without it the folder
    is no partition.
    """
    files, copy = files_at(source), files_at(target)
    manifest = recovery.read_manifest(files)
    recovery.check_model(files, manifest, was)
    chosen = manifest.snapshot(snapshot)
    for name in recovery.snapshot_names(chosen):
        os.makedirs(os.path.dirname(f"{target}/{name}"), exist_ok=True)
        _link_or_copy(f"{source}/{name}", f"{target}/{name}")
    for folder in (os.path.dirname(target), *(folder for folder, _, _ in os.walk(target))):
        fsync_path(folder)
    copy.replace(MANIFEST, replace(manifest, model=now, snapshots=(chosen,)).text())


def _link_or_copy(source: str, target: str) -> None:
    """Link or copy a file. Chunks (``c.*``) are immutable and may be hard links; metadata is always copied."""
    try:
        if os.path.basename(source).startswith("c."):
            os.link(source, target)
            return
    except OSError:
        pass
    shutil.copyfile(source, target)
    fsync_path(target)
