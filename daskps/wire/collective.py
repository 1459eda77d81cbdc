"""Collectives over all nodes of a run: sum, exchange between pairs, all-gather; also mean and gather to rank 0.

Input: arrays of every node. Output: the same bits on every node. `Collective` is the interface that the train stage
uses; `HostCollective` implements it on a node's session. The functions below it run on the node's event loop.

The all-reduce is recursive doubling for any number N of nodes. Let P be the largest power of two up to N. Ranks from P
on first send their array to rank - P; ranks below P then exchange in pairs at distances 1, 2, 4...; last, the higher
ranks get the result. This takes log2 N + 2 messages one after the other, and two fewer if N is a power of two. Both
nodes of a pair combine the lower rank's part first, so both get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from daskps.errors import ProtocolError
from daskps.types import Floats, Int64s
from daskps.wire.message import Array, MessageKind
from daskps.wire.session import Session

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Parts = Mapping[int, tuple[Array, ...]]  # arrays by rank of the peer


@dataclass(frozen=True, slots=True)
class Tag:
    """Name of one collective call: equal on all nodes, and used once per incarnation."""

    kind: MessageKind
    batch: int
    step: int = 0


class Handle(Protocol[T_co]):
    """Result of a call that is under way."""

    def wait(self) -> T_co:
        """Wait for the result and return it; raise the error that has stopped the run, if one has."""
        ...


class Collective(Protocol):
    """Sums and exchanges of arrays over all nodes of a run.

    Every node makes the same calls, with equal tags. A call takes the arrays where they are and returns at once; the
    caller computes on and then waits:

        handle = collective.sum(Tag(MessageKind.DENSE, batch, step), sums)
        inputs = prepare(step + 1)  # meanwhile the sums are exchanged
        total = handle.wait()

    An array must not be written to before the handle was waited for on all nodes; in a loop over steps, two steps later
    is late enough, because a node sends nothing of step t + 1 before it has all of step t.
    tests/contracts/test_collectives.py has what every implementation must do.
    """

    @property
    def rank(self) -> int:
        """Rank of this node."""
        ...

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        ...

    def sum(self, tag: Tag, array: Int64s) -> Handle[Int64s]:
        """Sum an array over all nodes. Addition of int64 is associative, so any order gives the same bits."""
        ...

    def exchange(self, tag: Tag, parts: Parts) -> Handle[dict[int, tuple[Array, ...]]]:
        """Send each peer its own arrays, of any shape; the result has the arrays from each peer."""
        ...

    def all_gather(self, tag: Tag, array: Array) -> Handle[list[Array]]:
        """Send an array of equal shape and dtype to all nodes; the result has the arrays of all nodes by rank."""
        ...


class HostCollective:
    """`Collective` of arrays in host memory, over a node's session; `start` runs a coroutine on its event loop."""

    def __init__(self, session: Session, start: Callable[[Coroutine[Any, Any, Any]], Handle[Any]]) -> None:
        self._session, self._start = session, start

    @property
    def rank(self) -> int:
        """Rank of this node."""
        return self._session.rank

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self._session.nodes

    def sum(self, tag: Tag, array: Int64s) -> Handle[Int64s]:
        """Sum an array over all nodes, by recursive doubling."""
        return self._start(all_reduce(self._session, tag, array, np.add))

    def exchange(self, tag: Tag, parts: Parts) -> Handle[dict[int, tuple[Array, ...]]]:
        """Send each peer its own arrays; the result has the arrays from each peer."""
        return self._start(swap(self._session, tag, parts))

    def all_gather(self, tag: Tag, array: Array) -> Handle[list[Array]]:
        """Send an array to all nodes; the result has the arrays of all nodes by rank.

        The time in which the others must send theirs begins with `wait`: they may be a batch behind.
        """
        sent = self._start(_send_to_all(self._session, tag, array))
        return _Gathered(sent, lambda: self._start(_receive_from_all(self._session, tag, array)))


@dataclass(frozen=True, slots=True)
class _Gathered:
    """All-gather whose array is being sent; the others are received when it is waited for."""

    _sent: Handle[None]
    _receive: Callable[[], Handle[list[Array]]]

    def wait(self) -> list[Array]:
        self._sent.wait()
        return self._receive().wait()


