"""The rows of one table at one snapshot, read from its partitions on disk without a run.

In: a model directory, a table, a snapshot. Out: rows by key or all of them; figures. Opened for reading nothing is
locked or changed, so a model can be read while it is trained.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from daskps.backend.device import Device
from daskps.backend.ops.partition import partition
from daskps.backend.pool import ComputePool
from daskps.errors import CorruptionError
from daskps.ssd import Statistics, Store
from daskps.types import Bools, Floats, Keys

IO_THREADS = 8  # wait for the disk, shared by all partitions


class TableRows:
    """All partitions of a table. Close it, or use it in a `with`."""

    def __init__(
        self,
        folder: str,
        *,
        partitions: int,
        snapshot: str,
        pool: ComputePool,
        device: Device,
        modulo: bool = False,
        read_only: bool = True,
    ) -> None:
        self._device, self._modulo = device, modulo
        self._io = ThreadPoolExecutor(IO_THREADS, "daskps-rows")
        self.stores: list[Store] = []
        paths = partition_paths(folder)
        if len(paths) != partitions:
            raise CorruptionError(f"{folder} has {len(paths)} partitions, the snapshot {snapshot} has {partitions}")
        try:
            for path in paths:
                store = Store.open(path, pool=pool, snapshot=snapshot, read_only=read_only, io=self._io)
                self.stores.append(store)
        except BaseException:
            self.close()
            raise
        self.layout = self.stores[0].shape.layout

    def load(self, keys: Keys, out: Floats | None = None) -> tuple[Floats, Bools]:
        """Rows (n, width) of the keys, and which were found; rows of absent keys are zeros, or as `out` had them."""
        if out is None:
            out = np.zeros((len(keys), self.layout.width), np.float32)
        found = np.zeros(len(keys), np.bool_)
        dealt = partition(self._device, keys=keys, parts=len(self.stores), modulo=self._modulo)
        for number, store in enumerate(self.stores):
            at = dealt.order[dealt.starts[number] : dealt.starts[number + 1]]
            if len(at):
                rows, there = store.load(keys[at])
                out[at[there]] = rows[there]
                found[at] = there
        return out, found

    def scan(self) -> Iterator[tuple[Keys, Floats]]:
        """Every key and row, in no order of keys."""
        for store in self.stores:
            yield from store.scan()

    def __len__(self) -> int:
        return sum(map(len, self.stores))

    def statistics(self) -> Statistics:
        """Of all partitions together."""
        return functools.reduce(operator.add, [store.stats() for store in self.stores])

    def verify(self) -> int:
        """Check every byte of every snapshot; the bytes checked, or CorruptionError at the first damage."""
        return sum(store.verify() for store in self.stores)

    def close(self) -> None:
        """Let go of the files."""
        for store in self.stores:
            store.close()
        self._io.shutdown()


def partition_paths(folder: str) -> list[str]:
    """The folders of a table's partitions, in order."""
    return sorted(str(path) for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
