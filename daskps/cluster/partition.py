"""Which node owns a key: key to virtual partition, partition to node. Independent of how devices share keys.

In: keys. Out: their order by owner. A model is made with P partitions for good; N nodes own contiguous ranges of them,
so another number of nodes takes over directories instead of rewriting rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskps.backend.pool import ComputePool
from daskps.errors import ConfigError
from daskps.ssd.placement import Placement
from daskps.types import Int64s, Keys


@dataclass(frozen=True, slots=True)
class Grouped:
    """The order of keys by owner: rank r owns ``keys[order[starts[r]:starts[r + 1]]]``."""

    order: Int64s  # (n,)
    starts: Int64s  # (nodes + 1,)
    in_place: bool = False  # the keys stand in this order already: `order` counts 0, 1, 2...

    def slice(self, rank: int) -> slice:
        """Where a rank's keys begin and end in the order."""
        return slice(int(self.starts[rank]), int(self.starts[rank + 1]))


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
            return Grouped(np.arange(len(keys)), np.array([0, len(keys)]), in_place=True)
        order, begins = self.placement.split(keys, self.pool)
        firsts = [*(self.owned(rank).start for rank in range(self.nodes)), self.placement.partitions]
        return Grouped(order, begins[firsts])
