"""Which virtual partition a key belongs to: a function of the key alone, so partitions move between nodes whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from daskps.backend.native import library
from daskps.backend.pool import ComputePool
from daskps.errors import ArgumentError
from daskps.types import Int64s, Keys

# Its own seed: the same mix cuts keys for nodes, devices and tables, and equal cuts would leave partitions empty.
SEED = 0x5BD1E9955BD1E995


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
        """An order that brings the keys of a partition together, and where each partition begins in it."""
        numbers = self.of(keys, pool)
        counts = np.bincount(numbers, minlength=self.partitions)
        return np.argsort(numbers, kind="stable"), np.concatenate([[0], np.cumsum(counts)])
