"""Several nodes on one partition: random interleavings of pulls, training and pushes against a dictionary.

A batch is trained by all nodes together once each has its whole table, as in the real system; pulls and pushes of
different nodes arrive in any order that each node's own order allows, up to four batches in flight.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps.device.pool import ComputePool
from daskps.mem import MemPS, PullReply
from tests.mem.memory_store import MemoryStore, bytes_for, initial, initial_rows, layout

POOL = ComputePool(1)
WIDTH = 3


def trained(rows: np.ndarray, batch: int) -> np.ndarray:
    """What training makes of a row: any function of the row and the batch that does not commute."""
    words = rows.view(np.uint32) * np.uint32(2654435761) + np.uint32(batch + 1)
    return words.view(np.float32)


def common(delivery: PullReply, keys: np.ndarray, other: int) -> list[int]:
    """The keys that `other` holds too, as the delivery names them."""
    return keys[delivery.shared[delivery.holders >> np.uint64(other) & np.uint64(1) == 1]].tolist()


class Cluster:
    """N nodes with their tables, the owner's partition, and the dictionary that says what is right."""

    def __init__(self, nodes: int, depth: int, batches: list[list[list[int]]], memory_bytes: int, draw) -> None:
        self.nodes, self.depth, self.draw = nodes, depth, draw
        self.batches = [[np.array(keys, np.uint64) for keys in batch] for batch in batches]
        self.store = MemoryStore(WIDTH)
        self.ps = MemPS(
            layout=layout(WIDTH), store=self.store, initial=initial, memory_bytes=memory_bytes, pool=POOL, nodes=nodes
        )
        self.model: dict[int, bytes] = {}
        self.after: list[dict[int, bytes]] = []  # the model after each batch
        self.tables: dict[tuple[int, int], np.ndarray] = {}  # (node, batch): rows
        self.missing: dict[tuple[int, int], np.ndarray] = {}
        self.first: dict[tuple[int, int], PullReply] = {}
        self.results: dict[tuple[int, int], np.ndarray] = {}
        self.pulled = [0] * nodes
        self.pushed = [0] * nodes
        self.trained = 0

    def take(self, deliveries: list[PullReply]) -> None:
        for delivery in deliveries:
            at = (delivery.node, delivery.batch)
            keys = self.batches[delivery.batch][delivery.node]
            if delivery.first:
                assert at not in self.tables
                self.first[at] = delivery
                self.tables[at] = np.zeros((len(keys), WIDTH), np.float32)
                self.missing[at] = np.ones(len(keys), np.bool_)
                self.check_holders(delivery, keys)
                expected = np.ones(len(keys), np.bool_)
                expected[delivery.deferred] = False
                expected[delivery.forwarded] = False
                if delivery.positions is not None:
                    assert delivery.positions.tolist() == np.flatnonzero(expected).tolist()
                else:
                    assert expected.all()
                self.copy_from_own_table(delivery.node, delivery.batch)
            positions = np.arange(len(keys)) if delivery.positions is None else delivery.positions
            assert self.missing[at][positions].all()
            self.tables[at][positions] = delivery.rows[positions] if delivery.in_place else delivery.rows
            self.missing[at][positions] = False

    def check_holders(self, delivery: PullReply, keys: np.ndarray) -> None:
        sets = [set(other.tolist()) for other in self.batches[delivery.batch]]
        masks = [sum(1 << r for r in range(self.nodes) if key in sets[r]) for key in keys.tolist()]
        shared = [i for i, mask in enumerate(masks) if mask.bit_count() > 1]
        assert sorted(delivery.shared.tolist()) == shared
        assert delivery.holders.tolist() == [masks[i] for i in delivery.shared.tolist()]
        for other, first in self.first.items():  # two nodes are told of the keys that both hold in one order
            if other[1] == delivery.batch and other[0] != delivery.node:
                assert common(delivery, keys, other[0]) == common(
                    first, self.batches[delivery.batch][other[0]], delivery.node
                )

    def copy_from_own_table(self, node: int, batch: int) -> None:
        """Table to table, when the batch before is trained and this one is answered, whichever comes later."""
        if (node, batch) not in self.first or (node, batch - 1) not in self.results:
            return
        before = {key: i for i, key in enumerate(self.batches[batch - 1][node].tolist())}
        for i in self.first[node, batch].forwarded.tolist():
            key = int(self.batches[batch][node][i])
            self.tables[node, batch][i] = self.results[node, batch - 1][before[key]]
            self.missing[node, batch][i] = False

    def expected(self, keys: np.ndarray) -> np.ndarray:
        rows = initial_rows(keys, WIDTH)
        for i, key in enumerate(keys.tolist()):
            if key in self.model:
                rows[i] = np.frombuffer(self.model[key], np.float32)
        return rows

    def actions(self) -> list[tuple[str, int]]:
        possible = []
        for node in range(self.nodes):
            ahead = self.pulled[node] - min(self.pushed)
            if self.pulled[node] < len(self.batches) and ahead < self.depth:
                possible.append(("pull", node))
            if self.pushed[node] < self.trained:
                possible.append(("push", node))
        ready = [(node, self.trained) for node in range(self.nodes)]
        if self.trained < len(self.batches) and all(at in self.tables and not self.missing[at].any() for at in ready):
            possible.append(("train", 0))
        return possible

    def train(self, node: int) -> None:
        batch = self.trained
        for node in range(self.nodes):
            keys = self.batches[batch][node]
            rows = self.tables[node, batch]
            np.testing.assert_array_equal(rows.view(np.uint32), self.expected(keys).view(np.uint32))
            self.results[node, batch] = trained(rows, batch)
        for node in range(self.nodes):
            for key, row in zip(self.batches[batch][node].tolist(), self.results[node, batch], strict=True):
                self.model[key] = row.tobytes()
        self.after.append(dict(self.model))
        self.trained += 1
        for node in range(self.nodes):
            self.copy_from_own_table(node, batch + 1)

    def pull(self, node: int) -> None:
        keys = self.batches[self.pulled[node]][node]
        self.pulled[node] += 1
        out = np.zeros((len(keys), WIDTH), np.float32) if self.draw(st.booleans()) else None
        self.take(self.ps.pull(keys, self.pulled[node] - 1, node, out=out))

    def push(self, node: int) -> None:
        batch = self.pushed[node]
        first = self.first[node, batch]
        mine = np.ones(len(self.batches[batch][node]), np.bool_)
        mine[first.shared] = (first.holders & -first.holders.astype(np.int64).astype(np.uint64)) == np.uint64(1 << node)
        chosen = np.flatnonzero(mine)
        self.pushed[node] += 1
        for part in np.array_split(chosen, self.draw(st.integers(1, 2))):
            rows = np.ascontiguousarray(self.results[node, batch][part])
            self.take(self.ps.push(self.batches[batch][node][part], rows, batch, node))


