"""The requester's side: rows of a batch from their owners before it trains, and back to them after.

In: a working set, in any order. Out: its rows, what is late and from where it comes, and who else holds what.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from daskps.backend.device import MEMORY
from daskps.backend.native import library
from daskps.cluster.exchange import Shared, tell
from daskps.cluster.message import Array, Message
from daskps.cluster.owner import Work
from daskps.cluster.partition import Grouped
from daskps.cluster.session import Session
from daskps.errors import ProtocolError
from daskps.types import Bools, Floats, Int64s, Keys

_ODD = np.array([0x9E3779B97F4A7C15 * (2 * i + 1) % 2**64 | 1 for i in range(4096)], np.uint64)


@dataclass(frozen=True, slots=True)
class Pulled:
    """One table's working set on this node, after its pull. Positions count the keys as they were asked for."""

    batch: int
    table: str
    keys: Keys  # (U,)
    owners: Grouped
    copied: Int64s  # rows that this node's table of the batch before has, once that one is trained
    late: tuple[int, ...]  # by owner: how many rows it will send when an earlier batch has pushed them
    shared: Int64s  # rows that other nodes hold too
    holders: Keys  # of each shared row: bit set of ranks
    pushed: Bools | None  # (U,) rows that this node pushes; None: all
    sharing: Shared  # who holds what, for the exchange of gradient sums


async def at_once(call: Callable[[], Any]) -> Any:
    """Where nothing else waits for the event loop, copying may happen on it."""
    return call()


async def pull(
    session: Session, batch: int, table: str, keys: Keys, owners: Grouped, out: Floats, aside: Work
) -> Pulled:
    """Ask every owner for its keys, empty groups too; free rows are in `out` (U, W) when this returns."""
    order = owners.order
    asked = keys if order is None else await aside(lambda: keys[order])
    for owner in range(session.nodes):
        at = owners.slice(owner)
        mine = order is None and owner == session.rank  # the owner writes into `out` itself
        session.send(owner, "pull", batch, table=table, arrays=(asked[at], out[at]) if mine else (asked[at],))
    copied, late, shared, holders = [], [], [], []
    for owner in range(session.nodes):
        message = await session.receive("answer", batch, owner, table=table)
        if not (order is None and owner == session.rank):
            _check_answer(message, int(owners.starts[owner + 1] - owners.starts[owner]))
            await aside(partial(_place, out, owners, owner, message.arrays[4:]))
        copied.append(owners.positions(owner, message.arrays[0]))
        late.append(len(message.arrays[1]))
        shared.append(owners.positions(owner, message.arrays[2]))
        holders.append(message.arrays[3])
    all_shared, all_holders = np.concatenate(shared), np.concatenate(holders)
    pushed = None
    if len(all_shared):
        pushed = np.ones(len(keys), np.bool_)
        lower = (np.uint64(1) << np.uint64(session.rank)) - np.uint64(1)
        pushed[all_shared] = (all_holders & lower) == 0
    sharing = Shared.of(len(keys), all_shared.astype(np.int32), all_holders, session.rank, session.nodes)
    tell(session, batch, table, sharing)
    return Pulled(
        *(batch, table, keys, owners, np.concatenate(copied), tuple(late), all_shared, all_holders, pushed, sharing)
    )


def _check_answer(message: Message, asked: int) -> None:
    """Every row is there, copied or late: one that an owner forgot would be whatever was in memory before."""
    arrays = message.arrays
    told = [array.shape[0] if array.ndim else -1 for array in arrays]
    if len(arrays) in (5, 6) and told[0] + told[1] + told[4] == asked and told[2] == told[3]:
        return
    raise ProtocolError(
        f"batch {message.batch}: node {message.sender} was asked for {asked} rows of table {message.table!r}, but "
        f"answers ({message.note!r}) with arrays of {told}; all nodes must run one version of daskps"
    )


def _place(out: Floats, owners: Grouped, owner: int, arrays: tuple[Array, ...]) -> None:
    """An owner's rows into `out`: of all its keys, or of those at the positions that came with them."""
    rows, at = arrays[0], owners.slice(owner)
    if len(arrays) > 1:
        _scatter(out, owners.positions(owner, arrays[1]), rows)
    elif owners.order is not None:
        _scatter(out, owners.group(owner), rows)
    else:
        _check_rows(rows, at.stop - at.start, out)
        out[at] = rows


