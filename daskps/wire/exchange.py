"""Exchange of gradient sums between the nodes that hold the same rows, once per step: replicas stay bit-identical.

Input: the rows that a node touched in a step and their gradient sums (fixed point, int64). Output: the rows that any
node touched and the sums over all nodes. For `sync_every` above 1, rows whose replicas differ are merged here too.

An owner lists the rows shared by two nodes in the same order to both. So once per batch the two nodes send each other
the positions of these rows. After that a row is identified in a message by 4 bytes, its position at the receiver, and
no key is looked up. `pack` and `add` compute in the stage's thread; between them, a `Collective` exchanges what `pack`
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskps.device.native import library
from daskps.device.pool import ComputePool
from daskps.errors import NonFiniteError, ProtocolError
from daskps.types import Bools, Floats, Int32s, Int64s, Keys, RowLayout
from daskps.wire.collective import Tag, swap
from daskps.wire.message import Array, MessageKind
from daskps.wire.session import Session

# For every table, ordered by name, three arrays: the rows' positions at the receiver (int32), their bytes per value
# (uint8), the sums as bytes (uint8).
Packed = tuple[Array, ...]
MALFORMED, TOO_LARGE = -1, -2  # error codes of sums.cpp


@dataclass(frozen=True, slots=True)
class Touched:
    """Rows of one table that occur in a step, each once. A row with a zero gradient is touched too."""

    rows: Int32s  # (T,) positions of their keys in the node's working set
    sums: Int64s  # (T, D) gradient sums, fixed point


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared rows of one table in one batch: which rows of this node other nodes hold too."""

    rows: int  # U, the number of rows in this node's working set
    with_peer: Mapping[int, Int32s]  # by peer: positions of the rows that both hold, in the same order on both nodes

    @classmethod
    def of(cls, rows: int, positions: Int32s, holders: Keys, rank: int, nodes: int) -> Shared:
        """Return the shared rows of a pull: `holders[i]` is the bit set of ranks that hold row ``positions[i]``.

        Rows are in the owners' order.
        """
        peers = [peer for peer in range(nodes) if peer != rank]
        return cls(rows, {peer: positions[holders & np.uint64(1 << peer) != 0] for peer in peers})


def tell(session: Session, batch: int, table: str, shared: Shared) -> None:
    """Send each peer this node's positions of the rows that both hold; `Exchange.begin` receives them."""
    for peer, rows in shared.with_peer.items():
        session.send(peer, MessageKind.POSITIONS, batch, table=table, arrays=(rows,))


