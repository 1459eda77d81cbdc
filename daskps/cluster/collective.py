"""Sums and means over all nodes, by a tree over the ranks, for any number of nodes; and a gathering.

In: one array of equal shape from every node. Out: the same bits on every node. Ranks above the largest power of two are
folded into the lower ones, which then exchange in pairs at distances 1, 2, 4...: log2 N + 2 messages on the way, two
fewer than a tree that goes up and down for powers of two. Each pair adds the lower rank's part first, and both do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from daskps.cluster.message import Array
from daskps.cluster.session import Session
from daskps.errors import ProtocolError
from daskps.types import Floats


async def all_reduce(
    session: Session, kind: str, batch: int, step: int, mine: Array, combine: Callable[[Array, Array], Array]
) -> Array:
    """`mine` of all nodes combined; `combine` is called with the lower ranks' part first."""
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


async def _part(session: Session, kind: str, batch: int, step: int, sender: int, like: Array) -> Array:
    part = (await session.receive(kind, batch, sender, step=step)).arrays[0]
    if part.shape != like.shape or part.dtype != like.dtype:
        raise ProtocolError(
            f"node {session.rank}, batch {batch}, step {step}: {kind} of node {sender} is {part.dtype}{part.shape}, "
            f"mine is {like.dtype}{like.shape}; all nodes must run one job and one version of daskps"
        )
    return part


async def gather(session: Session, kind: str, batch: int, mine: tuple[Array, ...]) -> list[tuple[Array, ...]]:
    """Arrays of any shape from all ranks above 0 to rank 0, by rank; nothing to the others."""
    session.check()
    if session.rank:
        session.send(0, kind, batch, arrays=mine)
        return []
    return [(await session.receive(kind, batch, peer)).arrays for peer in session.peers]


async def sum_dense(session: Session, batch: int, step: int, mine: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Fixed-point sums of all nodes: gradients, weight, loss, metric counts, as one array."""
    return await all_reduce(session, "dense", batch, step, mine, np.add)


async def mean_dense(session: Session, batch: int, step: int, mine: Floats, count: int) -> tuple[Floats, int]:
    """Mean of all nodes' values, added in float64, and their largest count; for `sync_every` above 1."""
    packed = np.append(mine.astype(np.float64).reshape(-1), float(count))
    total = await all_reduce(session, "dense", batch, step, packed, _add_but_last)
    return (total[:-1] / session.nodes).astype(np.float32).reshape(mine.shape), int(total[-1])


def _add_but_last(lower: Array, higher: Array) -> Array:
    """The sum, and of the last element the larger."""
    total = lower + higher
    total[-1] = max(lower[-1], higher[-1])
    return total
