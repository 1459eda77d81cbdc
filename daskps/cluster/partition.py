"""Which node owns a key: key to virtual partition, partition to node. Independent of how devices share keys.

In: keys. Out: their order by owner. A model is made with P partitions for good; N nodes own contiguous ranges of them,
so another number of nodes takes over directories instead of rewriting rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from daskps.backend.device import Device
from daskps.backend.ops.partition import Partition, partition, parts_of
from daskps.errors import ConfigError
from daskps.types import Int32s, Keys


@dataclass(frozen=True, slots=True)
class KeyPartition:
    """How keys are spread."""

    partitions: int
    nodes: int
    by: Literal["hash", "modulo"]
    device: Device  # where the order is worked out

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= min(self.partitions, 64):
            raise ConfigError(
                f"{self.nodes} nodes cannot share {self.partitions} partitions: at least one partition a node and at "
                "most 64 nodes; cluster.partitions is fixed when a model is made"
            )

    def partition_of(self, keys: Keys) -> Int32s:
        """The partition of each key."""
        parts: Int32s = parts_of(self.device, keys=keys, parts=self.partitions, modulo=self.by == "modulo")
        return parts

    def owned(self, rank: int) -> range:
        """The partitions of a node: contiguous, none empty, all ranks together every partition once."""
        return range(rank * self.partitions // self.nodes, (rank + 1) * self.partitions // self.nodes)

    def group(self, keys: Keys) -> Partition:
        """The order of the keys by owner: rank r owns ``keys[order[starts[r]:starts[r + 1]]]``."""
        if self.nodes == 1:
            return Partition(np.arange(len(keys), dtype=np.int32), np.array([0, len(keys)]))
        dealt = partition(self.device, keys=keys, parts=self.partitions, modulo=self.by == "modulo")
        firsts = [*(self.owned(rank).start for rank in range(self.nodes)), self.partitions]
        return Partition(dealt.order, dealt.starts[firsts])