class Buffers:
    """Send buffers, kept from step to step: newly allocated pages cost as much time as the packing itself.

    Each buffer exists twice, and steps alternate between the two. A peer sends its sums of a step only after it has
    added this node's sums of the step before. So when a step ends, the buffers of the step before it have been read.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str, str, bool], Array] = {}
        self._turn = False

    def turn(self) -> None:
        """Begin a step: switch to the other set of buffers."""
        self._turn = not self._turn

    def take(self, peer: int, table: str, name: str, size: int, dtype: type[np.generic]) -> Array:
        """Return an array of at least `size` elements with undefined content."""
        which = (peer, table, name, self._turn)
        kept = self._kept.get(which)
        if kept is None or len(kept) < size:
            kept = self._kept[which] = np.empty(size + size // 4, dtype)
        return kept


class Exchange:
    """Exchange of gradient sums for the steps of one batch, on one node, over all tables."""

    def __init__(
        self, session: Session, batch: int, shared: Mapping[str, Shared], buffers: Buffers, pool: ComputePool
    ) -> None:
        self._session = session
        self._batch = batch
        self._shared = dict(sorted(shared.items()))
        self._place = {table: np.full(view.rows, -1, np.int32) for table, view in self._shared.items()}
        self._theirs: dict[tuple[int, str], Int32s] = {}  # (U,) this node's rows -> positions at the peer; -1: not held
        self._buffers, self._pool = buffers, pool

    async def begin(self) -> None:
        """Receive the peers' positions of the shared rows, which they have sent with `tell`."""
        for peer in self._session.peers:
            for table, view in self._shared.items():
                numbers = (await self._session.receive(MessageKind.POSITIONS, self._batch, peer, table=table)).arrays[0]
                if numbers.dtype != np.int32 or len(numbers) != len(view.with_peer[peer]):
                    raise self._error(peer, table, MALFORMED)
                theirs = self._theirs[peer, table] = np.full(view.rows, -1, np.int32)
                theirs[view.with_peer[peer]] = numbers

    def pack(self, touched: Mapping[str, Touched]) -> dict[int, Packed]:
        """Return the arrays to send to each peer: positions, widths and bytes of every table (format: sums.cpp)."""
        self._buffers.turn()
        pairs = [(peer, table) for peer in self._session.peers for table in self._shared]
        packed = self._pool.map(lambda pair: self._pack(*pair, touched[pair[1]]), pairs)
        tables = len(self._shared)
        return {
            peer: tuple(array for arrays in packed[first : first + tables] for array in arrays)
            for first, peer in zip(range(0, len(packed), tables), self._session.peers, strict=True)
        }

    def _pack(self, peer: int, table: str, mine: Touched) -> Packed:
        """Return the three arrays of one table for one peer: only rows that the peer holds too."""
        capacity, dim = min(len(mine.rows), len(self._shared[table].with_peer[peer])), mine.sums.shape[1]
        numbers = self._buffers.take(peer, table, "numbers", capacity, np.int32)
        widths = self._buffers.take(peer, table, "widths", capacity, np.uint8)
        values = self._buffers.take(peer, table, "bytes", capacity * dim * 8 + 8, np.uint8)
        count = np.empty(1, np.int64)
        size = library().link_pack(
            rows=mine.rows,
            n=len(mine.rows),
            theirs=self._theirs[peer, table],
            sums=mine.sums,
            dim=dim,
            numbers=numbers,
            widths=widths,
            bytes=values,
            count=count,
        )
        rows = int(count[0])
        return numbers[:rows], widths[:rows], values[:size]

    def add(self, touched: Mapping[str, Touched], received: Mapping[int, Packed]) -> dict[str, tuple[Touched, Touched]]:
        """Add the peers' sums to this node's own. Integer addition is associative, so it can be done in place."""
        if any(len(arrays) != 3 * len(self._shared) for arrays in received.values()):
            raise ProtocolError(f"node {self._session.rank}, batch {self._batch}: sums of other tables than here")
        numbers = range(len(self._shared))
        sums = self._pool.map(lambda number: self._add(number, touched, received), numbers)
        return dict(zip(self._shared, sums, strict=True))

    def _add(
        self, number: int, touched: Mapping[str, Touched], received: Mapping[int, Packed]
    ) -> tuple[Touched, Touched]:
        """Return one table's rows touched here and the rows that only peers touched, with sums over all nodes."""
        table = list(self._shared)[number]
        mine, place = touched[table], self._place[table]
        arrays = {peer: packed[3 * number : 3 * number + 3] for peer, packed in received.items()}
        capacity = sum(len(numbers) for numbers, _, _ in arrays.values())
        dim, count = mine.sums.shape[1], 0
        rows = self._buffers.take(-1, table, "rows", capacity, np.int32)
        sums = self._buffers.take(-1, table, "sums", capacity * dim, np.int64)
        library().link_place(rows=mine.rows, n=len(mine.rows), forget=0, place=place)
        for peer, (numbers, widths, values) in arrays.items():
            if len(widths) != len(numbers):
                raise self._error(peer, table, MALFORMED)
            found = library().link_add(
                numbers=numbers,
                widths=widths,
                count=len(numbers),
                bytes=values,
                size=len(values),
                dim=dim,
                place=place,
                rows=len(place),
                own=len(mine.rows),
                sums=mine.sums,
                fresh_rows=rows,
                fresh=sums,
                fresh_count=count,
            )
            if found < 0:
                raise self._error(peer, table, found)
            count = found
        fresh = Touched(rows[:count], sums[: count * dim].reshape(count, dim))
        for one in (mine, fresh):
            library().link_place(rows=one.rows, n=len(one.rows), forget=1, place=place)
        return mine, fresh

    def _error(self, peer: int, table: str, found: int) -> Exception:
        """Return the exception for an error code of sums.cpp."""
        where = f"node {self._session.rank}, batch {self._batch}: sums of node {peer} for table {table!r}"
        if found == TOO_LARGE:
            return NonFiniteError(
                f"{where} passed 33,554,432 in magnitude; lower the learning rate, set clip_norm, or look for bad input"
            )
        return ProtocolError(f"{where} are malformed; all nodes must run one job and one version of daskps")

    async def merge_rows(
        self,
        step: int,
        touched: Mapping[str, Bools],
        layouts: Mapping[str, RowLayout],
        gather: Callable[[str, Int32s], Floats],
        base: Callable[[str, Int32s], Floats] | None = None,
    ) -> dict[str, tuple[Int32s, Floats]]:
        """Return the merged values of all shared rows that any holder touched since the last merge.

        For `sync_every` above 1. `touched[table]` marks this node's rows (U,). `gather(table, rows)` reads their
        values, `base(table, rows)` their values after the last merge, when all replicas were equal; only tables with a
        summed field need it. Each field is merged by its own rule (`daskps.types.Field`).
        """
        session, merged = self._session, {}
        marked = {
            peer: tuple(np.packbits(touched[table][view.with_peer[peer]]) for table, view in self._shared.items())
            for peer in session.peers
        }
        marks = {table: touched[table].copy() for table in self._shared}
        for peer, arrays in (await swap(session, Tag(MessageKind.TOUCHED, self._batch, step), marked)).items():
            wanted = {table: ((len(view.with_peer[peer]) + 7) // 8,) for table, view in self._shared.items()}
            self._check_merge(peer, arrays, wanted, np.uint8)
            for bits, (table, view) in zip(arrays, self._shared.items(), strict=True):
                rows = view.with_peer[peer]
                marks[table][rows] |= np.unpackbits(bits, count=len(rows)).view(np.bool_)
        # All holders of a row have now seen the same marks, so both sides of each pair choose the same rows.
        chosen = {
            (peer, table): rows[marks[table][rows]]
            for table, view in self._shared.items()
            for peer in session.peers
            for rows in (view.with_peer[peer],)
        }
        parts = {peer: tuple(gather(table, chosen[peer, table]) for table in self._shared) for peer in session.peers}
        received = {}
        for peer, arrays in (await swap(session, Tag(MessageKind.REPLICAS, self._batch, step), parts)).items():
            shapes = {table: (len(chosen[peer, table]), layouts[table].width) for table in self._shared}
            self._check_merge(peer, arrays, shapes, np.float32)
            received[peer] = dict(zip(self._shared, arrays, strict=True))
        for table in self._shared:
            rows = np.unique(np.concatenate([chosen[peer, table] for peer in session.peers]))
            values = [
                (rows, gather(table, rows)) if rank == session.rank else (chosen[rank, table], received[rank][table])
                for rank in range(session.nodes)
            ]
            layout = layouts[table]
            before = base(table, rows) if base is not None and layout.has_sums else None
            merged[table] = (rows, merge_replicas(layout, rows, values, before))
        return merged

    def _check_merge(
        self, peer: int, arrays: Packed, wanted: Mapping[str, tuple[int, ...]], dtype: type[np.generic]
    ) -> None:
        """Raise ProtocolError unless there is one array per table with the expected shape.

        NumPy would broadcast an array of a wrong shape silently.
        """
        if [(array.dtype, array.shape) for array in arrays] != [(np.dtype(dtype), shape) for shape in wanted.values()]:
            raise ProtocolError(
                f"node {self._session.rank}, batch {self._batch}: to be merged with node {peer} are {dict(wanted)} of "
                f"{dtype.__name__}, but {[(array.dtype.name, array.shape) for array in arrays]} came"
            )


def merge_replicas(
    layout: RowLayout, rows: Int32s, replicas: list[tuple[Int32s, Floats]], base: Floats | None = None
) -> Floats:
    """Return the merged rows (n, width), each field by its merge rule.

    `rows` are the positions of the merged rows, ascending. `replicas` has the positions and values of each holder's
    rows, in rank order. `base` (n, width) has the rows after the last merge; only summed fields need it. Sums and means
    are added in rank order, in float64 or int64; a summed uint32 stays within its range.
    """
    places = [np.searchsorted(rows, theirs) for theirs, _ in replicas]
    holders = np.zeros((len(rows), 1), np.int64)
    for place in places:
        holders[place] += 1
    merged = np.empty((len(rows), layout.width), np.float32)
    for field in layout.fields:
        columns, kind = layout.place(field.name), np.dtype(field.dtype)
        values = [(place, bits.view(kind)[:, columns]) for place, (_, bits) in zip(places, replicas, strict=True)]
        out = merged.view(kind)[:, columns]
        if field.merge == "max":
            out[...] = 0 if kind.kind == "u" else -np.inf
            for place, value in values:
                out[place] = np.maximum(out[place], value)
            continue
        total: Any = np.zeros(out.shape, np.float64 if kind.kind == "f" else np.int64)
        with np.errstate(invalid="ignore", over="ignore"):
            for place, value in values:
                total[place] += value
            if field.merge == "mean":
                total = total / holders if kind.kind == "f" else total // holders
            else:
                assert base is not None, f"field {field.name!r} is summed: the rows after the last merge are needed"
                total -= (holders - 1) * base.view(kind)[:, columns]
            if kind.kind == "u":
                total = np.clip(total, 0, np.iinfo(kind).max)
            out[...] = total.astype(kind)
    return merged