async def all_reduce(session: Session, tag: Tag, mine: Array, combine: Callable[[Array, Array], Array]) -> Array:
    """Return `mine` of all nodes combined; `combine` is called with the lower ranks' part first."""
    session.check()
    rank, nodes = session.rank, session.nodes
    paired = 1 << (nodes.bit_length() - 1)  # the largest power of two up to N
    if rank >= paired:
        _send(session, rank - paired, tag, mine)
        return await _receive(session, tag, rank - paired, mine)
    if rank + paired < nodes:
        mine = combine(mine, await _receive(session, tag, rank + paired, mine))
    distance = 1
    while distance < paired:
        other = rank ^ distance
        _send(session, other, tag, mine)
        theirs = await _receive(session, tag, other, mine)
        mine = combine(mine, theirs) if rank < other else combine(theirs, mine)
        distance *= 2
    if rank + paired < nodes:
        _send(session, rank + paired, tag, mine)
    return mine


async def swap(session: Session, tag: Tag, parts: Parts) -> dict[int, tuple[Array, ...]]:
    """Send one message to each peer, even an empty one, and return the arrays from each."""
    session.check()  # a single node sends and receives nothing, and would not notice that its run has ended
    for peer, arrays in parts.items():
        session.send(peer, tag.kind, tag.batch, step=tag.step, arrays=arrays)
    return {peer: (await session.receive(tag.kind, tag.batch, peer, step=tag.step)).arrays for peer in parts}


def _send(session: Session, rank: int, tag: Tag, array: Array) -> None:
    """Send one array."""
    session.send(rank, tag.kind, tag.batch, step=tag.step, arrays=(array,))


async def _receive(session: Session, tag: Tag, sender: int, like: Array) -> Array:
    """Receive one array; raise ProtocolError unless it has the shape and dtype of `like`."""
    arrays = (await session.receive(tag.kind, tag.batch, sender, step=tag.step)).arrays
    found = arrays[0] if len(arrays) == 1 else np.empty(0, np.void)
    if found.shape != like.shape or found.dtype != like.dtype:
        raise ProtocolError(
            f"node {session.rank}, batch {tag.batch}, step {tag.step}: {tag.kind} of node {sender} is "
            f"{found.dtype}{found.shape}, mine is {like.dtype}{like.shape}; all nodes must run one job and one version "
            "of daskps"
        )
    return found


async def _send_to_all(session: Session, tag: Tag, array: Array) -> None:
    """Send an array to every peer."""
    session.check()
    for peer in session.peers:
        _send(session, peer, tag, array)


async def _receive_from_all(session: Session, tag: Tag, mine: Array) -> list[Array]:
    """Return the arrays of all nodes by rank; `mine` is this node's own."""
    session.check()
    ranks = range(session.nodes)
    return [mine if rank == session.rank else await _receive(session, tag, rank, mine) for rank in ranks]


async def gather(session: Session, kind: MessageKind, batch: int, mine: tuple[Array, ...]) -> list[tuple[Array, ...]]:
    """Send arrays of any shape to rank 0. Rank 0 gets those of all other ranks, in rank order; the others get []."""
    session.check()
    if session.rank:
        session.send(0, kind, batch, arrays=mine)
        return []
    return [(await session.receive(kind, batch, peer)).arrays for peer in session.peers]


async def sum_dense(session: Session, batch: int, step: int, mine: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the fixed-point sums over all nodes: gradients, weight, loss and metric counts, as one array."""
    return await all_reduce(session, Tag(MessageKind.DENSE, batch, step), mine, np.add)


async def mean_dense(session: Session, batch: int, step: int, mine: Floats, count: int) -> tuple[Floats, int]:
    """Return the mean of all nodes' values, added in float64, and the largest count; for `sync_every` above 1."""
    packed = np.append(mine.astype(np.float64).reshape(-1), float(count))
    total = await all_reduce(session, Tag(MessageKind.DENSE, batch, step), packed, _add_but_last)
    return (total[:-1] / session.nodes).astype(np.float32).reshape(mine.shape), int(total[-1])


def _add_but_last(lower: Array, higher: Array) -> Array:
    """Return the sum; the last element is the larger of the two instead."""
    total = lower + higher
    total[-1] = max(lower[-1], higher[-1])
    return total
