"""The training loop over the steps of a batch: pool, forward and backward, sum gradients, update.

Input: a batch in flight whose tables are loaded. Output: updated rows and dense parameters, and progressive metrics:
every step is predicted before it is trained on. Example weights are scaled by the largest weight of the step over all
nodes; a step whose weights are all 0 changes nothing. On several nodes, the gradient sums of touched rows and of the
dense network are exchanged in every step, so all nodes make the same update, whatever part of the examples is theirs.
With `sync_every` above 1 each node steps alone, and the replicas are merged every `sync_every` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskps.data.order import Steps
from daskps.device.device import Array, Device
from daskps.errors import NonFiniteError
from daskps.hbm.table import HbmTable, StepPart
from daskps.nn.dense_model import DenseModel, merge, step_weight, weight_scale
from daskps.node.batches import NodeBatch
from daskps.predict import countable
from daskps.trace import OFF, Trace
from daskps.types import Batch, Floats, Int64s, WorkingSet
from daskps.wire.exchange import Touched
from daskps.wire.link import BatchExchange


class ReplicaMerger:
    """Merger of replicas for one batch on one node, for `sync_every` above 1."""

    def __init__(
        self, flight: NodeBatch, networks: Sequence[DenseModel], exchange: BatchExchange, sync_every: int
    ) -> None:
        self._tables = {table.spec.name: table for table in flight.tables}
        self._layouts = {table.spec.name: table.spec.layout for table in flight.tables}
        self._networks, self._exchange = list(dict.fromkeys(networks)), exchange
        self._first, self._steps, self._every = flight.token.first_step, len(flight.step_starts) - 1, sync_every
        self._touched = {name: np.zeros(len(one.keys), np.bool_) for name, one in flight.pulled.items()}
        self._base = {  # rows after the last merge, of tables with a summed field
            name: table.get(np.arange(len(self._touched[name]), dtype=np.int32)).copy()
            for name, table in self._tables.items()
            if table.spec.layout.has_sums
        }

    def note(self, table: HbmTable, part: StepPart) -> None:
        """Mark the rows of `part` as changed since the last merge."""
        self._touched[table.spec.name][table.touched(part)] = True

    def end_step(self, step: int) -> None:
        """End step number `step` of the batch; merge after every `sync_every` steps and after the batch's last step."""
        if (self._first + step + 1) % self._every and step + 1 < self._steps:
            return
        rows, (dense, steps) = self._exchange.merge(
            step,
            self._touched,
            self._layouts,
            lambda name, positions: self._tables[name].get(positions),
            lambda name, positions: self._base[name][positions],
            self._networks[0].pack(),
            self._networks[0].steps,
        )
        for name, (positions, merged) in rows.items():
            self._tables[name].put(positions, merged)
            if name in self._base:
                self._base[name][positions] = merged
            self._touched[name][:] = False
        for network in self._networks:
            network.unpack(dense, steps)


