"""A process to be killed: for every line on stdin it forks a child that opens the store and writes until killed.

What is written in step n depends on n alone, so whoever reads snapshot n knows what must be in it. The child tells of
every commit that has returned. Forking is quick, which makes hundreds of kills affordable; the parent has no threads.
"""

import os
import sys

import numpy as np

from daskps.device.pool import ComputePool
from daskps.ssd import Options, Store
from daskps.storage.model_directory import apply_live
from tests.ssd.helpers import LAYOUT

KEYS = 3000
FILE_ROWS = 512


def step(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the keys and rows that step `number` appends, and the keys that it deletes afterwards."""
    rng = np.random.default_rng(number)
    keys = rng.integers(0, KEYS, 1500).astype(np.uint64)
    rows = rng.integers(0, 2**32, (len(keys), LAYOUT.width), np.uint32).view(np.float32)
    return keys, rows, rng.integers(0, KEYS, 40).astype(np.uint64)


def number_of(store: Store) -> int:
    """Return the step of the store's newest confirmed snapshot."""
    return max((int(snapshot.id) for snapshot in store.snapshots() if snapshot.state == "confirmed"), default=0)


def tell(what: object) -> None:
    """Write a line with one system call: with `print`, a kill may come between the line and its newline."""
    os.write(1, f"{what}\n".encode())


def write(path: str) -> None:
    """Append, delete, commit, drop and compact until killed."""
    tell(os.getpid())
    store = Store.open(path, pool=ComputePool(2), options=Options(compact_above=1.2))
    number = number_of(store)
    apply_live(store, store.confirmed(), discard_unpublished=True)
    tell("open")
    while True:
        number += 1
        keys, rows, deleted = step(number)
        store.append(keys, rows)
        store.delete(deleted)
        if number % 2:
            store.prepare(str(number), save_index=number % 3 == 0)
            store.confirm(str(number))
        else:
            store.commit(str(number), save_index=number % 3 == 0)
        tell(number)
        if number % 4 == 0:
            store.compact(0.3)
        for snapshot in store.snapshots()[:-2]:
            store.drop(snapshot.id)


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if not child:
            write(line.strip())
        os.waitpid(child, 0)
        tell("end")