WORKING_SETS = st.lists(st.integers(0, 39), unique=True, max_size=8)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), nodes=st.integers(2, 5), depth=st.integers(1, 4))
def test_every_interleaving_gives_every_node_the_rows_of_a_dictionary(data, nodes: int, depth: int) -> None:
    batches = data.draw(st.lists(st.lists(WORKING_SETS, min_size=nodes, max_size=nodes), min_size=1, max_size=6))
    largest = max(len(set().union(*batch)) for batch in batches)
    spare = data.draw(st.sampled_from([0, 4, 40]))
    memory_bytes = bytes_for(WIDTH, flight_rows=max(1, largest) + spare, nodes=nodes)
    cluster = Cluster(nodes, depth, batches, memory_bytes, data.draw)
    flush_after = data.draw(st.integers(0, len(batches) - 1))
    cluster.ps.flush_begin(flush_after, "mid")  # long before: it begins when that batch is over
    while actions := cluster.actions():
        if cluster.ps.flushing and data.draw(st.booleans()):
            cluster.ps.flush_step()
        name, node = data.draw(st.sampled_from(actions))
        getattr(cluster, name)(node)
    assert cluster.trained == len(batches), "the protocol is stuck"
    assert min(cluster.pushed) == len(batches)
    assert cluster.ps.pinned_rows == 0
    cluster.ps.flush_finish()
    assert cluster.store.snapshots["mid"] == cluster.after[flush_after]
    every = np.arange(40, dtype=np.uint64)
    np.testing.assert_array_equal(cluster.ps.lookup(every).view(np.uint32), cluster.expected(every).view(np.uint32))


