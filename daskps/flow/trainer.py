"""One step after the other over the tables of a batch: pool, forward and backward, sum, update.

In: a batch in flight whose tables are loaded. Out: updated rows and dense parameters, progressive metrics: every step
is predicted before it is trained on. On several nodes, sums of touched rows and of the dense network go through the
exchange in every step, so all nodes make the same step whatever part of its examples is theirs; with `sync_every` above
1 nodes step alone and are merged every so many steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from daskps.backend.device import Array, Device
from daskps.cluster.exchange import Touched
from daskps.cluster.link import BatchExchange
from daskps.cluster.node import Flight
from daskps.data.order import Steps
from daskps.errors import NonFiniteError
from daskps.flow.apart import Apart
from daskps.hbm.table import StepPart
from daskps.model.network import Network, merge, step_weight
from daskps.model.optimizer import DenseOptimizer
from daskps.types import Int64s, WorkingSet


class Trainer:
    """The step of one node: M devices, each with its part of the examples and a replica of the network."""

    def __init__(
        self,
        devices: list[Device],
        networks: list[Network],
        optimizer: DenseOptimizer,
        metrics: Any,
        steps: Steps,
        rows: int,
        sync_every: int = 1,
    ) -> None:
        self.devices, self.networks, self.optimizer, self.metrics = devices, networks, optimizer, metrics
        self._steps, self._rows, self._sync_every = steps, rows, sync_every
        self._ahead: list[StepPart] = []  # of the step that comes next

    def train(self, flight: Flight, exchange: BatchExchange | None = None) -> None:
        """Every step of the batch, in order; with `exchange` the other nodes' parts of it too."""
        apart = None
        if exchange is not None and self._sync_every > 1:
            apart, exchange = Apart(flight, self.networks, exchange, self._sync_every), None
        self._ahead = self._parts(flight, 0)
        for step in range(len(flight.step_starts) - 1):
            try:
                self._step(flight, step, exchange, apart)
            except NonFiniteError as error:
                raise NonFiniteError(f"{flight.token}, mini-batch {flight.token.first_step + step}: {error}") from None
        for table in flight.tables:
            table.forget_scratch()

    def _step(self, flight: Flight, step: int, exchange: BatchExchange | None, apart: Apart | None) -> None:
        batch, start, stop = flight.batch, int(flight.step_starts[step]), int(flight.step_starts[step + 1])
        cuts = self._steps.device_starts(stop - start)
        before = self._examples_before(flight.token.first_step + step)
        parts = self._ahead
        results = []
        for m, device in enumerate(self.devices):
            pooled = [table.pool(part, m) for table, part in zip(flight.tables, parts, strict=True)]
            at = slice(start + cuts[m], start + cuts[m + 1])
            result = self.networks[m].step(
                pooled=pooled,
                labels=device.from_host(batch.labels[at]),
                dense=None if batch.dense is None else device.from_host(batch.dense[at]),
                example_weights=None if batch.example_weights is None else device.from_host(batch.example_weights[at]),
                first_block=(before + cuts[m]) // self._steps.block_examples,
                gradients=pooled,
            )
            results.append(result)
            self.metrics.update(
                batch.labels[at],
                device.to_host(result.logits),
                None if batch.example_weights is None else batch.example_weights[at],
            )
        sums = merge([device.to_host(result.sums) for device, result in zip(self.devices, results, strict=True)])
        gradients = [[result.gradients[number] for result in results] for number in range(len(parts))]
        if exchange is None:
            self._update(flight, parts, gradients, step_weight(sums), apart)
            self._ahead = self._parts(flight, step + 1)
        else:
            sums = self._update_on_all(flight, parts, gradients, sums, step, exchange)
        for network, device in dict(zip(self.networks, self.devices, strict=True)).items():
            network.apply(device.from_host(sums), self.optimizer)
        if apart is not None:
            apart.end_step(step)

    def _parts(self, flight: Flight, step: int) -> list[StepPart]:
        """The occurrences of a step, by table; nothing after the batch's last."""
        if step + 1 >= len(flight.step_starts):
            return []
        start, stop = int(flight.step_starts[step]), int(flight.step_starts[step + 1])
        cuts = self._steps.device_starts(stop - start)
        return [
            table.part(*_occurrences(working_set, start, stop, len(table.spec.slots)), cuts)
            for table, working_set in zip(flight.tables, flight.sets, strict=True)
        ]

    def _update(
        self,
        flight: Flight,
        parts: list[StepPart],
        gradients: list[list[Array]],
        weight: float,
        apart: Apart | None,
    ) -> None:
        if weight == 0:
            return
        for table, part, slopes in zip(flight.tables, parts, gradients, strict=True):
            table.update(part, slopes, weight)
            table.check(part, slopes)
            if apart is not None:
                apart.note(table, part)

    def _update_on_all(
        self,
        flight: Flight,
        parts: list[StepPart],
        gradients: list[list[Array]],
        sums: Int64s,
        step: int,
        exchange: BatchExchange,
    ) -> Int64s:
        """Add up what all nodes have of the step, and step the rows that any of them touched; the dense sums of all."""
        touched = {}
        for table, part, slopes in zip(flight.tables, parts, gradients, strict=True):
            touched[table.spec.name] = Touched(*table.sum(part, slopes))
            table.check(part, slopes)
        pending = exchange.start(step, touched, sums)
        self._ahead = self._parts(flight, step + 1)  # while the sums are on their way
        summed, sums = pending.finish()
        weight = step_weight(sums)
        if weight > 0:
            for table, part, slopes in zip(flight.tables, parts, gradients, strict=True):
                for some in summed[table.spec.name]:
                    table.apply(some.rows, some.sums, weight)
                table.check(part, slopes)
        return sums

    def _examples_before(self, step: int) -> int:
        """Examples of a step that lower ranks have."""
        return self._steps.slice(step, self._rows)[0] - self._steps.rows(step, self._rows)[0]


def _occurrences(working_set: WorkingSet, start: int, stop: int, slots: int) -> tuple[Any, Any, Any]:
    """Row numbers, offsets and weights of examples [start, stop); offsets still count from the batch's start."""
    offsets = working_set.offsets[start * slots : stop * slots + 1]
    return working_set.row_of, np.ascontiguousarray(offsets), working_set.weights
