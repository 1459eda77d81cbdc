"""Batches in pinned: the working sets of all nodes for one batch, the rows it has pinned, and the replies to the nodes.

Input: the pulls of all nodes for a batch. Output: for each node, the rows that it gets at once, those that it forwards
from its table of the previous batch, and the deferred rows that the owner sends later.

`ids` are entry numbers of the cache (see cache.py). The union of a batch is the set of distinct keys of all nodes; U
is its size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from daskps.device.memory import BufferPool
from daskps.device.native import library, struct_of_words
from daskps.errors import ArgumentError, ProtocolError
from daskps.mem.cache import BATCHES_IN_FLIGHT, NOBODY, NONE, NOWHERE, Cache, EntryIds, Positions, PullReply, Visit
from daskps.types import Bools, Floats, Keys


@dataclass(frozen=True, slots=True)
class Pull:
    """One node's working set of one batch. If `out` is given, row i is written to out[i]."""

    node: int
    keys: Keys
    out: Floats | None


@dataclass(frozen=True, slots=True)
class NodeShare:
    """One node's share of a batch. Positions are indices into the keys of its pull, ascending except in `shared`."""

    free: Positions  # rows that the node gets at once: no earlier batch in flight pins them
    free_ids: EntryIds
    forwarded: Positions  # rows that the node's own table of the previous batch has
    deferred: Positions  # rows that the owner sends later
    deferred_ids: EntryIds
    deferred_distances: npt.NDArray[np.uint8]  # this batch minus the latest earlier batch that pins the row
    shared: Positions  # rows that other nodes hold too, in the same order on all these nodes
    holders: Keys  # of each shared row, one bit per node


class UnitedKeys:
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
        keys, holders = empty(most, np.uint64), empty(most, np.uint64)
        fields, self._state = struct_of_words(  # struct KeyUnion of working_set.cpp
            buckets=self._buckets, bucket_count=len(self._buckets), keys=keys, holders=holders, count=0
        )
        for pull in self.pulls:
            first, indices = int(fields["count"][0]), empty(len(pull.keys), np.uint32)
            added = library().mem_union_add(
                state=self._state, keys=pull.keys, n=len(pull.keys), rank=pull.node, indices=indices
            )
            if added < len(pull.keys):
                raise ArgumentError(f"node {pull.node} pulls key {pull.keys[added]} twice; pull distinct keys")
            self.indices.append(indices)
            self._added[pull.node] = slice(first, int(fields["count"][0]))
        count = int(fields["count"][0])
        self.keys, self.holders = self._copy(keys[:count]), self._copy(holders[:count])
        fields["keys"], fields["holders"] = self.keys.ctypes.data, self.holders.ctypes.data

    def _copy(self, values: Keys) -> Keys:
        copy: Keys = self._pool.empty(len(values), np.uint64)
        copy[:] = values
        return copy

    def held_before(self, previous: UnitedKeys | None, distances: npt.NDArray[np.uint8]) -> Keys:
        """Return the holders of each key in the previous batch (bits), if that batch has not pushed it yet; else 0.

        `distances` are those of all keys; the previous batch still holds a row where the distance is 1.
        """
        if previous is None:
            return np.zeros(len(self), np.uint64)
        before: Keys = self._pool.empty(len(self), np.uint64)
        library().mem_union_before(
            previous=previous._state, keys=self.keys, n=len(self), distances=distances, before=before
        )
        return before

    def share(
        self, node: int, indices: Positions, distances: npt.NDArray[np.uint8], before: Keys, ids: EntryIds
    ) -> NodeShare:
        """Return a node's share of the batch.

        `indices` are the indices of the node's keys in `keys`. The other arrays are for all keys of the union:
        distance to the latest earlier batch that pins the row (0: none), holders in the previous batch, and entry
        numbers.
        """
        n, empty = len(indices), self._pool.empty
        free, free_ids, forwarded, deferred, deferred_ids, shared = (empty(n, np.uint32) for _ in range(6))
        deferred_distances, holders = empty(n, np.uint8), empty(n, np.uint64)
        fields, share = struct_of_words(  # struct NodeShare of working_set.cpp
            free=free,
            free_ids=free_ids,
            forwarded=forwarded,
            deferred=deferred,
            deferred_ids=deferred_ids,
            deferred_distances=deferred_distances,
            shared=shared,
            shared_holders=holders,
            free_count=0,
            forwarded_count=0,
            deferred_count=0,
            shared_count=0,
        )
        library().mem_union_share(
            state=self._state,
            indices=indices,
            n=n,
            rank=node,
            distances=distances,
            before=before,
            ids=ids,
            position=empty(len(self), np.uint32),
            share=share,
        )
        at_once, own, later, common = (
            int(fields[name][0]) for name in ("free_count", "forwarded_count", "deferred_count", "shared_count")
        )
        return NodeShare(
            free=free[:at_once],
            free_ids=free_ids[:at_once],
            forwarded=forwarded[:own],
            deferred=deferred[:later],
            deferred_ids=deferred_ids[:later],
            deferred_distances=deferred_distances[:later],
            shared=shared[:common],
            holders=holders[:common],
        )

    def forget_pulls(self) -> None:
        """Release what only the first replies needed; keys and holders stay until the batch is pushed."""
        self.pulls, self.indices = [], []

    def find(self, keys: Keys) -> Positions:
        """Return the index of each key in `keys`, NONE where no node pulls it. Only for more than one node."""
        indices = np.empty(len(keys), np.uint32)
        library().mem_union_find(state=self._state, keys=keys, n=len(keys), indices=indices)
        return indices

    def claim(
        self, keys: Keys, node: int, pushed: npt.NDArray[np.uint8], entry_ids: EntryIds
    ) -> tuple[EntryIds, int, int]:
        """Mark the keys that `node` pushes.

        Returns their entries, the position of the first key that the node may not push (-1 if there is none), and the
        reason as a number (see `PinnedBatch._claim_shared`).
        """
        assert self.holders is not None
        # Usually a node pushes all its keys at once and in this order; then no key has to be looked up.
        all_of_them = self._added[node]
        if np.array_equal(keys, self.keys[all_of_them]) and not pushed[all_of_them].any():
            pushed[all_of_them] = 1
            return entry_ids[all_of_them], -1, 0
        ids, reason = np.empty(len(keys), np.uint32), np.zeros(1, np.int64)
        taken = library().mem_union_claim(
            state=self._state,
            entry_ids=entry_ids,
            keys=keys,
            n=len(keys),
            rank=node,
            pushed=pushed,
            ids=ids,
            reason=reason,
        )
        return ids, -1 if taken == len(keys) else taken, int(reason[0])

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
    ids: EntryIds
    out: Floats | None