def _scatter(out: Floats, positions: Int64s, rows: Floats) -> None:
    """``out[positions] = rows``; positions were made here, so only what came has to be looked at."""
    _check_rows(rows, len(positions), out)
    library().link_scatter(rows=out, width=out.shape[1], positions=positions, n=len(positions), values=rows)


def _check_rows(rows: Array, count: int, out: Floats) -> None:
    if rows.dtype != np.float32 or rows.shape != (count, out.shape[1]):
        raise ProtocolError(
            f"{count} rows of {out.shape[1]} float32 values were wanted, but {rows.dtype} of shape {rows.shape} came"
        )


async def late_rows(session: Session, pulled: Pulled, out: Floats, aside: Work) -> AsyncIterator[Int64s]:
    """Put late rows into `out`, the array that `pull` was given, as they come; yields their positions."""
    for owner, missing in enumerate(pulled.late):
        step = 0
        while missing:
            message = await session.receive("late", pulled.batch, owner, step=step, table=pulled.table)
            positions = pulled.owners.positions(owner, message.arrays[0])
            here = pulled.owners.order is None and owner == session.rank  # the owner has put them there
            if not 0 < len(positions) <= missing or len(message.arrays) != (1 if here else 2):
                raise ProtocolError(
                    f"batch {pulled.batch}: node {owner} owes {missing} late rows of table {pulled.table!r}, but sends "
                    f"{len(positions)} in {len(message.arrays)} arrays; all nodes must run one version of daskps"
                )
            if not here:
                await aside(partial(_scatter, out, positions, message.arrays[1]))
            yield positions
            missing -= len(positions)
            step += 1


async def push(
    session: Session, pulled: Pulled, rows: Floats, snapshot: str, check_replicas: bool, aside: Work
) -> None:
    """Give every owner the trained rows (U, W) that this node is to push; `rows` may be reused when this returns.

    `snapshot` names the snapshot that holds this batch and none after it, or is empty; all nodes say the same.
    """
    for owner in range(session.nodes):
        arrays: tuple[Array, ...] = (pulled.keys, rows)
        if session.nodes > 1:
            arrays = await aside(partial(_pushed, pulled, owner, rows, check_replicas))
        session.send(owner, "push", pulled.batch, table=pulled.table, note=snapshot, arrays=arrays)
    await asyncio.gather(
        *(session.receive("taken", pulled.batch, owner, table=pulled.table) for owner in range(session.nodes))
    )


def _pushed(pulled: Pulled, owner: int, rows: Floats, check_replicas: bool) -> tuple[Array, ...]:
    """Keys and rows that this node pushes to an owner; with `check_replicas` also keys and hashes of shared ones."""
    at, group = pulled.owners.slice(owner), pulled.owners.group(owner)
    chosen = None if pulled.pushed is None else pulled.pushed[group]
    if pulled.owners.order is None and (chosen is None or chosen.all()):  # as they lie there
        keys, values = pulled.keys[at], rows[at]
    else:
        mine = group if chosen is None else group[chosen]
        keys, values = pulled.keys[mine], MEMORY.empty((len(mine), rows.shape[1]), np.float32)
        library().link_gather(rows=rows, width=rows.shape[1], positions=mine, n=len(mine), out=values)
    if not check_replicas:
        return keys, values
    shared = group[np.isin(group, pulled.shared)]
    return keys, values, pulled.keys[shared], hash_rows(rows[shared])


async def lookup(
    session: Session, batch: int, number: int, table: str, keys: Keys, owners: Grouped, out: Floats, aside: Work
) -> None:
    """Rows as they are after `batch`; nothing is inserted. `number` tells the lookups of a batch apart."""
    groups = [owners.group(owner) for owner in range(session.nodes)]
    for owner, group in enumerate(groups):
        session.send(owner, "lookup", batch, step=number, table=table, arrays=(keys[group],))
    for owner, group in enumerate(groups):
        message = await session.receive("found", batch + 1, owner, step=number, table=table)
        await aside(partial(_scatter, out, group, message.arrays[0]))


def hash_rows(rows: Floats) -> Keys:
    """64 bits of each row's bits; any one changed field gives another hash."""
    bits = rows.view(np.uint32).astype(np.uint64) + np.uint64(1)
    hashes: Keys = (bits * _ODD[: rows.shape[1]]).sum(axis=1, dtype=np.uint64)
    return hashes
