"""The working sets of all nodes for one batch, made one.

In: one pull of each node. Out: their distinct keys, in rank order, and who holds each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from daskps.backend.device import MEMORY
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


@dataclass(frozen=True, slots=True)
class Part:
    """What one node gets of a batch, as positions of its pull, ascending where nothing else is said."""

    free: Positions  # rows that it gets at once
    free_slots: Slots
    copied: Positions  # rows that its own table of the batch before has
    late: Positions  # rows that it gets later
    late_slots: Slots
    late_distances: npt.NDArray[np.uint8]  # this batch minus the one that is out with the row
    shared: Positions  # rows that other nodes hold too, in an order that is the same for all of them
    holders: Keys  # of each shared row


class WorkingSet:
    """The distinct keys that all nodes pull for one batch, in rank order, and who holds each.

    With one node that is its pull as it stands, and no table is made.
    """

    def __init__(self, pulls: list[Pull]) -> None:
        self.pulls = pulls
        self.keys = pulls[0].keys
        self.holders: Keys | None = None  # (U,) bit r: node r holds the key
        self.indices: list[Positions] = []  # per node: of each of its keys, the place in `keys`
        self._added: dict[int, slice] = {}  # per node: keys that no lower rank holds, so that it pushes; in its order
        if len(pulls) > 1:
            self._unite()

    def __len__(self) -> int:
        return len(self.keys)

    def _unite(self) -> None:
        most = sum(len(pull.keys) for pull in self.pulls)
        self._buckets = MEMORY.empty(3 * most // 2 + 1, np.uint64)
        self._buckets.fill(0)
        keys, holders, count = MEMORY.empty(most, np.uint64), MEMORY.empty(most, np.uint64), np.zeros(1, np.int64)
        for pull in self.pulls:
            first, indices = int(count[0]), MEMORY.empty(len(pull.keys), np.uint32)
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
            self._added[pull.node] = slice(first, int(count[0]))
        self.keys, self.holders = _copy(keys[: int(count[0])]), _copy(holders[: int(count[0])])

    def held_before(self, previous: WorkingSet | None, distances: npt.NDArray[np.uint8]) -> Keys:
        """Who held each key in the batch just before, of rows that it is still out with (distance 1); else nobody."""
        if previous is None:
            return np.zeros(len(self), np.uint64)
        before: Keys = MEMORY.empty(len(self), np.uint64)
        library().mem_union_before(
            buckets=previous._buckets,
            bucket_count=len(previous._buckets),
            known=previous.keys,
            holders=previous.holders,
            keys=self.keys,
            n=len(self),
            distances=distances,
            before=before,
        )
        return before

    def deal(self, node: int, indices: Positions, distances: npt.NDArray[np.uint8], before: Keys, slots: Slots) -> Part:
        """A node's part, from the places of its keys in `keys`, and of all keys how late they are, who had them in the
        batch just before, and their slots."""
        n, counts = len(indices), np.empty(4, np.int64)
        free, free_slots, copied, late, late_slots, shared = (MEMORY.empty(n, np.uint32) for _ in range(6))
        late_distances, holders = MEMORY.empty(n, np.uint8), MEMORY.empty(n, np.uint64)
        library().mem_union_deal(
            indices=indices,
            n=n,
            rank=node,
            holders=self.holders,
            distances=distances,
            before=before,
            slots=slots,
            known_count=len(self),
            place=MEMORY.empty(len(self), np.uint32),
            free=free,
            free_slots=free_slots,
            copied=copied,
            late=late,
            late_slots=late_slots,
            late_distances=late_distances,
            shared=shared,
            shared_holders=holders,
            counts=counts,
        )
        at_once, own, later, common = counts.tolist()
        return Part(
            *(free[:at_once], free_slots[:at_once], copied[:own]),
            *(late[:later], late_slots[:later], late_distances[:later]),
            *(shared[:common], holders[:common]),
        )

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
        all_of_them = self._added[node]  # as a node pushes them if it does so at once: nothing has to be found
        if np.array_equal(keys, self.keys[all_of_them]) and not pushed[all_of_them].any():
            pushed[all_of_them] = 1
            return slots_of[all_of_them], -1, 0
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


def _copy(values: Keys) -> Keys:
    copy: Keys = MEMORY.empty(len(values), np.uint64)
    copy[:] = values
    return copy
