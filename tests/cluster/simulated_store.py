"""A row store over the simulated disk: rows in a dictionary, snapshots as whole files, and a lock. Cheap to open."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from daskps.cluster.files import Files
from daskps.errors import LockedError


class SimulatedPartition:
    """One partition's folder. `locks` is the machine's table of locks: path to process."""

    def __init__(self, files: Files, path: str, process: object, locks: dict[str, object]) -> None:
        holder = locks.get(path)
        if holder is not None and holder is not process:
            raise LockedError(f"{path} is held by {holder}")
        locks[path] = process
        self._files, self._path = files, path
        self.rows: dict[int, bytes] = {}

    def _ids(self, ending: str) -> list[str]:
        return [name.removesuffix(ending) for name in self._files.list(self._path) if name.endswith(ending)]

    def prepared(self) -> Iterable[str]:
        confirmed = set(self.confirmed())
        return [name for name in self._ids(".prepared") if name not in confirmed]

    def confirmed(self) -> Iterable[str]:
        return self._ids(".confirmed")

    def open(self, snapshot: str) -> None:
        text = self._files.read(f"{self._path}/{snapshot}.confirmed").decode()
        self.rows = {int(key): bytes.fromhex(row) for key, row in json.loads(text).items()}

    def prepare(self, snapshot: str) -> None:
        path = f"{self._path}/{snapshot}.prepared"
        self._files.write(path, json.dumps({str(key): row.hex() for key, row in self.rows.items()}).encode())
        self._files.sync(path)
        self._files.sync(self._path)

    def confirm(self, snapshot: str) -> None:
        if snapshot not in self.confirmed():
            self._files.link(f"{self._path}/{snapshot}.prepared", f"{self._path}/{snapshot}.confirmed")
        self._files.sync(self._path)
        self._files.remove(f"{self._path}/{snapshot}.prepared")

    def discard(self, snapshot: str) -> None:
        self._files.remove(f"{self._path}/{snapshot}.prepared")

    def drop(self, snapshot: str) -> None:
        self._files.remove(f"{self._path}/{snapshot}.prepared")  # left there if the process died while it confirmed
        self._files.remove(f"{self._path}/{snapshot}.confirmed")


class SimulatedStore:
    """Several partitions as one row store, as MEM-PS sees it."""

    def __init__(self, partitions: dict[int, SimulatedPartition], partition_of, width: int) -> None:  # type: ignore[no-untyped-def]
        self.partitions = partitions
        self._partition_of = partition_of
        self._width = width

    def append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        for key, part, row in zip(keys.tolist(), self._partition_of(keys).tolist(), rows, strict=True):
            self.partitions[part].rows[key] = row.tobytes()

    def load(self, keys: np.ndarray, out: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((len(keys), self._width), np.float32) if out is None else out
        found = np.zeros(len(keys), np.bool_)
        for place, (key, part) in enumerate(zip(keys.tolist(), self._partition_of(keys).tolist(), strict=True)):
            row = self.partitions[part].rows.get(key)
            if row is not None:
                out[place] = np.frombuffer(row, np.float32)
                found[place] = True
        return out, found

    def prepare(self, snapshot_id: str) -> None:
        for partition in self.partitions.values():
            partition.prepare(snapshot_id)