@dataclass(frozen=True, slots=True)
class Push:
    """Rows that a node has trained and pushed, to be stored in the entries `ids`."""

    ids: EntryIds
    rows: Floats


@dataclass(slots=True)
class PinnedBatch:
    """A batch in flight on its owner: its rows are pinned. It ends when all of them are pushed."""

    batch: int
    ids: EntryIds  # (U,) the entry of each key
    remaining: int  # rows whose push has not been stored yet
    united: UnitedKeys | None = None  # only with more than one node: keys and their holders
    pushed: npt.NDArray[np.uint8] | None = None  # only with more than one node: (U,) 1 where the row was pushed
    kept_pushes: list[Push] = field(default_factory=list)  # wait until all earlier batches have ended
    waiting: list[Waiting] = field(default_factory=list)  # deferred rows that nodes wait for

    def move(self, first: int, moved: EntryIds) -> None:
        """Update entry numbers after the cache has shrunk: entry ``first + i`` has become moved[i]."""
        self.ids = _moved(self.ids, first, moved)
        self.kept_pushes = [Push(_moved(push.ids, first, moved), push.rows) for push in self.kept_pushes]
        self.waiting = [
            Waiting(one.node, one.after, one.positions, _moved(one.ids, first, moved), one.out) for one in self.waiting
        ]

    def claim(self, keys: Keys, node: int, cache: Cache) -> EntryIds:
        """Return the entries of the keys that `node` pushes. Each key can be claimed once.

        Raises ProtocolError, and claims nothing, if the node may not push one of them.
        """
        if self.united is not None:
            return self._claim_shared(keys, node)
        # A device's table pushes in the order of the pull; then no key has to be looked up.
        if len(keys) == len(self.ids) and cache.check(keys, self.ids, self.batch, claims=False) < 0:
            return self.ids
        ids = cache.find(keys)
        wrong = cache.check(keys, ids, self.batch, claims=True)
        if wrong >= 0:
            raise self._refusal(keys[wrong], node, self._reason(ids[wrong], cache))
        return ids

    def _claim_shared(self, keys: Keys, node: int) -> EntryIds:
        assert self.united is not None
        assert self.pushed is not None
        ids, wrong, why = self.united.claim(keys, node, self.pushed, self.ids)
        if wrong < 0:
            return ids
        holders = int(self.united.holders_of(keys[wrong : wrong + 1])[0])
        pusher = (holders & -holders).bit_length() - 1
        reasons = {
            1: "no node has pulled in that batch",
            2: f"node {pusher} has to push: the lowest-ranked holder",
            3: "has been pushed already",
            4: "this push names twice",
        }
        raise self._refusal(keys[wrong], node, reasons[why])

    def _reason(self, entry: np.uint32, cache: Cache) -> str:
        if entry == NONE or not np.any(self.ids == entry):
            return "no node has pulled in that batch"
        if not int(cache.entries["holds"][entry]) >> self.batch % BATCHES_IN_FLIGHT & 1:
            return "has been pushed already"
        return "this push names twice"

    def _refusal(self, key: np.uint64, node: int, reason: str) -> ProtocolError:
        return ProtocolError(f"node {node} pushes key {key} in batch {self.batch}, which {reason}; nothing was changed")


