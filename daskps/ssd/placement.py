"""Which virtual partition a key belongs to: a function of the key alone, so partitions move between nodes whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from daskps.backend.native import Function, library
from daskps.backend.pool import ComputePool
from daskps.errors import ArgumentError
from daskps.types import Int64s, Keys

# Its own seed: the same mix cuts keys for nodes, devices and tables, and equal cuts would leave partitions empty.
SEED = 0x5BD1E9955BD1E995
# A hand-over to the pool costs more than this many keys.
FEW_KEYS = 4096


@dataclass(frozen=True, slots=True)
class Placement:
    """`partitions` partitions; "mixed" spreads any keys evenly, "modulo" is key % partitions, for worked examples."""

    partitions: int = 8
    hash: Literal["mixed", "modulo"] = "mixed"

    def __post_init__(self) -> None:
        if not 1 <= self.partitions <= 65536 or self.hash not in ("mixed", "modulo"):
            raise ArgumentError(f"a table has 1 to 65536 partitions, mixed or modulo; got {self}")

    def of(self, keys: Keys, pool: ComputePool) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        """The partition of every key."""
        if self.hash == "modulo":
            return (keys % np.uint64(self.partitions)).astype(np.uint16)
        mixed = np.empty_like(keys)
        pool.launch(library().mix_keys, keys=keys, n=len(keys), seed=SEED, mixed=mixed)
        return ((mixed >> np.uint64(32)) * np.uint64(self.partitions) >> np.uint64(32)).astype(np.uint16)

    def split(self, keys: Keys, pool: ComputePool) -> tuple[Int64s, Int64s]:
        """A stable order that brings the keys of a partition together, and where each partition begins in it."""
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
        pool.map(lambda share: run(native.ssd_placement_count, share, counts=counts[share]), range(shares))
        begins = np.concatenate([[0], np.cumsum(counts.sum(axis=0))])
        cursors = begins[:-1] + np.cumsum(counts, axis=0) - counts
        pool.map(
            lambda share: run(native.ssd_placement_order, share, cursors=cursors[share], order=order), range(shares)
        )
        return order, begins
