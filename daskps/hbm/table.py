"""HBM-PS: the rows of one batch and one table in the memory of a node's devices.

In: the batch's distinct keys with their rows, and the row number of every occurrence. Out: pooled slots, updated rows.
Rows are dealt over the devices by key; global row numbers run through the shards, so every device reads every row (peer
access) and each shard's gradients are summed where the shard is. Late rows are copied from the table of the batch
before without leaving the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from daskps.backend.device import Array, Device
from daskps.backend.ops.gradient import GRADIENT_LIMIT, Status, apply_sums, join_sources, sum_gradients, update_rows
from daskps.backend.ops.group import Groups, group_occurrences
from daskps.backend.ops.optimizer import Optimizer
from daskps.backend.ops.pool import Pooling, pool_rows
from daskps.backend.ops.rows import copy_rows, gather_rows, scatter_rows
from daskps.backend.ops.table import Shard, Shards, build_table, find_rows, join_shards
from daskps.backend.workspace import Workspace
from daskps.errors import NonFiniteError, ProtocolError
from daskps.types import Floats, Int32s, Int64s, Keys, RowLayout, WorkingSet


@dataclass(frozen=True, slots=True)
class TableSpec:
    """What all batches of a table share."""

    name: str
    number: int  # part of what initial rows are a function of
    slots: tuple[int, ...]  # numbers of its slots in a batch
    dim: int
    pooling: Pooling
    optimizer: Optimizer
    layout: RowLayout
    slot_names: tuple[str, ...] = ()  # for messages

    def slot_name(self, slot: int) -> str:
        """What a message calls a slot of this table."""
        return repr(self.slot_names[slot]) if self.slot_names else str(slot)


@dataclass(frozen=True, slots=True)
class StepPart:
    """The occurrences of one step in one table: those of each device's examples, and of all together."""

    row_of: tuple[Array, ...]  # per device
    offsets: tuple[Array, ...]  # per device (examples * slots + 1,), from 0
    weights: tuple[Array | None, ...]
    groups: tuple[Groups, ...]  # per device: the occurrences, of all devices, of the rows of its shard


