"""Nodes as they really run, but for Dask: threads, sockets, MEM-PS; the model is what plain dictionaries say."""

import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed.security import Security

from daskps.device.pool import ComputePool
from daskps.errors import CapacityError, DaskpsError, PeerError
from daskps.mem import MemPS
from daskps.storage.partition import KeyPartition, Placement
from daskps.types import Field, RowLayout
from daskps.wire.exchange import Touched
from daskps.wire.link import Link
from daskps.wire.session import Member
from daskps.wire.transport import ListenOptions
from tests.mem.memory_store import MemoryStore
from tests.simulation import reference
from tests.simulation.reference import Data, States

LAYOUT = RowLayout((Field("value", 1, "uint32"), Field("count", 1, "uint32")))
BATCH_STEPS = 2


class Node:
    """One node: a thread that pulls batches ahead, and one that trains and pushes them."""

    def __init__(self, data: Data, rank: int, nodes: int, wire: ListenOptions, depth: int, by: str = "mixed") -> None:
        self.data, self.rank, self.nodes, self.depth = data, rank, nodes, depth
        self.store, self.dense = MemoryStore(LAYOUT.width), 1
        self.link = Link(wire, alone=nodes == 1)
        self.partition = KeyPartition(Placement(8, by), nodes, ComputePool(1))  # type: ignore[arg-type]
        self.errors: list[DaskpsError] = []

    def join(self, addresses: list[str], wait_seconds: float = 60.0) -> None:
        def initial(keys: np.ndarray, out: np.ndarray) -> None:
            for place, key in enumerate(keys.tolist()):
                out.view(np.uint32)[place] = reference.initial(self.data.seed, 0, key)

        self.mem = MemPS(
            layout=LAYOUT,
            store=self.store,
            initial=initial,
            memory_bytes=40_000,
            pool=ComputePool(1),
            nodes=self.nodes,
        )
        member = Member("run", 1, self.rank, self.nodes, wait_seconds)
        self.link.join(
            *(member, addresses, {"0": self.mem}, self.partition),
            first_batch=0,
            check_replicas=True,
            failed=self.errors.append,
        )

    def run(self) -> None:
        ready: queue.Queue[Any] = queue.Queue(self.depth)
        with ThreadPoolExecutor(1) as puller:
            pulls = puller.submit(self._pull_all, ready)
            before: dict[int, np.ndarray] = {}
            for batch, first in enumerate(range(0, self.data.steps, BATCH_STEPS)):
                pulled, rows = ready.get(timeout=60)
                if pulled is None:
                    break
                before = self._train(batch, first, pulled, rows, before)
            pulls.result()

    def _slices(self, first: int) -> dict[int, range]:
        last = min(first + BATCH_STEPS, self.data.steps)
        return {step: self.data.slice(step, self.rank, self.nodes) for step in range(first, last)}

    def _pull_all(self, ready: "queue.Queue[Any]") -> None:
        try:
            for batch, first in enumerate(range(0, self.data.steps, BATCH_STEPS)):
                slices = self._slices(first).values()
                keys = np.array([*{key for one in slices for e in one for key in self.data.keys[e][0]}], np.uint64)
                rows = np.empty((len(keys), LAYOUT.width), np.float32)
                ready.put((self.link.pull(batch, {"0": (keys, rows)}), rows))
        except BaseException:
            ready.put((None, None))
            raise

    def _train(self, batch: int, first: int, pulled: Any, rows: np.ndarray, before: dict[int, np.ndarray]) -> Any:
        self.link.wait_deferred(pulled, {"0": rows})
        keys = pulled["0"].keys.tolist()
        for place in pulled["0"].forwarded.tolist():
            rows[place] = before[keys[place]]
        places, bits = {key: place for place, key in enumerate(keys)}, rows.view(np.uint32)
        exchange = self.link.exchange(batch, pulled)
        for step, examples in self._slices(first).items():
            sums: dict[int, int] = {}
            for example in examples:
                for key in self.data.keys[example][0]:
                    row = (int(bits[places[key], 0]), int(bits[places[key], 1]))
                    sums[key] = sums.get(key, 0) + reference.gradient(example, key, row)
            mine = Touched(
                np.array([places[key] for key in sums], np.int32),
                np.array([*sums.values()], np.int64).reshape(-1, 1),
            )
            summed, dense = exchange.start(step, {"0": mine}, np.array([sum(sums.values())], np.int64)).finish()
            self.dense = (self.dense * 3 + int(dense[0])) & reference.MASK
            for some in summed["0"]:
                for row, total in zip(some.rows.tolist(), some.sums[:, 0].tolist(), strict=True):
                    bits[row] = reference.updated((int(bits[row, 0]), int(bits[row, 1])), total)
        last = first + BATCH_STEPS >= self.data.steps
        self.link.push(pulled, {"0": rows}, "end" if last else "")
        if last:
            self.link.prepared("end", batch)
        return dict(zip(keys, rows, strict=True))


