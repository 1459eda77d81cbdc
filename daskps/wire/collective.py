"""Collectives over all nodes: all-reduce (sum, mean), elementwise maximum, and gather to rank 0.

Input: one array of equal shape from every node. Output: the same bits on every node. The all-reduce is recursive
doubling for any number N of nodes. Let P be the largest power of two up to N. Ranks from P on first send their array
to rank - P; ranks below P then exchange in pairs at distances 1, 2, 4...; last, the higher ranks get the result. This
takes log2 N + 2 messages one after the other, and two fewer if N is a power of two. Both nodes of a pair combine the
lower rank's part first, so both get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from daskps.errors import ProtocolError
from daskps.types import Floats
from daskps.wire.message import Array, MessageKind
from daskps.wire.session import Session


async def all_reduce(
    session: Session, kind: MessageKind, batch: int, step: int, mine: Array, combine: Callable[[Array, Array], Array]
) -> Array:
    """Return `mine` of all nodes combined; `combine` is called with the lower ranks' part first."""
    session.check()
    rank, nodes = session.rank, session.nodes
    paired = 1 << (nodes.bit_length() - 1)  # the largest power of two up to N
    if rank >= paired:
        session.send(rank - paired, kind, batch, step=step, arrays=(mine,))
        return await _part(session, kind, batch, step, rank - paired, mine)
    if rank + paired < nodes:
        mine = combine(mine, await _part(session, kind, batch, step, rank + paired, mine))
    distance = 1
    while distance < paired:
        other = rank ^ distance
        session.send(other, kind, batch, step=step, arrays=(mine,))
        theirs = await _part(session, kind, batch, step, other, mine)
        mine = combine(mine, theirs) if rank < other else combine(theirs, mine)
        distance *= 2
    if rank + paired < nodes:
        session.send(rank + paired, kind, batch, step=step, arrays=(mine,))
    return mine


async def _part(session: Session, kind: MessageKind, batch: int, step: int, sender: int, like: Array) -> Array:
    """Receive an array from `sender`; raise ProtocolError unless it has the shape and dtype of `like`."""
    part = (await session.receive(kind, batch, sender, step=step)).arrays[0]
    if part.shape != like.shape or part.dtype != like.dtype:
        raise ProtocolError(
            f"node {session.rank}, batch {batch}, step {step}: {kind} of node {sender} is {part.dtype}{part.shape}, "
            f"mine is {like.dtype}{like.shape}; all nodes must run one job and one version of daskps"
        )
    return part


async def largest(session: Session, kind: MessageKind, batch: int, mine: Array) -> Array:
    """Return the elementwise maximum of `mine` and the arrays that all peers have sent to this node."""
    result = mine
    for peer in session.peers:
        result = np.maximum(result, await _part(session, kind, batch, 0, peer, mine))
    return result


async def gather(session: Session, kind: MessageKind, batch: int, mine: tuple[Array, ...]) -> list[tuple[Array, ...]]:
    """Send arrays of any shape to rank 0. Rank 0 gets those of all other ranks, in rank order; the others get []."""
    session.check()
    if session.rank:
        session.send(0, kind, batch, arrays=mine)
        return []
    return [(await session.receive(kind, batch, peer)).arrays for peer in session.peers]


async def sum_dense(session: Session, batch: int, step: int, mine: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the fixed-point sums over all nodes: gradients, weight, loss and metric counts, as one array."""
    return await all_reduce(session, MessageKind.DENSE, batch, step, mine, np.add)


async def mean_dense(session: Session, batch: int, step: int, mine: Floats, count: int) -> tuple[Floats, int]:
    """Return the mean of all nodes' values, added in float64, and the largest count; for `sync_every` above 1."""
    packed = np.append(mine.astype(np.float64).reshape(-1), float(count))
    total = await all_reduce(session, MessageKind.DENSE, batch, step, packed, _add_but_last)
    return (total[:-1] / session.nodes).astype(np.float32).reshape(mine.shape), int(total[-1])


def _add_but_last(lower: Array, higher: Array) -> Array:
    """Return the sum; the last element is the larger of the two instead."""
    total = lower + higher
    total[-1] = max(lower[-1], higher[-1])
    return total