class HbmTable:
    """The table of one batch: `load` it with the rows that were pulled, then train steps on it."""

    def __init__(self, spec: TableSpec, devices: Sequence[Device], working_set: WorkingSet, rows: Floats) -> None:
        self.spec, self.devices = spec, list(devices)
        self._set = working_set
        self._host = rows  # (U, width) in the order of the keys; the table itself where there is one stand-in
        self._starts = working_set.shard_starts
        self._shards: Shards | None = None
        self._searchable = False
        self._row_at: Int32s | None = None  # row of the key at each position, where they differ
        if working_set.key_of is not None:
            self._row_at = np.empty(len(working_set.keys), np.int32)
            self._row_at[working_set.key_of] = np.arange(len(working_set.keys), dtype=np.int32)
        self._statuses = [Status(device) for device in self.devices]
        self._scratch = [Workspace(device) for device in self.devices]

    @property
    def shards(self) -> Shards:
        """The rows on the devices, after `load`."""
        assert self._shards is not None, "load comes first"
        return self._shards

    def _keys(self, m: int) -> Keys:
        """The keys of shard m, in the order of its rows."""
        rows = slice(self._starts[m], self._starts[m + 1])
        return self._set.keys[rows] if self._set.key_of is None else self._set.keys[self._set.key_of[rows]]

    def load(self) -> None:
        """Put the rows on the devices; a single stand-in uses them where they are."""
        pieces = []
        for m, device in enumerate(self.devices):
            rows = slice(self._starts[m], self._starts[m + 1])
            at = rows if self._set.key_of is None else self._set.key_of[rows]
            pieces.append(Shard(device, device.from_host(self._host[at])))
        self._shards = join_shards(pieces)

    def put_late(self, positions: Int64s) -> None:
        """Rows of the keys at `positions` came after `load`, to where the others were pulled: put them in place."""
        if self._in_place:
            return
        for m, rows, which in self._by_shard(positions):
            values = self.devices[m].from_host(self._host[positions[which]])
            scatter_rows(self.devices[m], rows=self.shards.shards[m].rows, index=rows, values=values)

    def copy_from(self, previous: HbmTable, positions: Int64s) -> None:
        """Take the rows of the keys at `positions` from the table of the batch before, device to device."""
        previous.make_searchable()
        for m, rows, which in self._by_shard(positions):
            device = self.devices[m]
            keys = device.from_host(self._set.keys[positions[which]])
            found = find_rows(device, shards=previous.shards, keys=keys)
            with device.active():
                lost = bool((found < 0).any())
            if lost:
                raise ProtocolError(f"table {self.spec.name!r}: a late row is not in the table of the batch before")
            copy_rows(device, shards=previous.shards, source=found, rows=self.shards.shards[m].rows, target=rows)
        previous.forget_search()

    @property
    def _in_place(self) -> bool:
        """One stand-in: the table is the memory that rows were pulled into."""
        return len(self.devices) == 1 and self.devices[0].kind == "cpu"

    def _by_shard(self, positions: Int32s | Int64s) -> Iterator[tuple[int, Array, Int64s]]:
        """For each shard: its number, its rows of the keys at `positions`, and which of the positions they are."""
        rows = positions if self._row_at is None else self._row_at[positions]
        for m, device in enumerate(self.devices):
            which = np.flatnonzero((rows >= self._starts[m]) & (rows < self._starts[m + 1]))
            yield m, device.from_host((rows[which] - self._starts[m]).astype(np.int32)), which

    def make_searchable(self) -> None:
        """Build the hash table from keys to rows; only what somebody searches pays for it."""
        if self._searchable:
            return
        pieces = []
        for m, shard in enumerate(self.shards.shards):
            keys = shard.device.from_host(self._keys(m))
            slots = build_table(shard.device, keys=keys, first_row=int(self._starts[m]))
            pieces.append(Shard(shard.device, shard.rows, slots))
        self._shards = join_shards(pieces)
        self._searchable = True

    def forget_search(self) -> None:
        """Nobody searches any more: let the hash table go."""
        self._shards = join_shards([Shard(shard.device, shard.rows) for shard in self.shards.shards])
        self._searchable = False

    def forget_scratch(self) -> None:
        """No step comes any more: what they were computed in is for other tables."""
        self._scratch = [Workspace(device) for device in self.devices]

    # -- one step --------------------------------------------------------------------------------------------------

    def part(self, row_of: Int32s, offsets: Int64s, weights: Floats | None, example_starts: Sequence[int]) -> StepPart:
        """Cut a step's occurrences by device (``example_starts``, M + 1) and group them by shard."""
        slots = len(self.spec.slots)
        rows_of, bag_offsets, weights_of = [], [], []
        for m, device in enumerate(self.devices):
            bags = slice(example_starts[m] * slots, example_starts[m + 1] * slots + 1)
            here = offsets[bags]
            first, last = int(here[0]), int(here[-1])
            rows_of.append(device.from_host(row_of[first:last]))
            bag_offsets.append(device.from_host(here - first))
            weights_of.append(None if weights is None else device.from_host(weights[first:last]))
        base, end = int(offsets[0]), int(offsets[-1])
        groups = tuple(
            group_occurrences(
                device,
                row_of=device.from_host(row_of[base:end]),
                offsets=device.from_host(offsets - base),
                slots=slots,
                first_row=int(self._starts[m]),
                row_count=int(self._starts[m + 1] - self._starts[m]),
                pooling=self.spec.pooling,
                weights=None if weights is None else device.from_host(weights[base:end]),
                workspace=self._scratch[m],
            )
            for m, device in enumerate(self.devices)
        )
        return StepPart(tuple(rows_of), tuple(bag_offsets), tuple(weights_of), groups)

    def pool(self, part: StepPart, m: int, out: Array | None = None) -> Array:
        """Pooled slots (examples, slots * dim) of device m's examples."""
        return pool_rows(
            self.devices[m],
            shards=self.shards,
            dim=self.spec.dim,
            row_of=part.row_of[m],
            offsets=part.offsets[m],
            slots=len(self.spec.slots),
            pooling=self.spec.pooling,
            weights=part.weights[m],
            out=out,
        )

    def pool_all(self, working_set: WorkingSet) -> Array:
        """Pooled slots of every example of the batch, on a table of one device; for predictions."""
        device = self.devices[0]
        return pool_rows(
            device,
            shards=self.shards,
            dim=self.spec.dim,
            row_of=device.from_host(working_set.row_of),
            offsets=device.from_host(working_set.offsets),
            slots=len(self.spec.slots),
            pooling=self.spec.pooling,
            weights=None if working_set.weights is None else device.from_host(working_set.weights),
        )

    def update(self, part: StepPart, gradients: Sequence[Array], weight: float) -> None:
        """Sum the gradients of every touched row over the devices and step the rows."""
        sources = join_sources(self.devices, gradients, slots=len(self.spec.slots), dim=self.spec.dim)
        for m, device in enumerate(self.devices):
            update_rows(
                device,
                groups=part.groups[m],
                sources=sources,
                optimizer=self.spec.optimizer,
                weight=weight,
                rows=self.shards.shards[m].rows,
                status=self._statuses[m],
            )

    def sum(self, part: StepPart, gradients: Sequence[Array]) -> tuple[Int32s, Int64s]:
        """For the exchange between nodes: positions of the touched keys (T,), and the sums of their rows (T, dim).

        Valid until the next step.
        """
        sources = join_sources(self.devices, gradients, slots=len(self.spec.slots), dim=self.spec.dim)
        sums = []
        for m, device in enumerate(self.devices):
            out = self._scratch[m].take("sums", (len(part.groups[m].touched), self.spec.dim), np.int64)
            found = sum_gradients(device, groups=part.groups[m], sources=sources, status=self._statuses[m], out=out)
            sums.append(device.to_host(found))
        return self.touched(part), sums[0] if len(sums) == 1 else np.concatenate(sums)

    def touched(self, part: StepPart) -> Int32s:
        """Positions (T,) of the keys that occur in the step."""
        if len(self.devices) == 1 and self._set.key_of is None:
            return self.devices[0].to_host(part.groups[0].touched)
        rows = [
            device.to_host(part.groups[m].touched) + np.int32(self._starts[m]) for m, device in enumerate(self.devices)
        ]
        touched, key_of = np.concatenate(rows), self._set.key_of
        return touched if key_of is None else key_of[touched].astype(np.int32)

    def apply(self, positions: Int32s, sums: Int64s, weight: float) -> None:
        """Step the rows of the keys at `positions` (T,) with sums (T, dim) over all nodes."""
        rows = positions if self._row_at is None else self._row_at[positions]
        for m, device in enumerate(self.devices):
            first, last = int(self._starts[m]), int(self._starts[m + 1])
            mine = slice(None) if len(self.devices) == 1 else np.flatnonzero((rows >= first) & (rows < last))
            apply_sums(
                device,
                touched=device.from_host(rows[mine] - np.int32(first)),
                sums=device.from_host(sums[mine]),
                optimizer=self.spec.optimizer,
                weight=weight,
                rows=self.shards.shards[m].rows,
                status=self._statuses[m],
            )

    def get(self, positions: Int32s) -> Floats:
        """Rows (n, width) of the keys at `positions`, on the host."""
        if self._in_place:
            return self._host[positions]
        out = np.empty((len(positions), self.spec.layout.width), np.float32)
        for m, rows, which in self._by_shard(positions):
            found = gather_rows(self.devices[m], rows=self.shards.shards[m].rows, index=rows)
            out[which] = self.devices[m].to_host(found)
        return out

    def put(self, positions: Int32s, rows: Floats) -> None:
        """Rows (n, width) from the host become those of the keys at `positions`."""
        if self._in_place:
            self._host[positions] = rows
            return
        for m, index, which in self._by_shard(positions):
            values = self.devices[m].from_host(rows[which])
            scatter_rows(self.devices[m], rows=self.shards.shards[m].rows, index=index, values=values)

    def check(self, part: StepPart, gradients: Sequence[Array]) -> None:
        """Raise NonFiniteError, with the slot that it came from, if the step of `part` met a NaN or an overflow."""
        try:
            for status in self._statuses:
                status.check()
        except NonFiniteError as error:
            slot = self._suspect(part, gradients)
            where = "" if slot is None else f", slot {self.spec.slot_name(slot)}"
            raise NonFiniteError(f"table {self.spec.name!r}{where}: {error}") from None

    def _suspect(self, part: StepPart, gradients: Sequence[Array]) -> int | None:
        """The slot of the first gradient, or else of the first row, that is not a sound number."""
        for device, gradient in zip(self.devices, gradients, strict=True):
            bad = np.argwhere(~(np.abs(device.to_host(gradient)) < GRADIENT_LIMIT))
            if len(bad):
                return int(bad[0, 1]) // self.spec.dim
        embeddings = [shard.device.to_host(shard.rows)[:, : self.spec.dim] for shard in self.shards.shards]
        sound = np.isfinite(np.concatenate(embeddings)).all(axis=1)
        for m, device in enumerate(self.devices):
            unsound = np.flatnonzero(~sound[device.to_host(part.row_of[m])])
            if len(unsound):
                bag = np.searchsorted(device.to_host(part.offsets[m]), unsound[0], side="right") - 1
                return int(bag) % len(self.spec.slots)
        return None

    def rows_on_host(self) -> Floats:
        """All rows (U, width) in the order of the keys; valid until the table changes."""
        if self._in_place:
            return self._host
        for m, shard in enumerate(self.shards.shards):
            rows = slice(self._starts[m], self._starts[m + 1])
            at = rows if self._set.key_of is None else self._set.key_of[rows]
            self._host[at] = shard.device.to_host(shard.rows)
        return self._host
