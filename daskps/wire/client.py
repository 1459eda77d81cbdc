"""The requester's side of pull and push: get the rows of a batch from their owners, and return them after training.

Input: a working set, in any order. Output: its rows, which rows are deferred and where they will come from, and which
other nodes hold the same rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from daskps.device.native import library
from daskps.errors import ProtocolError
from daskps.storage.partition import KeysByOwner
from daskps.types import Bools, Floats, Int64s, Keys
from daskps.wire.exchange import Shared, tell
from daskps.wire.message import Array, Message, MessageKind
from daskps.wire.owner import Executor
from daskps.wire.session import Session

# Odd multipliers of `hash_rows`, one per field of a row.
_ODD = np.array([0x9E3779B97F4A7C15 * (2 * i + 1) % 2**64 | 1 for i in range(4096)], np.uint64)


@dataclass(frozen=True, slots=True)
class PullResult:
    """Result of a pull: one table's working set on this node. Positions are indices into `keys`."""

    batch: int
    table: str
    keys: Keys  # (U,)
    owners: KeysByOwner
    forwarded: Int64s  # positions of forwarded rows: copied from this node's table of the previous batch once trained
    deferred: tuple[int, ...]  # by owner: number of deferred rows that it sends after an earlier batch has pushed them
    shared: Int64s  # positions of rows that other nodes hold too
    holders: Keys  # for each shared row, its holders: a bit set of ranks
    pushed: Bools | None  # (U,) True for rows that this node pushes; None: all of them
    sharing: Shared  # the shared rows by peer, for the exchange of gradient sums


async def run_inline(call: Callable[[], Any]) -> Any:
    """Run `call` on the event loop itself. Use it only where nothing else waits for the loop."""
    return call()


async def pull(
    session: Session, batch: int, table: str, keys: Keys, owners: KeysByOwner, out: Floats, copy_executor: Executor
) -> PullResult:
    """Send every owner a pull of its keys, even an empty one. When this returns, rows not deferred are in `out` (U, W).

    `copy_executor` runs the copying of rows away from the event loop.
    """
    order = owners.order
    asked = keys if order is None else await copy_executor(lambda: keys[order])
    for owner in range(session.nodes):
        at = owners.slice(owner)
        mine = order is None and owner == session.rank  # this node's own MEM-PS writes into `out`: no copy
        session.send(owner, MessageKind.PULL, batch, table=table, arrays=(asked[at], out[at]) if mine else (asked[at],))
    forwarded, deferred, shared, holders = [], [], [], []
    for owner in range(session.nodes):
        message = await session.receive(MessageKind.ANSWER, batch, owner, table=table)
        if not (order is None and owner == session.rank):
            _check_answer(message, int(owners.starts[owner + 1] - owners.starts[owner]))
            await copy_executor(partial(_place, out, owners, owner, message.arrays[4:]))
        forwarded.append(owners.positions(owner, message.arrays[0]))
        deferred.append(len(message.arrays[1]))
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
    return PullResult(
        *(batch, table, keys, owners, np.concatenate(forwarded), tuple(deferred)),
        *(all_shared, all_holders, pushed, sharing),
    )


def _check_answer(message: Message, asked: int) -> None:
    """Raise ProtocolError unless each row is sent, forwarded or deferred: a forgotten one would keep old memory."""
    arrays = message.arrays
    told = [array.shape[0] if array.ndim else -1 for array in arrays]
    if len(arrays) in (5, 6) and told[0] + told[1] + told[4] == asked and told[2] == told[3]:
        return
    raise ProtocolError(
        f"batch {message.batch}: node {message.sender} was asked for {asked} rows of table {message.table!r}, but "
        f"answers ({message.note!r}) with arrays of {told}; all nodes must run one version of daskps"
    )


def _place(out: Floats, owners: KeysByOwner, owner: int, arrays: tuple[Array, ...]) -> None:
    """Copy an owner's rows into `out`: the rows of all its keys, or of the positions in the second array, if any."""
    rows, at = arrays[0], owners.slice(owner)
    if len(arrays) > 1:
        _scatter(out, owners.positions(owner, arrays[1]), rows)
    elif owners.order is not None:
        _scatter(out, owners.group(owner), rows)
    else:
        _check_rows(rows, at.stop - at.start, out)
        out[at] = rows


def _scatter(out: Floats, positions: Int64s, rows: Floats) -> None:
    """Do ``out[positions] = rows``. Only `rows` are checked: they come from a peer, `positions` from this node."""
    _check_rows(rows, len(positions), out)
    library().link_scatter(rows=out, width=out.shape[1], positions=positions, n=len(positions), values=rows)


