"""Batches in flight: the working sets of all nodes for one batch, the rows it has pinned, and the replies to the nodes.

Input: the pulls of all nodes for a batch. Output: for each node, the rows that it gets at once, those that it forwards
from its table of the previous batch, and the deferred rows that the owner sends later.

`slots` are entry numbers of the cache (see cache.py). The union of a batch is the set of distinct keys of all nodes; U
is its size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from daskps.device.memory import BufferPool
from daskps.device.native import library
from daskps.errors import ArgumentError, ProtocolError
from daskps.mem.cache import BATCHES_IN_FLIGHT, NOBODY, NONE, NOWHERE, Cache, Positions, PullReply, Slots, Visit
from daskps.types import Bools, Floats, Keys


@dataclass(frozen=True, slots=True)
class Pull:
    """One node's working set of one batch. If `out` is given, row i is written to out[i]."""

    node: int
    keys: Keys
    out: Floats | None


@dataclass(frozen=True, slots=True)
class Part:
    """One node's share of a batch. Positions are indices into the keys of its pull, ascending except in `shared`."""

    free: Positions  # rows that the node gets at once: no earlier batch in flight holds them
    free_slots: Slots
    copied: Positions  # forwarded rows: the node's own table of the previous batch has them
    late: Positions  # deferred rows that the owner sends later
    late_slots: Slots
    late_distances: npt.NDArray[np.uint8]  # this batch minus the latest earlier batch that holds the row
    shared: Positions  # rows that other nodes hold too, in the same order on all these nodes
    holders: Keys  # of each shared row, one bit per node


