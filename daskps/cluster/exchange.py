"""Gradient sums between the nodes that hold the same rows, once per step, so that replicas stay equal bit for bit.

In: the rows a node touched in a step and their sums (fixed point, int64). Out: the rows that any node touched and the
sums over all nodes. For `sync_every` above 1 also the merging of rows that grew apart. Two nodes number the keys that
both hold by key order, so 4 bytes name a row in a message and no key is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from daskps.cluster.message import Array
from daskps.cluster.session import Session
from daskps.types import Bools, Floats, Int32s, Int64s, Keys, RowLayout


@dataclass(frozen=True, slots=True)
class Touched:
    """Rows of one table that occur in a step, each once. A row whose gradient is zero is touched all the same."""

    rows: Int32s  # (T,) positions of their keys in what the node has pulled
    sums: Int64s  # (T, D)


@dataclass(frozen=True, slots=True)
class Shared:
    """A node's view of one batch of one table: which of its rows other nodes hold too."""

    rows: int  # U, of this node
    with_peer: Mapping[int, Int32s]  # rows that rank and this node hold, in the order of their keys

    @classmethod
    def of(cls, keys: Keys, positions: Int64s, holders: Keys, rank: int, nodes: int) -> Shared:
        """From a pull: `holders[i]` is the bit set of the ranks that hold ``keys[positions[i]]``."""
        order = np.argsort(keys[positions], kind="stable")
        rows, holders = positions[order].astype(np.int32), holders[order]
        return cls(
            len(keys),
            {peer: rows[(holders >> np.uint64(peer)) & np.uint64(1) == 1] for peer in range(nodes) if peer != rank},
        )


class Exchange:
    """The steps of one batch, on one node, over all tables."""

    def __init__(self, session: Session, batch: int, shared: Mapping[str, Shared]) -> None:
        self._session = session
        self._batch = batch
        self._shared = dict(sorted(shared.items()))
        self._place = {table: np.full(view.rows, -1, np.int32) for table, view in self._shared.items()}

    async def sum_rows(self, step: int, touched: Mapping[str, Touched]) -> dict[str, Touched]:
        """Sums over all nodes of every row that any of them touched. One message to each peer, empty ones too."""
        session = self._session
        session.check()  # one node alone would never hear that its run is over
        for table, mine in touched.items():
            self._place[table][mine.rows] = np.arange(len(mine.rows), dtype=np.int32)
        for peer in session.peers:
            parts: list[Array] = []
            for table, view in self._shared.items():
                place = self._place[table][view.with_peer[peer]]
                index = np.flatnonzero(place >= 0)
                parts += [index.astype(np.uint32), touched[table].sums[place[index]]]
            session.send(peer, "sums", self._batch, step=step, arrays=tuple(parts))
        received = {}
        for peer in session.peers:
            arrays = (await session.receive("sums", self._batch, peer, step=step)).arrays
            received[peer] = dict(zip(self._shared, zip(arrays[::2], arrays[1::2], strict=True), strict=True))
        return {table: self._add(table, mine, received) for table, mine in touched.items()}

    def _add(self, table: str, mine: Touched, received: Mapping[int, Mapping[str, tuple[Array, Array]]]) -> Touched:
        """Own sums and the peers', by rank. Integer addition is associative, so the own ones may lie there already."""
        place, view = self._place[table], self._shared[table]
        rows, sums, count = mine.rows, mine.sums, len(mine.rows)
        targets = {peer: view.with_peer[peer][tables[table][0]] for peer, tables in received.items()}
        for theirs in targets.values():
            fresh = theirs[place[theirs] < 0]
            place[fresh] = np.arange(count, count + len(fresh), dtype=np.int32)
            count += len(fresh)
            rows = np.concatenate([rows, fresh])
        total = np.zeros((count, sums.shape[1]), np.int64)
        total[: len(sums)] = sums
        for peer, theirs in targets.items():
            total[place[theirs]] += received[peer][table][1]
        place[rows] = -1
        return Touched(rows, total)

    async def merge_rows(
        self,
        step: int,
        touched: Mapping[str, Bools],
        layouts: Mapping[str, RowLayout],
        gather: Callable[[str, Int32s], Floats],
    ) -> dict[str, tuple[Int32s, Floats]]:
        """For `sync_every` above 1: the merged values of all shared rows that a holder touched since the last merge.

        `touched[table]` marks this node's rows (U,); `gather(table, rows)` reads them. Float fields become the mean
        over the holders, added by rank in float64; counts (uint32) the largest.
        """
        session, merged = self._session, {}
        for peer in session.peers:
            marked = tuple(np.packbits(touched[table][view.with_peer[peer]]) for table, view in self._shared.items())
            session.send(peer, "touched", self._batch, step=step, arrays=marked)
        marks = {table: touched[table].copy() for table in self._shared}
        for peer in session.peers:
            arrays = (await session.receive("touched", self._batch, peer, step=step)).arrays
            for bits, (table, view) in zip(arrays, self._shared.items(), strict=True):
                rows = view.with_peer[peer]
                marks[table][rows] |= np.unpackbits(bits, count=len(rows)).view(np.bool_)
        # All holders of a row have now seen the same marks, so both sides of each pair choose the same rows.
        chosen = {
            (peer, table): rows[marks[table][rows]]
            for table, view in self._shared.items()
            for peer, rows in view.with_peer.items()
        }
        for peer in session.peers:
            parts = tuple(gather(table, chosen[peer, table]) for table in self._shared)
            session.send(peer, "rows", self._batch, step=step, arrays=parts)
        received = {}
        for peer in session.peers:
            message = await session.receive("rows", self._batch, peer, step=step)
            received[peer] = dict(zip(self._shared, message.arrays, strict=True))
        for table in self._shared:
            rows = np.unique(np.concatenate([chosen[peer, table] for peer in session.peers]))
            values = [
                (rows, gather(table, rows)) if rank == session.rank else (chosen[rank, table], received[rank][table])
                for rank in range(session.nodes)
            ]
            merged[table] = (rows, _mean(layouts[table], rows, values))
        return merged


def _mean(layout: RowLayout, rows: Int32s, values: list[tuple[Int32s, Floats]]) -> Floats:
    """Merge `values` (rows and their bits, by rank) into one value a row."""
    total = np.zeros((len(rows), layout.width), np.float64)
    most = np.zeros((len(rows), layout.width), np.uint32)
    count = np.zeros((len(rows), 1), np.float64)
    for theirs, bits in values:
        place = np.searchsorted(rows, theirs)
        with np.errstate(invalid="ignore"):  # counts read as floats may be anything; they are not used as such
            total[place] += bits
        most[place] = np.maximum(most[place], bits.view(np.uint32))
        count[place] += 1
    with np.errstate(invalid="ignore", over="ignore"):
        mean = (total / count).astype(np.float32)
    for field in layout.fields:
        if field.dtype == "uint32":
            mean.view(np.uint32)[:, layout.place(field.name)] = most[:, layout.place(field.name)]
    return mean
