"""The contract of `Collective`. A new implementation subclasses `CollectiveContract` and says how it is made."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from daskps.device.pool import ComputePool
from daskps.errors import CapacityError, DaskpsError, PeerError, ProtocolError
from daskps.storage.partition import KeyPartition, Placement
from daskps.wire.collective import Collective, Tag
from daskps.wire.link import Link
from daskps.wire.message import MessageKind
from daskps.wire.session import Member
from daskps.wire.transport import ListenOptions
from tests.simulation.net import Joined, collectives

Make = Callable[[int], list[Collective]]
SUM, PAIR, ALL = (Tag(kind, 3, 7) for kind in (MessageKind.DENSE, MessageKind.SUMS, MessageKind.WEIGHTS))


def on_all(nodes: list[Collective], call: Callable[[Collective], Any]) -> list[Any]:
    """Start a call on every node, then wait for all; results by rank, or the errors."""
    handles, results = [call(node) for node in nodes], []
    for handle in handles:
        try:
            results.append(handle.wait())
        except Exception as error:
            results.append(error)
    return results


class CollectiveContract:
    """What the train stage relies on. Subclasses have a fixture `make`: `make(n)` are the collectives of n nodes."""

    def fail(self, node: Any, error: DaskpsError) -> None:
        """Stop one node, as an error of its stages does."""
        raise NotImplementedError

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
    def test_a_sum_is_the_sum_over_all_nodes_on_every_node(self, make: Make, count: int) -> None:
        parts = np.random.default_rng(count).integers(-(2**50), 2**50, (count, 33))
        nodes = make(count)
        assert [(node.rank, node.nodes) for node in nodes] == [(rank, count) for rank in range(count)]
        for result in on_all(nodes, lambda node: node.sum(SUM, parts[node.rank].copy())):
            assert result.dtype == np.int64
            np.testing.assert_array_equal(result, parts.sum(axis=0))

    def test_a_sum_that_passes_64_bits_wraps_on_every_node_alike(self, make: Make) -> None:
        for result in on_all(make(3), lambda node: node.sum(SUM, np.array([2**62, -(2**62)]))):
            np.testing.assert_array_equal(result, [3 * 2**62 - 2**64, 2**64 - 3 * 2**62])

    @pytest.mark.parametrize("count", [1, 2, 4])
    def test_an_exchange_brings_each_peer_its_own_arrays(self, make: Make, count: int) -> None:
        def part(sender: int, receiver: int) -> tuple[np.ndarray, ...]:
            if (sender + receiver) % 2:
                return ()  # even nothing is sent, so that nobody waits for ever
            return np.full((sender, 2), receiver, np.float32), np.arange(receiver, dtype=np.uint8)

        def peers(node: Collective) -> list[int]:
            return [rank for rank in range(count) if rank != node.rank]

        results = on_all(
            make(count), lambda node: node.exchange(PAIR, {peer: part(node.rank, peer) for peer in peers(node)})
        )
        for rank, result in enumerate(results):
            assert sorted(result) == [peer for peer in range(count) if peer != rank]
            for peer, arrays in result.items():
                expected = part(peer, rank)
                assert [(array.dtype, array.shape) for array in arrays] == [(a.dtype, a.shape) for a in expected]
                for found, sent in zip(arrays, expected, strict=True):
                    np.testing.assert_array_equal(found, sent)

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_an_all_gather_gives_the_arrays_of_all_nodes_by_rank(self, make: Make, count: int) -> None:
        results = on_all(make(count), lambda node: node.all_gather(ALL, np.full(4, node.rank, np.float32)))
        for result in results:
            np.testing.assert_array_equal(result, np.repeat(np.arange(count, dtype=np.float32), 4).reshape(count, 4))

    def test_the_callers_arrays_stay_as_they_are(self, make: Make) -> None:
        mine = [np.full(5, rank, np.int64) for rank in range(3)]
        nodes = make(3)
        on_all(nodes, lambda node: node.sum(SUM, mine[node.rank]))
        on_all(nodes, lambda node: node.all_gather(ALL, mine[node.rank]))
        for rank, array in enumerate(mine):
            np.testing.assert_array_equal(array, rank)

    def test_calls_overlap_and_are_waited_for_in_any_order(self, make: Make) -> None:
        nodes = make(3)
        tags = [Tag(MessageKind.DENSE, 0, step) for step in range(4)]
        started = [[node.sum(tag, np.array([tag.step])) for tag in tags] for node in nodes]
        gathered = [node.all_gather(ALL, np.array([node.rank])) for node in nodes]
        assert [[int(handle.wait()[0]) for handle in reversed(handles)] for handles in started] == [[9, 6, 3, 0]] * 3
        assert [[int(part[0]) for part in handle.wait()] for handle in gathered] == [[0, 1, 2]] * 3

    @pytest.mark.parametrize(
        "call",
        [
            lambda node: node.sum(SUM, np.zeros(2 + node.rank, np.int64)),
            lambda node: node.all_gather(ALL, np.zeros(2 + node.rank, np.float32)),
            lambda node: node.all_gather(ALL, np.zeros(2, (np.float32, np.float64)[node.rank])),
        ],
        ids=["sum", "all_gather", "dtype"],
    )
    def test_arrays_that_do_not_match_are_refused(self, make: Make, call: Callable[[Collective], Any]) -> None:
        result = on_all(make(2), call)[0]
        assert isinstance(result, ProtocolError)
        assert "batch 3, step 7" in str(result)
        assert "of node 1 is" in str(result)

    @pytest.mark.parametrize(
        "call",
        [
            lambda node: node.sum(SUM, np.zeros(2, np.int64)),
            lambda node: node.exchange(PAIR, {peer: () for peer in range(3) if peer != node.rank}),
            lambda node: node.all_gather(ALL, np.zeros(2)),
        ],
        ids=["sum", "exchange", "all_gather"],
    )
    def test_a_node_that_stops_stops_all_who_wait_for_it(self, make: Make, call: Callable[[Collective], Any]) -> None:
        nodes = make(3)
        handles = [call(node) for node in nodes[:2]]
        self.fail(nodes[2], CapacityError("node 2 is full"))
        for handle in handles:
            with pytest.raises(PeerError, match=r"node 2 stopped.*node 2 is full"):
                handle.wait()
        with pytest.raises(CapacityError, match="node 2 is full"):
            call(nodes[2]).wait()


class TestOverTcp(CollectiveContract):
    """`HostCollective` as nodes have it: threads and sockets."""

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        self.links: list[Link] = []

        def make(count: int) -> list[Collective]:
            self.links += [Link(ListenOptions(), alone=count == 1) for _ in range(count)]
            addresses = [link.address for link in self.links]
            partition = KeyPartition(Placement(8, "mixed"), count, ComputePool(1))

            def join(rank: int) -> None:
                member = Member("run", 1, rank, count, wait_seconds=60.0)
                self.links[rank].join(member, addresses, {}, partition, first_batch=0)

            with ThreadPoolExecutor(count) as threads:
                list(threads.map(join, range(count)))
            return [link.collective for link in self.links]

        yield make
        for link in self.links:
            link.close()

    def fail(self, node: Any, error: DaskpsError) -> None:
        self.links[node.rank].fail(error)


class TestOverTheSimulatedNetwork(CollectiveContract):
    """`HostCollective` as the simulator has it: one thread, and messages that come after random delays."""

    @pytest.fixture(params=range(3))
    def make(self, request: pytest.FixtureRequest) -> Make:
        def make(count: int) -> list[Collective]:
            self.joined = Joined(count, seed=request.param)
            self.nodes = collectives(self.joined)
            return [*self.nodes]

        return make

    def fail(self, node: Any, error: DaskpsError) -> None:
        async def fail() -> None:
            self.joined.sessions[node.rank].fail(error)

        node._start(fail()).wait()