class WorkingSet:
    """The union of the keys that all nodes pull for one batch, and the holders of each key.

    Keys are in order of rank: first all keys of node 0, then those of node 1 that node 0 does not have, and so on. With
    one node the union is its pull, and no hash table is built.
    """

    def __init__(self, pulls: list[Pull], buffers: BufferPool) -> None:
        self.pulls = pulls
        self._pool = buffers
        self.keys = pulls[0].keys
        self.holders: Keys | None = None  # (U,) bit r is set if node r holds the key; None with one node
        self.indices: list[Positions] = []  # per node: the index of each of its keys in `keys`
        self._added: dict[int, slice] = {}  # per node: the keys that no lower rank holds, so this node pushes them
        if len(pulls) > 1:
            self._unite()

    def __len__(self) -> int:
        return len(self.keys)

    def _unite(self) -> None:
        most = sum(len(pull.keys) for pull in self.pulls)
        empty = self._pool.empty
        self._buckets = empty(3 * most // 2 + 1, np.uint64)
        self._buckets.fill(0)
        keys, holders, count = empty(most, np.uint64), empty(most, np.uint64), np.zeros(1, np.int64)
        for pull in self.pulls:
            first, indices = int(count[0]), empty(len(pull.keys), np.uint32)
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
        self.keys, self.holders = self._copy(keys[: int(count[0])]), self._copy(holders[: int(count[0])])

    def _copy(self, values: Keys) -> Keys:
        copy: Keys = self._pool.empty(len(values), np.uint64)
        copy[:] = values
        return copy

    def held_before(self, previous: WorkingSet | None, distances: npt.NDArray[np.uint8]) -> Keys:
        """Return the holders of each key in the previous batch (bits), if that batch has not pushed it yet; else 0.

        `distances` are those of all keys; the previous batch still holds a row where the distance is 1.
        """
        if previous is None:
            return np.zeros(len(self), np.uint64)
        before: Keys = self._pool.empty(len(self), np.uint64)
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
        """Return a node's share of the batch.

        `indices` are the indices of the node's keys in `keys`. The other arrays are for all keys of the union:
        distance to the latest earlier batch that holds the row (0: none), holders in the previous batch, and entry
        numbers.
        """
        n, counts, empty = len(indices), np.empty(4, np.int64), self._pool.empty
        free, free_slots, copied, late, late_slots, shared = (empty(n, np.uint32) for _ in range(6))
        late_distances, holders = empty(n, np.uint8), empty(n, np.uint64)
        library().mem_union_deal(
            indices=indices,
            n=n,
            rank=node,
            holders=self.holders,
            distances=distances,
            before=before,
            slots=slots,
            known_count=len(self),
            place=empty(len(self), np.uint32),
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
        """Release what only the first replies needed; keys and holders stay until the batch is pushed."""
        self.pulls, self.indices = [], []

    def find(self, keys: Keys) -> Positions:
        """Return the index of each key in `keys`, NONE where no node pulls it. Only for more than one node."""
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
        """Mark the keys that `node` pushes.

        Returns their entries, the position of the first key that the node may not push (-1 if there is none), and the
        reason as a number (see `Flight._claim_shared`).
        """
        assert self.holders is not None
        # Usually a node pushes all its keys at once and in this order; then no key has to be looked up.
        all_of_them = self._added[node]
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
        """Return the holders of each key (bits), 0 where no node pulls it."""
        indices = self.find(keys)
        if self.holders is None or len(self.holders) == 0:
            return np.zeros(len(keys), np.uint64)
        known = indices != NONE
        return np.where(known, self.holders[np.where(known, indices, 0)], np.uint64(0))


@dataclass(frozen=True, slots=True)
class Waiting:
    """Deferred rows of one node's pull, which the owner sends when batch `after` has pushed them."""

    node: int
    after: int  # number of a batch
    positions: Positions
    slots: Slots
    out: Floats | None


@dataclass(frozen=True, slots=True)
class Push:
    """Rows that a node has trained and pushed, to be stored in the entries `slots`."""

    slots: Slots
    rows: Floats


@dataclass(slots=True)
class Flight:
    """A batch in flight: its rows are pinned. It ends when all of them are pushed."""

    batch: int
    slots: Slots  # (U,) the entry of each key
    remaining: int  # rows whose push has not been stored yet
    working_set: WorkingSet | None = None  # only with more than one node: keys and their holders
    pushed: npt.NDArray[np.uint8] | None = None  # only with more than one node: (U,) 1 where the row was pushed
    deferred: list[Push] = field(default_factory=list)  # pushes kept until all earlier batches have ended
    waiting: list[Waiting] = field(default_factory=list)  # deferred rows that nodes wait for

    def move(self, first: int, moved: Slots) -> None:
        """Update entry numbers after the cache has shrunk: entry ``first + i`` has become moved[i]."""
        self.slots = _moved(self.slots, first, moved)
        self.deferred = [Push(_moved(push.slots, first, moved), push.rows) for push in self.deferred]
        self.waiting = [
            Waiting(one.node, one.after, one.positions, _moved(one.slots, first, moved), one.out)
            for one in self.waiting
        ]

    def claim(self, keys: Keys, node: int, cache: Cache) -> Slots:
        """Return the entries of the keys that `node` pushes. Each key can be claimed once.

        Raises ProtocolError, and claims nothing, if the node may not push one of them.
        """
        if self.working_set is not None:
            return self._claim_shared(keys, node)
        # A device's table pushes in the order of the pull; then no key has to be looked up.
        if len(keys) == len(self.slots) and cache.check(keys, self.slots, self.batch, claims=False) < 0:
            return self.slots
        slots = cache.find(keys)
        wrong = cache.check(keys, slots, self.batch, claims=True)
        if wrong >= 0:
            raise self._refusal(keys[wrong], node, self._reason(slots[wrong], cache))
        return slots

    def _claim_shared(self, keys: Keys, node: int) -> Slots:
        assert self.working_set is not None
        assert self.pushed is not None
        slots, wrong, why = self.working_set.claim(keys, node, self.pushed, self.slots)
        if wrong < 0:
            return slots
        holders = int(self.working_set.holders_of(keys[wrong : wrong + 1])[0])
        pusher = (holders & -holders).bit_length() - 1
        reasons = {
            1: "no node has pulled in that batch",
            2: f"node {pusher} has to push: the lowest-ranked holder",
            3: "has been pushed already",
            4: "this push names twice",
        }
        raise self._refusal(keys[wrong], node, reasons[why])

    def _reason(self, slot: np.uint32, cache: Cache) -> str:
        if slot == NONE or not np.any(self.slots == slot):
            return "no node has pulled in that batch"
        if not int(cache.entries["holds"][slot]) >> self.batch % BATCHES_IN_FLIGHT & 1:
            return "has been pushed already"
        return "this push names twice"

    def _refusal(self, key: np.uint64, node: int, reason: str) -> ProtocolError:
        return ProtocolError(f"node {node} pushes key {key} in batch {self.batch}, which {reason}; nothing was changed")


def _moved(slots: Slots, first: int, moved: Slots) -> Slots:
    away = slots >= first
    slots = slots.copy()
    slots[away] = moved[slots[away] - np.uint32(first)]
    return slots


def first_alone(pull: Pull, visit: Visit, flight: Flight, rows: Floats) -> PullReply:
    """Return the reply to the only node. Its free rows are in `rows` already; the deferred ones are left to name.

    With one node, a row that the previous batch holds is always forwarded.
    """
    later = visit.distances > 1
    late = visit.late[later]
    _wait(flight, pull, late, visit.slots[late], visit.distances[later])
    positions = None
    if len(visit.late):
        free = np.ones(len(pull.keys), np.bool_)
        free[visit.late] = False
        positions = _where(free)
        if pull.out is None:
            rows = rows[positions]
    return PullReply(
        node=pull.node,
        batch=flight.batch,
        first=True,
        positions=positions,
        rows=rows,
        in_place=pull.out is not None,
        copied=visit.late[~later],
        late=late,
        shared=NOWHERE,
        holders=NOBODY,
    )


def first_shared(
    working_set: WorkingSet, visit: Visit, flight: Flight, previous: Flight | None, cache: Cache
) -> list[PullReply]:
    """Return the first reply to each of several nodes: its free rows, deferred rows, and the holders of shared keys."""
    distances = np.zeros(len(working_set), np.uint8)
    distances[visit.late] = visit.distances
    held = None if previous is None or previous.working_set is None else previous.working_set
    before = working_set.held_before(held, distances)
    answers = []
    for pull, indices in zip(working_set.pulls, working_set.indices, strict=True):
        part = working_set.deal(pull.node, indices, distances, before, visit.slots)
        _wait(flight, pull, part.late, part.late_slots, part.late_distances)
        answers.append(
            PullReply(
                node=pull.node,
                batch=flight.batch,
                first=True,
                positions=part.free if len(part.free) < len(indices) else None,
                rows=_copy_rows(cache, part.free_slots, part.free, pull.out),
                in_place=pull.out is not None,
                copied=part.copied,
                late=part.late,
                shared=part.shared,
                holders=part.holders,
            )
        )
    return answers


def late_rows(flight: Flight, pushed: int, cache: Cache) -> list[PullReply]:
    """Return the deferred rows of `flight` that batch `pushed` has just made available."""
    answers, still = [], []
    for one in flight.waiting:
        if one.after != pushed:
            still.append(one)
            continue
        ready = cache.ready(one.slots, pushed)
        if not ready.all():
            still.append(Waiting(one.node, pushed, one.positions[~ready], one.slots[~ready], one.out))
        if ready.any():
            positions = one.positions[ready]
            answers.append(
                PullReply(
                    node=one.node,
                    batch=flight.batch,
                    first=False,
                    positions=positions,
                    rows=_copy_rows(cache, one.slots[ready], positions, one.out),
                    in_place=one.out is not None,
                    copied=NOWHERE,
                    late=NOWHERE,
                    shared=NOWHERE,
                    holders=NOBODY,
                )
            )
    flight.waiting = still
    return answers


def _where(chosen: Bools) -> Positions:
    return np.flatnonzero(chosen).astype(np.uint32)


def _wait(flight: Flight, pull: Pull, positions: Positions, slots: Slots, distances: npt.NDArray[np.uint8]) -> None:
    for distance in np.unique(distances):
        mine = distances == distance
        flight.waiting.append(Waiting(pull.node, flight.batch - int(distance), positions[mine], slots[mine], pull.out))


def _copy_rows(cache: Cache, slots: Slots, positions: Positions, out: Floats | None) -> Floats:
    """Return the rows of entries in a new array, or copy them to `out` at `positions` and return `out`."""
    if out is not None:
        cache.gather(slots, out, positions=positions)
        return out
    rows: Floats = cache.pool.buffers.empty((len(slots), cache.width), np.float32)
    cache.gather(slots, rows)
    return rows