def _moved(ids: EntryIds, first: int, moved: EntryIds) -> EntryIds:
    away = ids >= first
    ids = ids.copy()
    ids[away] = moved[ids[away] - np.uint32(first)]
    return ids


def first_alone(pull: Pull, visit: Visit, pinned: PinnedBatch, rows: Floats) -> PullReply:
    """Return the reply to the only node. Its free rows are in `rows` already; the deferred ones are listed.

    With one node, a row that the previous batch holds is always forwarded.
    """
    later = visit.distances > 1
    deferred = visit.deferred[later]
    _wait(pinned, pull, deferred, visit.ids[deferred], visit.distances[later])
    positions = None
    if len(visit.deferred):
        free = np.ones(len(pull.keys), np.bool_)
        free[visit.deferred] = False
        positions = _where(free)
        if pull.out is None:
            rows = rows[positions]
    return PullReply(
        node=pull.node,
        batch=pinned.batch,
        first=True,
        positions=positions,
        rows=rows,
        in_place=pull.out is not None,
        forwarded=visit.deferred[~later],
        deferred=deferred,
        shared=NOWHERE,
        holders=NOBODY,
    )


def first_shared(
    united: UnitedKeys, visit: Visit, pinned: PinnedBatch, previous: PinnedBatch | None, cache: Cache
) -> list[PullReply]:
    """Return the first reply to each of several nodes: its free rows, deferred rows, and the holders of shared keys."""
    distances = np.zeros(len(united), np.uint8)
    distances[visit.deferred] = visit.distances
    held = None if previous is None or previous.united is None else previous.united
    before = united.held_before(held, distances)
    replies = []
    for pull, indices in zip(united.pulls, united.indices, strict=True):
        share = united.share(pull.node, indices, distances, before, visit.ids)
        _wait(pinned, pull, share.deferred, share.deferred_ids, share.deferred_distances)
        replies.append(
            PullReply(
                node=pull.node,
                batch=pinned.batch,
                first=True,
                positions=share.free if len(share.free) < len(indices) else None,
                rows=_copy_rows(cache, share.free_ids, share.free, pull.out),
                in_place=pull.out is not None,
                forwarded=share.forwarded,
                deferred=share.deferred,
                shared=share.shared,
                holders=share.holders,
            )
        )
    return replies


def deferred_rows(pinned: PinnedBatch, pushed: int, cache: Cache) -> list[PullReply]:
    """Return the deferred rows of `pinned` that batch `pushed` has just made available."""
    replies, still = [], []
    for one in pinned.waiting:
        if one.after != pushed:
            still.append(one)
            continue
        ready = cache.ready(one.ids, pushed)
        if not ready.all():
            still.append(Waiting(one.node, pushed, one.positions[~ready], one.ids[~ready], one.out))
        if ready.any():
            positions = one.positions[ready]
            replies.append(
                PullReply(
                    node=one.node,
                    batch=pinned.batch,
                    first=False,
                    positions=positions,
                    rows=_copy_rows(cache, one.ids[ready], positions, one.out),
                    in_place=one.out is not None,
                    forwarded=NOWHERE,
                    deferred=NOWHERE,
                    shared=NOWHERE,
                    holders=NOBODY,
                )
            )
    pinned.waiting = still
    return replies


def _where(chosen: Bools) -> Positions:
    return np.flatnonzero(chosen).astype(np.uint32)


def _wait(
    pinned: PinnedBatch, pull: Pull, positions: Positions, ids: EntryIds, distances: npt.NDArray[np.uint8]
) -> None:
    for distance in np.unique(distances):
        mine = distances == distance
        pinned.waiting.append(Waiting(pull.node, pinned.batch - int(distance), positions[mine], ids[mine], pull.out))


def _copy_rows(cache: Cache, ids: EntryIds, positions: Positions, out: Floats | None) -> Floats:
    """Return the rows of entries in a new array, or copy them to `out` at `positions` and return `out`."""
    if out is not None:
        cache.gather(ids, out, positions=positions)
        return out
    rows: Floats = cache.pool.buffers.empty((len(ids), cache.width), np.float32)
    cache.gather(ids, rows)
    return rows