class Trainer:
    """Trainer of one node: M devices, each with its part of the examples and a replica of the network."""

    def __init__(
        self,
        devices: list[Device],
        networks: list[DenseModel],
        metrics: Any,
        steps: Steps,
        rows: int,
        sync_every: int = 1,
        trace: Trace = OFF,
    ) -> None:
        self.devices, self.networks, self.metrics = devices, networks, metrics
        self._trace = trace
        self._steps, self._rows, self._sync_every = steps, rows, sync_every
        self._ahead: list[StepPart] = []  # the inputs of the next step, by table

    def train(self, flight: NodeBatch, exchange: BatchExchange | None = None) -> None:
        """Train every step of the batch, in order; with `exchange`, together with the other nodes."""
        apart = None
        if exchange is not None and self._sync_every > 1:
            apart, exchange = ReplicaMerger(flight, self.networks, exchange, self._sync_every), None
        if flight.weights is None:
            largest = largest_weights(flight.batch, flight.step_starts)
        else:
            largest = np.max(flight.weights.wait(), axis=0)
        self._ahead = self._parts(flight, 0)
        for step in range(len(flight.step_starts) - 1):
            try:
                with self._trace.span("step", "step", step=flight.token.first_step + step):
                    self._step(flight, step, weight_scale(float(largest[step])), exchange, apart)
            except NonFiniteError as error:
                raise NonFiniteError(f"{flight.token}, mini-batch {flight.token.first_step + step}: {error}") from None
        for table in flight.tables:
            table.forget_scratch()

    def _step(
        self, flight: NodeBatch, step: int, scale: float, exchange: BatchExchange | None, apart: ReplicaMerger | None
    ) -> None:
        """Train one step: forward and backward on every device, then the update of rows and network."""
        batch, start, stop = flight.batch, int(flight.step_starts[step]), int(flight.step_starts[step + 1])
        cuts = self._steps.device_starts(stop - start)
        before = self._examples_before(flight.token.first_step + step)
        parts = self._ahead
        results = []
        for m, device in enumerate(self.devices):
            with self._trace.span("pool", "step", device=m):
                pooled = [table.pool(part, m) for table, part in zip(flight.tables, parts, strict=True)]
            at = slice(start + cuts[m], start + cuts[m + 1])
            weights = batch.example_weights
            with self._trace.span("network", "step", device=m):
                result = self.networks[m].step(
                    pooled=pooled,
                    labels=device.from_host(batch.labels[at]),
                    dense=None if batch.dense is None else device.from_host(batch.dense[at]),
                    example_weights=None if weights is None else device.from_host(weights[at]),
                    scale=scale,
                    first_block=(before + cuts[m]) // self._steps.block_examples,
                    gradients=pooled,
                )
                result.check()
            results.append(result)
            with self._trace.span("metrics", "step", device=m):
                self.metrics.update(*countable(batch, device.to_host(result.logits), at.start))
        sums = merge([device.to_host(result.sums) for device, result in zip(self.devices, results, strict=True)])
        gradients = [[result.gradients[number] for result in results] for number in range(len(parts))]
        if exchange is None:
            with self._trace.span("update", "step"):
                self._update(flight, parts, gradients, step_weight(sums), apart)
            self._ahead = self._parts(flight, step + 1)
        else:
            sums = self._update_on_all(flight, parts, gradients, sums, step, exchange)
        with self._trace.span("update network", "step"):
            for network, device in dict(zip(self.networks, self.devices, strict=True)).items():
                network.apply(device.from_host(sums))
        if apart is not None:
            with self._trace.span("exchange", "step"):
                apart.end_step(step)

    def _parts(self, flight: NodeBatch, step: int) -> list[StepPart]:
        """Return the key occurrences of a step, by table; an empty list after the batch's last step."""
        if step + 1 >= len(flight.step_starts):
            return []
        start, stop = int(flight.step_starts[step]), int(flight.step_starts[step + 1])
        cuts = self._steps.device_starts(stop - start)
        with self._trace.span("group", "step"):
            return [
                table.part(*_occurrences(working_set, start, stop, len(table.spec.slots)), cuts)
                for table, working_set in zip(flight.tables, flight.sets, strict=True)
            ]

    def _update(
        self,
        flight: NodeBatch,
        parts: list[StepPart],
        gradients: list[list[Array]],
        weight: float,
        apart: ReplicaMerger | None,
    ) -> None:
        """Update the rows that this node touched in the step; nothing if the step's weight is 0."""
        if weight == 0:
            return
        for table, part, slopes in zip(flight.tables, parts, gradients, strict=True):
            table.update(part, slopes, weight)
            table.check(part, slopes)
            if apart is not None:
                apart.note(table, part)

    def _update_on_all(
        self,
        flight: NodeBatch,
        parts: list[StepPart],
        gradients: list[list[Array]],
        sums: Int64s,
        step: int,
        exchange: BatchExchange,
    ) -> Int64s:
        """Sum the gradients of the step over all nodes and update the rows that any node touched.

        Return the dense sums over all nodes.
        """
        touched = {}
        with self._trace.span("sum gradients", "step"):
            for table, part, slopes in zip(flight.tables, parts, gradients, strict=True):
                touched[table.spec.name] = Touched(*table.sum(part, slopes))
                table.check(part, slopes)
        with self._trace.span("exchange", "step"):
            pending = exchange.start(step, touched, sums)
            self._ahead = self._parts(flight, step + 1)  # overlaps with the exchange of sums
            summed, sums = pending.finish()
        weight = step_weight(sums)
        if weight > 0:
            with self._trace.span("update", "step"):
                for table, part, slopes in zip(flight.tables, parts, gradients, strict=True):
                    for some in summed[table.spec.name]:
                        table.apply(some.rows, some.sums, weight)
                    table.check(part, slopes)
        return sums

    def _examples_before(self, step: int) -> int:
        """Return the number of examples of a step that belong to lower ranks."""
        return self._steps.slice(step, self._rows)[0] - self._steps.examples(step, self._rows)[0]


def largest_weights(batch: Batch, step_starts: Int64s) -> Floats:
    """Return the largest example weight of each step (steps,); 0 for a step without examples.

    Weights that are not finite are ignored here: the step itself rejects them and names the example.
    """
    steps = len(step_starts) - 1
    if batch.example_weights is None:
        return (np.diff(step_starts) > 0).astype(np.float32)
    largest = np.zeros(steps, np.float32)
    for step in range(steps):
        weights = batch.example_weights[step_starts[step] : step_starts[step + 1]]
        largest[step] = weights.max(initial=0.0, where=np.isfinite(weights))
    return largest


def _occurrences(working_set: WorkingSet, start: int, stop: int, slots: int) -> tuple[Any, Any, Any]:
    """Return row numbers, offsets and weights for the examples [start, stop); offsets are relative to the batch."""
    offsets = working_set.offsets[start * slots : stop * slots + 1]
    return working_set.row_of, np.ascontiguousarray(offsets), working_set.weights