def test_a_row_that_no_table_before_holds_is_sent_when_its_last_holder_has_pushed() -> None:
    ps = MemPS(layout=layout(1), store=MemoryStore(1), initial=initial, memory_bytes=40_000, pool=POOL, nodes=2)
    key, other = np.array([7], np.uint64), np.array([8], np.uint64)
    ps.pull(key, 0, 0)
    ps.pull(other, 0, 1)
    ps.pull(other, 1, 0)
    first = {delivery.node: delivery for delivery in ps.pull(key, 1, 1)}
    assert [first[node].deferred.tolist() for node in (0, 1)] == [[0], [0]]  # each now wants what the other has
    assert all(len(first[node].rows) == 0 and len(first[node].forwarded) == 0 for node in (0, 1))
    (late,) = ps.push(key, np.array([[1.5]], np.float32), 0, 0)
    assert (late.node, late.batch, late.first, late.rows.tolist()) == (1, 1, False, [[1.5]])


def test_no_pull_is_answered_before_all_nodes_have_pulled_that_batch() -> None:
    ps = MemPS(layout=layout(1), store=MemoryStore(1), initial=initial, memory_bytes=40_000, pool=POOL, nodes=3)
    empty = np.empty(0, np.uint64)
    assert ps.pull(np.array([1], np.uint64), 0, 2) == []
    assert ps.pull(empty, 0, 0) == []
    assert ps.pull(empty, 1, 0) == []
    assert [delivery.node for delivery in ps.pull(empty, 0, 1)] == [0, 1, 2]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_snapshot_is_exact_though_a_node_is_a_batch_ahead(order: tuple[int, int]) -> None:
    store = MemoryStore(1)
    ps = MemPS(layout=layout(1), store=store, initial=initial, memory_bytes=40_000, pool=POOL, nodes=2)
    keys = [np.array([10 + node], np.uint64) for node in range(2)]
    for batch in range(2):
        for node in range(2):
            ps.pull(keys[node], batch, node)
    ahead, behind = order
    for batch in range(2):
        ps.push(keys[ahead], np.full((1, 1), batch, np.float32), batch, ahead)
    ps.flush_begin(0, "after 0")
    ps.push(keys[behind], np.zeros((1, 1), np.float32), 0, behind)
    ps.flush_finish()
    assert {key: np.frombuffer(row, np.float32)[0] for key, row in store.snapshots["after 0"].items()} == {10: 0, 11: 0}
    assert ps.lookup(keys[ahead]).item() == 1.0


def test_a_row_in_the_nodes_own_table_before_is_not_sent_but_copied() -> None:
    ps = MemPS(layout=layout(1), store=MemoryStore(1), initial=initial, memory_bytes=40_000, pool=POOL, nodes=2)
    both, own = np.array([7], np.uint64), np.array([7, 8], np.uint64)
    ps.pull(own, 0, 0)
    ps.pull(both, 0, 1)
    ps.pull(both, 1, 0)
    first = {delivery.node: delivery for delivery in ps.pull(own, 1, 1)}
    assert first[0].forwarded.tolist() == [0]
    assert first[1].forwarded.tolist() == [0]
    assert first[1].deferred.tolist() == [1]  # key 8 is in the other node's table only


def test_rows_in_flight_move_when_the_cache_shrinks_and_are_pushed_to_where_they_went() -> None:
    store = MemoryStore(1)
    memory_bytes = bytes_for(1, cache_rows=200, nodes=2)
    ps = MemPS(layout=layout(1), store=store, initial=initial, memory_bytes=memory_bytes, pool=POOL, nodes=2)
    none = np.empty(0, np.uint64)

    def pull(keys: np.ndarray, batch: int) -> list[PullReply]:
        return [*ps.pull(keys, batch, 0), *ps.pull(none, batch, 1)]

    for batch, start in enumerate((0, 70, 140)):  # the last ones take the highest slots
        keys = np.arange(start, start + 60, dtype=np.uint64)
        pull(keys, batch)
        ps.push(keys, np.full((60, 1), batch, np.float32), batch, 0)
    high = np.arange(160, 200, dtype=np.uint64)
    pull(high, 3)
    pull(none, 4)
    store.memory_bytes = 32 * 100
    (first, _) = pull(high[:5], 5)  # shrinks; these are out with batch 3
    assert ps.cache_rows <= 100
    assert first.deferred.tolist() == [0, 1, 2, 3, 4]
    (late,) = ps.push(high, np.arange(40, dtype=np.float32).reshape(40, 1), 3, 0)
    assert late.rows[:, 0].tolist() == [0, 1, 2, 3, 4]
    ps.push(high[:5], np.full((5, 1), -1, np.float32), 5, 0)
    assert ps.lookup(high)[:, 0].tolist() == [-1] * 5 + list(range(5, 40))
    assert ps.lookup(np.arange(60, dtype=np.uint64))[:, 0].tolist() == [0] * 60
