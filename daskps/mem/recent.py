"""The recent list (LRU) of the cache: a ring of slots in the order of their last visit.

In: cells for rows that are visited. Out: the oldest rows, moved to the frequent list (LFU). A row that is visited again
takes a new cell and leaves its old one stale, so the ring bounds the list twice: by rows, and by visits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from daskps.backend.arena import anonymous
from daskps.backend.native import library
from daskps.mem.delivery import Positions
from daskps.types import Int64s

SERIAL_ROWS = 8192  # below, one thread moves exactly the rows asked for


class RecentList:
    """The ring, its ends, and how many of its cells are not stale (`rows`)."""

    def __init__(self, entries: Any, limit: int, cells: int, shares: Callable[..., list[Any]]) -> None:
        self.ring: Positions = anonymous((cells,), np.uint32)
        self.limit = limit
        self.rows = 0
        self.demoted = 0  # rows moved to the frequent list, ever
        self._entries = entries
        self._shares = shares
        self._tail = 0  # the oldest cell; `_used` cells are in use from there on
        self._used = 0

    @property
    def longest_run(self) -> int:
        """How many cells may be taken at once."""
        return len(self.ring) // 2

    def advance(self, cells: int) -> int:
        """Give out the next cells; where they are short, the oldest rows leave first. Returns the first cell."""
        short = self._used + cells - len(self.ring)
        if short > 0:
            self._pass(short, short)
        head = (self._tail + self._used) % len(self.ring)
        self._used += cells
        return head

    def take_back(self, cells: int) -> None:
        """The last cells were given out, but not written."""
        self._used -= cells

    def trim(self) -> None:
        """Move the oldest rows to the frequent list until the limit is kept."""
        while self.rows > self.limit:
            self.demote(self.rows - self.limit)

    def demote(self, rows: int) -> None:
        """Move some of the oldest rows to the frequent list: at least one if there is any, at most `rows`."""
        self._pass(self._used, rows)

    def _pass(self, cells: int, rows: int) -> None:
        """Pass up to `cells` cells at the tail until `rows` rows have moved."""

        def share(first: int, last: int) -> Int64s:
            counts = np.zeros(2, np.int64)
            library().mem_demote(
                entries=self._entries,
                ring=self.ring,
                ring_cells=len(self.ring),
                tail=self._tail,
                first=first,
                last=last,
                wanted=rows,
                counts=counts,
            )
            return counts

        # Shares cannot stop each other, so they get no more cells than there are rows to move.
        counts = share(0, cells) if rows < SERIAL_ROWS else sum(self._shares(min(cells, rows), share))
        self._tail = (self._tail + int(counts[1])) % len(self.ring)
        self._used -= int(counts[1])
        self.rows -= int(counts[0])
        self.demoted += int(counts[0])
