"""The values that MEM-PS gives back: rows on their way to a node, and what a batch did to the cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from daskps.types import Floats, Keys

Positions: TypeAlias = npt.NDArray[np.uint32]

NOWHERE: Positions = np.empty(0, np.uint32)
NOWHERE.flags.writeable = False
NOBODY: Keys = np.empty(0, np.uint64)
NOBODY.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """Rows for one node's pull of one batch. Positions count that pull's keys.

    The first delivery of a pull tells everything about it: which rows it brings, which the node copies from its own
    table of the batch before, which come later, and who else holds what. Later ones bring late rows only.
    """

    node: int
    batch: int
    first: bool
    positions: Positions | None  # whose rows these are; None: those of all keys, in order
    rows: Floats  # rows[i] belongs to key positions[i]; if the pull gave `out`: `out`, where rows[positions[i]] does
    in_place: bool  # the pull gave `out`
    copied: Positions  # not sent: the node's own table of batch - 1 has these rows, so keep it until they are copied
    late: Positions  # will be sent when the last earlier batch that holds them has pushed
    shared: Positions  # keys that more than one node holds in this batch, in one order for all of them
    holders: Keys  # of each shared key: bit r is set if node r holds it; the lowest of them pushes


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """What one batch did to this partition. Rows of all nodes; a row that several nodes pull counts once."""

    batch: int
    hits: int  # rows that were in memory, late ones among them
    misses: int  # rows read from disk
    new_keys: int  # rows made from (seed, key)
    late: int  # hits that an earlier batch was still out with
    lru_victims: int  # rows that moved from LRU to LFU
    lfu_victims: int  # rows that left the cache
    written_back: int  # those of them that were dirty, so went to disk
    bytes_read: int  # from disk
    bytes_written: int  # to disk, by write-back
    pinned_rows: int  # high-water mark of rows pinned while this batch was the newest
    given_rows: int  # rows by which the cache shrank, because the store's index has grown
    waits: int  # 1: it did not fit beside the pins at first
    forced_flushes: int  # snapshots that had to be finished at once to make room


def total(statistics: Iterable[BatchStatistics]) -> BatchStatistics:
    """All of them together: counts add, high-water marks give the highest, the batch is the last."""
    every = list(statistics)
    highest = {"batch", "pinned_rows"}
    return BatchStatistics(
        **{
            field.name: (max if field.name in highest else sum)([getattr(one, field.name) for one in every] or [0])
            for field in fields(BatchStatistics)
        }
    )
