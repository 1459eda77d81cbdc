"""The working sets of all nodes for one batch, made one.

In: one pull of each node. Out: their distinct keys, in rank order, and who holds each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from daskps.backend.native import library
from daskps.errors import ArgumentError
from daskps.mem.cache import NONE, Slots
from daskps.mem.delivery import Positions
from daskps.types import Floats, Keys


@dataclass(frozen=True, slots=True)
class Pull:
    """One node's working set of one batch; `out` takes its rows, at their positions, if it is given."""

    node: int
    keys: Keys
    out: Floats | None


class WorkingSet:
    """The distinct keys that all nodes pull for one batch, in rank order, and who holds each.

    With one node that is its pull as it stands, and no table is made.
    """

    def __init__(self, pulls: list[Pull]) -> None:
        self.pulls = pulls
        self.keys = pulls[0].keys
        self.holders: Keys | None = None  # (U,) bit r: node r holds the key
        self.indices: list[Positions] = []  # per node: of each of its keys, the place in `keys`
        if len(pulls) > 1:
            self._unite()

    def __len__(self) -> int:
        return len(self.keys)

    def _unite(self) -> None:
        most = sum(len(pull.keys) for pull in self.pulls)
        self._buckets = np.zeros(2 * most + 1, np.uint64)
        keys, holders, count = np.empty(most, np.uint64), np.empty(most, np.uint64), np.zeros(1, np.int64)
        for pull in self.pulls:
            indices = np.empty(len(pull.keys), np.uint32)
            added = library().mem_union_add(
                buckets=self._buckets,
                bucket_count=len(self._buckets),
                keys=pull.keys,
                n=len(pull.keys),
                rank=pull.node,
                known=keys,
                holders=holders,
                count=count,
                indices=indices,
            )
            if added < len(pull.keys):
                raise ArgumentError(f"node {pull.node} pulls key {pull.keys[added]} twice; pull distinct keys")
            self.indices.append(indices)
        self.keys, self.holders = keys[: int(count[0])].copy(), holders[: int(count[0])].copy()

    def forget_pulls(self) -> None:
        """The nodes have their answers; who holds what is all that is still needed."""
        self.pulls, self.indices = [], []

    def find(self, keys: Keys) -> Positions:
        """The place of each key in `keys`, NONE where no node pulls it; only with more than one node."""
        indices = np.empty(len(keys), np.uint32)
        library().mem_union_find(
            buckets=self._buckets,
            bucket_count=len(self._buckets),
            known=self.keys,
            keys=keys,
            n=len(keys),
            indices=indices,
        )
        return indices

    def claim(self, keys: Keys, node: int, pushed: npt.NDArray[np.uint8], slots_of: Slots) -> tuple[Slots, int, int]:
        """Mark keys that `node` pushes; returns their slots, the first that it may not push (or -1), and why not."""
        assert self.holders is not None
        slots, reason = np.empty(len(keys), np.uint32), np.zeros(1, np.int64)
        taken = library().mem_union_claim(
            buckets=self._buckets,
            bucket_count=len(self._buckets),
            known=self.keys,
            holders=self.holders,
            slots_of=slots_of,
            keys=keys,
            n=len(keys),
            rank=node,
            pushed=pushed,
            slots=slots,
            reason=reason,
        )
        return slots, -1 if taken == len(keys) else taken, int(reason[0])

    def holders_of(self, keys: Keys) -> Keys:
        """Who holds each key; nobody where no node pulls it."""
        indices = self.find(keys)
        if self.holders is None or len(self.holders) == 0:
            return np.zeros(len(keys), np.uint64)
        known = indices != NONE
        return np.where(known, self.holders[np.where(known, indices, 0)], np.uint64(0))