def on_all(nodes: list[Node], call: Callable[[Node], Any]) -> list[Any]:
    """`call` on every node, each in its own thread; results, or errors."""
    with ThreadPoolExecutor(len(nodes)) as threads:
        futures = [threads.submit(call, node) for node in nodes]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize(
    ("count", "depth", "protocol", "by"),
    [
        (1, 2, "tcp", "mixed"),
        (2, 1, "tcp", "mixed"),
        (2, 3, "tls", "mixed"),
        (3, 2, "tcp", "modulo"),
        (5, 4, "tcp", "mixed"),
    ],
)
def test_threads_and_sockets_give_the_dictionary_model(count: int, depth: int, protocol: str, by: str) -> None:
    data = Data.make(random.Random(count), tables=1, steps=12, step_examples=9, universe=60)
    states = States.of(data, 1)
    security = Security.temporary() if protocol == "tls" else Security()
    worker = SimpleNamespace(address=f"{protocol}://127.0.0.1:0", security=security)
    nodes = [Node(data, rank, count, ListenOptions.of_worker(worker), depth, by) for rank in range(count)]
    try:
        addresses = [node.link.address for node in nodes]
        assert on_all(nodes, lambda node: node.join(addresses)) == [None] * count
        assert on_all(nodes, Node.run) == [None] * count
        assert [node.dense for node in nodes] == [states.dense[-1]] * count
        rows: dict[int, bytes] = {}
        for node in nodes:
            assert not rows.keys() & node.store.snapshots["end"].keys()
            rows |= node.store.snapshots["end"]
        for key, expected in states.rows[-1][0].items():
            assert tuple(np.frombuffer(rows[key], np.uint32)) == expected
    finally:
        on_all(nodes, lambda node: node.link.close())


def test_lookup_sees_the_state_after_a_batch_and_inserts_nothing() -> None:
    data = Data.make(random.Random(1), tables=1, steps=4, step_examples=6, universe=20)
    states = States.of(data, 1)
    nodes = [Node(data, rank, 2, ListenOptions(), 2) for rank in range(2)]
    try:
        addresses = [node.link.address for node in nodes]
        on_all(nodes, lambda node: node.join(addresses))
        assert on_all(nodes, Node.run) == [None, None]
        trained, unknown = [*states.rows[-1][0]], 12345
        keys = np.array([*trained, unknown], np.uint64)
        cached = [node.mem.cached_rows for node in nodes]
        out = np.empty((len(keys), LAYOUT.width), np.float32)
        nodes[1].link.lookup(1, 0, {"0": (keys, out)})
        found = [tuple(row) for row in out.view(np.uint32).tolist()]
        assert found == [*states.rows[-1][0].values(), reference.initial(data.seed, 0, unknown)]
        assert [node.mem.cached_rows for node in nodes] == cached
    finally:
        on_all(nodes, lambda node: node.link.close())


def test_an_error_on_one_node_stops_all_within_moments_and_says_where() -> None:
    data = Data.make(random.Random(2), tables=1, steps=40, step_examples=6, universe=20)
    nodes = [Node(data, rank, 3, ListenOptions(), 2) for rank in range(3)]
    try:
        addresses = [node.link.address for node in nodes]
        on_all(nodes, lambda node: node.join(addresses))
        timer = threading.Timer(0.02, lambda: nodes[2].link.fail(CapacityError("node 2 is full")))
        timer.start()
        results = on_all(nodes, Node.run)
        timer.join()
        assert isinstance(results[0], PeerError)
        assert "node 2 stopped" in str(results[0])
        assert "node 2 is full" in str(results[0])
        assert isinstance(results[2], CapacityError)
        assert all(node.errors for node in nodes)
    finally:
        on_all(nodes, lambda node: node.link.close())


@pytest.mark.parametrize(
    ("address", "protocol", "listen_on"),
    [
        ("tcp://10.0.0.3:4711", "auto", "tcp://10.0.0.3"),
        ("inproc://10.0.0.3/1/2", "auto", "tcp://127.0.0.1"),
        ("tcp://10.0.0.3:4711", "ucx", "ucx://10.0.0.3"),
    ],
)
def test_nodes_listen_where_their_workers_do(address: str, protocol: str, listen_on: str) -> None:
    worker = SimpleNamespace(address=address, security=Security())
    assert ListenOptions.of_worker(worker, protocol).listen_on == listen_on
