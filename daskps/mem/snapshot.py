"""Write a snapshot while training goes on: every row as it was when the snapshot began, in pieces of bounded size.

In: a cache whose dirty rows were marked pending, rows about to be overwritten. Out: appends to the store, then one
prepare. A push copies the old values of pending rows into the piece first (copy on write). Until the store has
prepared, rows pushed after the beginning may not leave the cache, so nothing newer can reach the store before that.
"""

from __future__ import annotations

from daskps.mem.cache import DIRTY, PENDING, Cache, Slots
from daskps.mem.store import RowStore
from daskps.types import Floats, Keys


class SnapshotWriter:
    """One snapshot on its way to the store. `keys` and `rows` are the piece, given by the owner's budget."""

    def __init__(self, snapshot_id: str, cache: Cache, store: RowStore, keys: Keys, rows: Floats) -> None:
        self.snapshot_id = snapshot_id
        self.written_rows = 0
        self.copied_rows = 0
        self._cache, self._store, self._keys, self._rows = cache, store, keys, rows
        self._count = 0  # rows of the piece that are copies; the cache has newer ones
        self._cursor = 0  # slots below have no pending row
        cache.mark_pending()
        cache.flushing = True

    def step(self) -> bool:
        """Write one piece; True when the store has prepared the snapshot."""
        room = len(self._keys) - self._count
        slots = self._cache.list_pending(self._cursor, room)
        self._write(slots)
        if len(slots) == room:
            self._cursor = int(slots[-1]) + 1 if room else self._cursor
            return False
        self._store.prepare(self.snapshot_id)
        self._cache.flushing = False
        return True

    def save(self, slots: Slots) -> None:
        """These rows are about to be overwritten: copy those that the snapshot still needs."""
        pending = self._cache.select(slots, DIRTY | PENDING)
        while len(pending):
            if self._count == len(self._keys):
                self._write(pending[:0])
            run = pending[: len(self._keys) - self._count]
            self._gather(run)
            self._count += len(run)
            self.copied_rows += len(run)
            pending = pending[len(run) :]

    def look_again(self) -> None:
        """Rows have moved to other slots; pending ones may be anywhere."""
        self._cursor = 0

    def _gather(self, slots: Slots) -> int:
        stop = self._count + len(slots)
        self._cache.gather(slots, self._rows[self._count : stop], self._keys[self._count : stop])
        return stop

    def _write(self, slots: Slots) -> None:
        """Append the copies, and the rows of `slots` with them."""
        stop = self._gather(slots)
        if stop:
            self._store.append(self._keys[:stop], self._rows[:stop])
        self._cache.mark_stored(slots)
        self.written_rows += stop
        self._count = 0
