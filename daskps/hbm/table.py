"""HBM-PS: the rows of one batch and one table in the memory of a node's devices.

Input: the batch's distinct keys with their rows, and the row number of every occurrence. Output: pooled embeddings and
updated rows. Rows are distributed over the devices by a hash of the key. Global row numbers run through all shards, so
every device can read every row (peer access); the gradients of a shard are summed on the shard's device. Forwarded rows
are copied from the table of the previous batch, from device to device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pydantic
from pydantic import Field

from daskps.device.device import Array, Device, Workspace, check_array
from daskps.errors import ArgumentError, NonFiniteError, ProtocolError
from daskps.hbm.gradient import GRADIENT_LIMIT, Status, apply_sums, join_sources, sum_gradients, update_rows
from daskps.hbm.hash_table import Shard, Shards, build_table, find_rows, join_shards
from daskps.hbm.optimizer import Optimizer, OptimizerSettings
from daskps.hbm.pooling import Groups, Pooling, group_occurrences, pool_rows
from daskps.settings import Finite, Settings
from daskps.types import Floats, Int32s, Int64s, Keys, RowLayout, WorkingSet


def gather_rows(device: Device, *, rows: Array, index: Array, out: Array | None = None) -> Array:
    """Copy ``rows[index[i]]`` to ``out[i]`` and return `out`; rows are float32 (n, width). Where index[i] < 0, out[i]
    does not change."""
    check_array("gather_rows", "rows", rows, device, np.float32, (None, None))
    check_array("gather_rows", "index", index, device, np.int32, (None,))
    if out is None:
        out = device.zeros((len(index), rows.shape[1]), np.float32)
    check_array("gather_rows", "out", out, device, np.float32, (len(index), rows.shape[1]))
    width = rows.shape[1]
    device.launch("rows_gather", len(index), tiles=True, rows=rows, width=width, index=index, n=len(index), out=out)
    return out


def scatter_rows(device: Device, *, rows: Array, index: Array, values: Array) -> None:
    """Set ``rows[index[i]] = values[i]``. A row may occur at most once in `index`; entries below 0 are skipped."""
    check_array("scatter_rows", "rows", rows, device, np.float32, (None, None))
    check_array("scatter_rows", "index", index, device, np.int32, (None,))
    check_array("scatter_rows", "values", values, device, np.float32, (len(index), rows.shape[1]))
    width = rows.shape[1]
    device.launch(
        "rows_scatter", len(index), tiles=True, values=values, width=width, index=index, n=len(index), rows=rows
    )


def copy_rows(device: Device, *, shards: Shards, source: Array, rows: Array, target: Array) -> None:
    """Copy row ``source[i]`` of another table's shards, on any device, to ``rows[target[i]]``. Targets are distinct."""
    check_array("copy_rows", "rows", rows, device, np.float32, (None, None))
    check_array("copy_rows", "source", source, device, np.int32, (None,))
    check_array("copy_rows", "target", target, device, np.int32, (len(source),))
    if rows.shape[1] != shards.width:
        raise ArgumentError(f"copy_rows: rows of width {shards.width} do not fit rows of width {rows.shape[1]}")
    device.launch(
        "rows_copy",
        len(source),
        tiles=True,
        shards=shards.on(device),
        shard_count=len(shards.shards),
        **{"from": source, "to": target},
        n=len(source),
        width=shards.width,
        rows=rows,
    )


class InitialiserSettings(Settings):
    """Initial embeddings; they depend only on (seed, table, key)."""

    kind: Literal["constant", "uniform", "normal"] = Field(
        default="uniform", description="Distribution of the initial values."
    )
    scale: Finite = Field(
        default=0.01, description="The constant, the half-width of the interval, or the standard deviation."
    )

    @pydantic.model_validator(mode="after")
    def _width(self) -> InitialiserSettings:
        if self.kind != "constant" and self.scale < 0:
            raise ValueError(f"scale = {self.scale}: {self.kind} wants at least 0; only a constant may be negative")
        return self


