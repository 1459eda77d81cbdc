"""Partitions: the partition of a key, and the node that owns a partition.

Input: keys and the number of nodes. Output: the owner of each key. A key's partition depends only on the key and the
number of partitions, so a model can move to another number of nodes without rewriting rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from daskps.device.native import Function, library
from daskps.device.pool import ComputePool
from daskps.errors import ArgumentError, ConfigError, ProtocolError
from daskps.types import Int64s, Keys

# Seed of the hash that chooses the partition. The same hash function also divides keys among nodes, devices and hash
# tables; with equal seeds, some parts would get no keys.
SEED = 0x5BD1E9955BD1E995
# Keys; for fewer, waking the threads of the pool costs more than it saves.
FEW_KEYS = 4096


@dataclass(frozen=True, slots=True)
class Placement:
    """The number of partitions of a table and the rule that gives a key's partition.

    "mixed" hashes the key, which spreads any keys evenly. "modulo" is key % partitions, for examples worked by hand.
    """

    partitions: int = 8
    hash: Literal["mixed", "modulo"] = "mixed"

    def __post_init__(self) -> None:
        if not 1 <= self.partitions <= 65536 or self.hash not in ("mixed", "modulo"):
            raise ArgumentError(f"a table has 1 to 65536 partitions, mixed or modulo; got {self}")

    def of(self, keys: Keys, pool: ComputePool) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        """Return the partition of every key."""
        if self.hash == "modulo":
            return (keys % np.uint64(self.partitions)).astype(np.uint16)
        mixed = np.empty_like(keys)
        pool.launch(library().mix_keys, keys=keys, n=len(keys), seed=SEED, mixed=mixed)
        return ((mixed >> np.uint64(32)) * np.uint64(self.partitions) >> np.uint64(32)).astype(np.uint16)

    def split(self, keys: Keys, pool: ComputePool) -> tuple[Int64s, Int64s]:
        """Return a stable order that groups the keys by partition, and where each partition begins in it.

        The second array has ``partitions + 1`` items.
        """
        shares = 1 if len(keys) < FEW_KEYS else pool.cores
        cuts = [len(keys) * share // shares for share in range(shares + 1)]
        counts = np.zeros((shares, self.partitions), np.int64)
        order = np.empty(len(keys), np.int64)

        def run(function: Function, share: int, **out: Int64s) -> None:
            function(
                keys=keys,
                first=cuts[share],
                last=cuts[share + 1],
                partitions=self.partitions,
                mixed=self.hash == "mixed",
                seed=SEED,
                **out,
            )

        native = library()
        pool.map(lambda share: run(native.storage_partition_count, share, counts=counts[share]), range(shares))
        begins = np.concatenate([[0], np.cumsum(counts.sum(axis=0))])
        cursors = begins[:-1] + np.cumsum(counts, axis=0) - counts
        pool.map(
            lambda share: run(native.storage_partition_order, share, cursors=cursors[share], order=order), range(shares)
        )
        return order, begins


@dataclass(frozen=True, slots=True)
class KeysByOwner:
    """Keys grouped by owner: rank r owns ``keys[order[starts[r]:starts[r + 1]]]``."""

    order: Int64s | None  # (n,); None: the keys are in this order already
    starts: Int64s  # (nodes + 1,)

    def slice(self, rank: int) -> slice:
        """Return the range of a rank's keys in the order."""
        return slice(int(self.starts[rank]), int(self.starts[rank + 1]))

    def group(self, rank: int) -> Int64s:
        """Return the positions of a rank's keys."""
        at = self.slice(rank)
        return np.arange(at.start, at.stop) if self.order is None else self.order[at]

    def positions(self, rank: int, numbers: npt.NDArray[np.uint32]) -> Int64s:
        """Return the positions of some of a rank's keys, given as numbers that count that rank's keys from 0.

        The numbers may come from a peer, so they are checked; ProtocolError if one is out of range.
        """
        at = self.slice(rank)
        plain = numbers.dtype == np.uint32 and numbers.ndim == 1
        if not plain or (len(numbers) and numbers.max() >= at.stop - at.start):
            raise ProtocolError(f"node {rank} was asked for {at.stop - at.start} rows, but names others: {numbers}")
        return numbers + np.int64(at.start) if self.order is None else self.order[at][numbers]


@dataclass(frozen=True, slots=True)
class KeyPartition:
    """The assignment of keys to nodes: a key has a partition, and each node owns a range of partitions."""

    placement: Placement  # from key to partition, the same as in the disk tier
    nodes: int
    pool: ComputePool

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= min(self.placement.partitions, 64):
            raise ConfigError(
                f"{self.nodes} nodes cannot share {self.placement.partitions} partitions: at least one a node "
                "and at most 64 nodes; cluster.partitions is fixed when a model is made"
            )

    def owned(self, rank: int) -> range:
        """Return the partitions of a node: a range that is never empty. Every partition has exactly one owner."""
        count = self.placement.partitions
        return range(rank * count // self.nodes, (rank + 1) * count // self.nodes)

    def group(self, keys: Keys) -> KeysByOwner:
        """Return the keys grouped by owner."""
        if self.nodes == 1:
            return KeysByOwner(None, np.array([0, len(keys)]))
        order, begins = self.placement.split(keys, self.pool)
        firsts = [*(self.owned(rank).start for rank in range(self.nodes)), self.placement.partitions]
        return KeysByOwner(order, begins[firsts])