def _check_rows(rows: Array, count: int, out: Floats) -> None:
    """Raise ProtocolError unless `rows` are `count` float32 rows as wide as `out`."""
    if rows.dtype != np.float32 or rows.shape != (count, out.shape[1]):
        raise ProtocolError(
            f"{count} rows of {out.shape[1]} float32 values were wanted, but {rows.dtype} of shape {rows.shape} came"
        )


async def deferred_rows(
    session: Session, pulled: PullResult, out: Floats, copy_executor: Executor
) -> AsyncIterator[Int64s]:
    """Receive deferred rows into `out`, the array given to `pull`; yield their positions, message by message."""
    for owner, missing in enumerate(pulled.deferred):
        step = 0
        while missing:
            message = await session.receive(MessageKind.DEFERRED, pulled.batch, owner, step=step, table=pulled.table)
            positions = pulled.owners.positions(owner, message.arrays[0])
            here = pulled.owners.order is None and owner == session.rank  # MEM-PS has written them into `out`
            if not 0 < len(positions) <= missing or len(message.arrays) != (1 if here else 2):
                raise ProtocolError(
                    f"batch {pulled.batch}: node {owner} owes {missing} deferred rows of table {pulled.table!r}, but "
                    f"sends {len(positions)} in {len(message.arrays)} arrays; all nodes must run one version of daskps"
                )
            if not here:
                await copy_executor(partial(_scatter, out, positions, message.arrays[1]))
            yield positions
            missing -= len(positions)
            step += 1


async def push(
    session: Session,
    pulled: PullResult,
    rows: Floats,
    snapshot: str,
    check_replicas: bool,
    copy_executor: Executor,
    empty: Callable[..., Array] = np.empty,
) -> None:
    """Send every owner the trained rows (U, W) that this node pushes; `rows` may be reused when this returns.

    `snapshot` names the snapshot that holds this batch and none after it, or is empty; it is equal on all nodes.
    """
    for owner in range(session.nodes):
        arrays: tuple[Array, ...] = (pulled.keys, rows)
        if session.nodes > 1:
            arrays = await copy_executor(partial(_pushed, pulled, owner, rows, check_replicas, empty))
        session.send(owner, MessageKind.PUSH, pulled.batch, table=pulled.table, note=snapshot, arrays=arrays)
    await asyncio.gather(
        *(session.receive(MessageKind.TAKEN, pulled.batch, owner, table=pulled.table) for owner in range(session.nodes))
    )


def _pushed(
    pulled: PullResult, owner: int, rows: Floats, check_replicas: bool, empty: Callable[..., Array]
) -> tuple[Array, ...]:
    """Return the keys and rows to push to an owner; with `check_replicas` also keys and hashes of all shared rows."""
    at, group = pulled.owners.slice(owner), pulled.owners.group(owner)
    chosen = None if pulled.pushed is None else pulled.pushed[group]
    if pulled.owners.order is None and (chosen is None or chosen.all()):  # the group is contiguous: no copy
        keys, values = pulled.keys[at], rows[at]
    else:
        mine = group if chosen is None else group[chosen]
        keys, values = pulled.keys[mine], empty((len(mine), rows.shape[1]), np.float32)
        library().link_gather(rows=rows, width=rows.shape[1], positions=mine, n=len(mine), out=values)
    if not check_replicas:
        return keys, values
    shared = group[np.isin(group, pulled.shared)]
    return keys, values, pulled.keys[shared], hash_rows(rows[shared])


async def lookup(
    session: Session,
    batch: int,
    number: int,
    table: str,
    keys: Keys,
    owners: KeysByOwner,
    out: Floats,
    copy_executor: Executor,
) -> None:
    """Read rows as they are after `batch` into `out`; insert nothing. `number` distinguishes the lookups of a batch."""
    groups = [owners.group(owner) for owner in range(session.nodes)]
    for owner, group in enumerate(groups):
        session.send(owner, MessageKind.LOOKUP, batch, step=number, table=table, arrays=(keys[group],))
    for owner, group in enumerate(groups):
        message = await session.receive(MessageKind.FOUND, batch + 1, owner, step=number, table=table)
        await copy_executor(partial(_scatter, out, group, message.arrays[0]))


def hash_rows(rows: Floats) -> Keys:
    """Return a 64-bit hash of each row's bits. A change of any one field gives another hash."""
    bits = rows.view(np.uint32).astype(np.uint64) + np.uint64(1)
    hashes: Keys = (bits * _ODD[: rows.shape[1]]).sum(axis=1, dtype=np.uint64)
    return hashes