class TableSettings(Settings):
    """Table: slots that share dimension, optimizer and initialiser."""

    dimension: int = Field(default=8, ge=1, le=256, description="Numbers in an embedding.")
    pooling: Literal["sum", "mean", "sqrtn"] = Field(
        default="sum",
        description="How the embeddings of a slot's keys become one vector. mean and sqrtn divide the sum by the "
        "number of keys (its root), not by the sum of their weights.",
    )
    optimizer: OptimizerSettings = Field(default=OptimizerSettings(), description="Optimizer of the rows.")
    initialiser: InitialiserSettings = Field(
        default=InitialiserSettings(), description="Initial embeddings of new keys."
    )


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Description of a table, the same for all its batches."""

    name: str
    number: int  # initial rows depend on it
    slots: tuple[int, ...]  # numbers of its slots in a batch
    dim: int  # embedding dimension
    pooling: Pooling
    optimizer: Optimizer
    layout: RowLayout
    slot_names: tuple[str, ...] = ()  # for messages

    def slot_name(self, slot: int) -> str:
        """Return the name of a slot of this table for messages."""
        return repr(self.slot_names[slot]) if self.slot_names else str(slot)


@dataclass(frozen=True, slots=True)
class StepPart:
    """Occurrences of one step in one table: split by the device of their example, and grouped by shard and row."""

    row_of: tuple[Array, ...]  # per device: row number of each occurrence in the device's examples
    offsets: tuple[Array, ...]  # per device (examples * slots + 1,), from 0
    weights: tuple[Array | None, ...]  # per device: weight of each occurrence
    groups: tuple[Groups, ...]  # per device: occurrences, in the examples of all devices, of the rows of its shard


class HbmTable:
    """Table of one batch on the devices of a node: `load` the pulled rows, train steps, then read `rows_on_host`.

    Many methods take positions: indices into the keys of the working set.
    """

    def __init__(self, spec: TableSpec, devices: Sequence[Device], working_set: WorkingSet, rows: Floats) -> None:
        self.spec, self.devices = spec, list(devices)
        self._set = working_set
        self._host = rows  # (U, width) in the order of the keys; with a single CPU device this is the table
        self._starts = working_set.shard_starts
        self._shards: Shards | None = None
        self._searchable = False
        self._row_at: Int32s | None = None  # row number of the key at each position; None: they are equal
        if working_set.key_of is not None:
            self._row_at = np.empty(len(working_set.keys), np.int32)
            self._row_at[working_set.key_of] = np.arange(len(working_set.keys), dtype=np.int32)
        self._statuses = [Status(device) for device in self.devices]
        self._scratch = [Workspace(device) for device in self.devices]

    @property
    def shards(self) -> Shards:
        """Return the shards with the rows on the devices; `load` must have been called."""
        assert self._shards is not None, "call load first"
        return self._shards

    def _keys(self, m: int) -> Keys:
        """Return the keys of shard m in the order of its rows."""
        rows = slice(self._starts[m], self._starts[m + 1])
        return self._set.keys[rows] if self._set.key_of is None else self._set.keys[self._set.key_of[rows]]

    def load(self) -> None:
        """Copy the pulled rows to the devices. A single CPU device uses them in place."""
        pieces = []
        for m, device in enumerate(self.devices):
            rows = slice(self._starts[m], self._starts[m + 1])
            at = rows if self._set.key_of is None else self._set.key_of[rows]
            pieces.append(Shard(device, device.from_host(self._host[at])))
        self._shards = join_shards(pieces)
        _wait(self.devices, self.devices)

    def put_deferred(self, positions: Int64s) -> None:
        """Copy deferred rows to the devices: those of the keys at `positions`, which arrived in the host array after
        `load`."""
        if self._in_place:
            return
        for m, rows, which in self._by_shard(positions):
            values = self.devices[m].from_host(self._host[positions[which]])
            scatter_rows(self.devices[m], rows=self.shards.shards[m].rows, index=rows, values=values)
        _wait(self.devices, self.devices)

    def copy_from(self, previous: HbmTable, positions: Int64s) -> None:
        """Copy forwarded rows, those of the keys at `positions`, from the previous batch's table, device to device.

        `previous` may be freed when this returns, even if the devices are still copying.
        """
        previous.make_searchable()
        _wait(self.devices, previous.devices)
        for m, rows, which in self._by_shard(positions):
            device = self.devices[m]
            keys = device.from_host(self._set.keys[positions[which]])
            found = find_rows(device, shards=previous.shards, keys=keys)
            with device.active():
                lost = bool((found < 0).any())
            if lost:
                raise ProtocolError(f"table {self.spec.name!r}: a forwarded row is not in the previous batch's table")
            copy_rows(device, shards=previous.shards, source=found, rows=self.shards.shards[m].rows, target=rows)
        _wait(self.devices, self.devices)
        _wait(previous.devices, self.devices)  # their memory pools reuse freed memory at once
        previous.forget_search()

    @property
    def _in_place(self) -> bool:
        """Return True with a single CPU device: the table is then the host array that rows were pulled into."""
        return len(self.devices) == 1 and self.devices[0].kind == "cpu"

    def _by_shard(self, positions: Int32s | Int64s) -> Iterator[tuple[int, Array, Int64s]]:
        """Yield for each shard: its number, the shard's row numbers of those keys at `positions` that it holds, and the
        indices of these keys in `positions`."""
        rows = positions if self._row_at is None else self._row_at[positions]
        for m, device in enumerate(self.devices):
            which = np.flatnonzero((rows >= self._starts[m]) & (rows < self._starts[m + 1]))
            yield m, device.from_host((rows[which] - self._starts[m]).astype(np.int32)), which

    def make_searchable(self) -> None:
        """Build the hash table from keys to rows. Called only before a search: other tables do not pay for it."""
        if self._searchable:
            return
        pieces = []
        for m, shard in enumerate(self.shards.shards):
            keys = shard.device.from_host(self._keys(m))
            cells = build_table(shard.device, keys=keys, first_row=int(self._starts[m]))
            pieces.append(Shard(shard.device, shard.rows, cells))
        self._shards = join_shards(pieces)
        self._searchable = True

    def forget_search(self) -> None:
        """Free the hash table, after the last search."""
        self._shards = join_shards([Shard(shard.device, shard.rows) for shard in self.shards.shards])
        self._searchable = False

    def forget_scratch(self) -> None:
        """Free the scratch memory for other tables, after the last step."""
        self._scratch = [Workspace(device) for device in self.devices]

    # -- one step --------------------------------------------------------------------------------------------------

    def part(self, row_of: Int32s, offsets: Int64s, weights: Floats | None, example_starts: Sequence[int]) -> StepPart:
        """Split a step's occurrences by device (`example_starts` (M + 1,): each device's first example) and group them
        by shard."""
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
        """Return the pooled embeddings (examples, slots * dim) of device m's examples."""
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
        """Return the pooled embeddings of all examples of the batch; for predictions, with one device."""
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
        """Sum the gradients of every touched row over the devices and apply the optimizer to the rows."""
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
        """Return the positions (T,) of the touched keys and their gradient sums (T, dim), for the exchange with other
        nodes. The arrays are valid until the next step.
        """
        sources = join_sources(self.devices, gradients, slots=len(self.spec.slots), dim=self.spec.dim)
        sums = []
        for m, device in enumerate(self.devices):
            out = self._scratch[m].take("sums", (len(part.groups[m].touched), self.spec.dim), np.int64)
            found = sum_gradients(device, groups=part.groups[m], sources=sources, status=self._statuses[m], out=out)
            sums.append(device.to_host(found))
        return self.touched(part), sums[0] if len(sums) == 1 else np.concatenate(sums)

    def touched(self, part: StepPart) -> Int32s:
        """Return the positions (T,) of the keys that occur in the step."""
        if len(self.devices) == 1 and self._set.key_of is None:
            return self.devices[0].to_host(part.groups[0].touched)
        rows = [
            device.to_host(part.groups[m].touched) + np.int32(self._starts[m]) for m, device in enumerate(self.devices)
        ]
        touched, key_of = np.concatenate(rows), self._set.key_of
        return touched if key_of is None else key_of[touched].astype(np.int32)

    def apply(self, positions: Int32s, sums: Int64s, weight: float) -> None:
        """Apply the optimizer to the rows of the keys at `positions` (T,), with gradient sums (T, dim) of all nodes."""
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
        """Return the rows (n, width) of the keys at `positions`, on the host."""
        if self._in_place:
            return self._host[positions]
        out = np.empty((len(positions), self.spec.layout.width), np.float32)
        for m, rows, which in self._by_shard(positions):
            found = gather_rows(self.devices[m], rows=self.shards.shards[m].rows, index=rows)
            out[which] = self.devices[m].to_host(found)
        return out

    def put(self, positions: Int32s, rows: Floats) -> None:
        """Overwrite the rows of the keys at `positions` with `rows` (n, width) from the host."""
        if self._in_place:
            self._host[positions] = rows
            return
        for m, index, which in self._by_shard(positions):
            values = self.devices[m].from_host(rows[which])
            scatter_rows(self.devices[m], rows=self.shards.shards[m].rows, index=index, values=values)
        _wait(self.devices, self.devices)

    def check(self, part: StepPart, gradients: Sequence[Array]) -> None:
        """Raise NonFiniteError, naming the slot, if the step of `part` had a NaN, an infinity or an overflow."""
        try:
            for status in self._statuses:
                status.check()
        except NonFiniteError as error:
            slot = self._slot_of_bad_value(part, gradients)
            where = "" if slot is None else f", slot {self.spec.slot_name(slot)}"
            raise NonFiniteError(f"table {self.spec.name!r}{where}: {error}") from None

    def _slot_of_bad_value(self, part: StepPart, gradients: Sequence[Array]) -> int | None:
        """Return the slot of the first gradient that is not finite or too large, else of the first embedding that is
        not finite, else None."""
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
        """Return all rows (U, width) in the order of the keys, on the host. Valid until the table changes."""
        if self._in_place:
            return self._host
        for m, shard in enumerate(self.shards.shards):
            rows = slice(self._starts[m], self._starts[m + 1])
            at = rows if self._set.key_of is None else self._set.key_of[rows]
            self._host[at] = shard.device.to_host(shard.rows)
        return self._host


def _wait(devices: Sequence[Device], others: Sequence[Device]) -> None:
    """Make later work on `devices` wait for work launched on `others`: each device reads rows that others write."""
    for device in devices:
        device.wait_for(others)
