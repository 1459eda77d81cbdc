"""Which node owns a key: key to virtual partition, partition to node. Independent of how devices share keys.

In: keys. Out: their order by owner. A model is made with P partitions for good; N nodes own contiguous ranges of them,
so another number of nodes takes over directories instead of rewriting rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from daskps.backend.pool import ComputePool
from daskps.errors import ConfigError, ProtocolError
from daskps.ssd.placement import Placement
from daskps.types import Int64s, Keys


@dataclass(frozen=True, slots=True)
class Grouped:
    """The order of keys by owner: rank r owns ``keys[order[starts[r]:starts[r + 1]]]``."""

    order: Int64s | None  # (n,); None: the keys stand in this order already
    starts: Int64s  # (nodes + 1,)

    def slice(self, rank: int) -> slice:
        """Where a rank's keys begin and end in the order."""
        return slice(int(self.starts[rank]), int(self.starts[rank + 1]))

    def group(self, rank: int) -> Int64s:
        """The positions of a rank's keys."""
        at = self.slice(rank)
        return np.arange(at.start, at.stop) if self.order is None else self.order[at]

    def positions(self, rank: int, numbers: npt.NDArray[np.uint32]) -> Int64s:
        """The positions of some of a rank's keys, which it has numbered from 0 on; it may be a peer who says so."""
        at = self.slice(rank)
        plain = numbers.dtype == np.uint32 and numbers.ndim == 1
        if not plain or (len(numbers) and numbers.max() >= at.stop - at.start):
            raise ProtocolError(f"node {rank} was asked for {at.stop - at.start} rows, but names others: {numbers}")
        return numbers + np.int64(at.start) if self.order is None else self.order[at][numbers]


@dataclass(frozen=True, slots=True)
class KeyPartition:
    """How keys are spread over nodes."""

    placement: Placement  # over partitions, as the disk tier has it
    nodes: int
    pool: ComputePool

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= min(self.placement.partitions, 64):
            raise ConfigError(
                f"{self.nodes} nodes cannot share {self.placement.partitions} partitions: at least one a node "
                "and at most 64 nodes; cluster.partitions is fixed when a model is made"
            )

    def owned(self, rank: int) -> range:
        """The partitions of a node: contiguous, none empty, all ranks together every partition once."""
        count = self.placement.partitions
        return range(rank * count // self.nodes, (rank + 1) * count // self.nodes)

    def group(self, keys: Keys) -> Grouped:
        """The order of the keys by owner."""
        if self.nodes == 1:
            return Grouped(None, np.array([0, len(keys)]))
        order, begins = self.placement.split(keys, self.pool)
        firsts = [*(self.owned(rank).start for rank in range(self.nodes)), self.placement.partitions]
        return Grouped(order, begins[firsts])
