"""One step after the other over the tables of a batch: pool, forward and backward, sum, update.

In: a batch in flight whose tables are loaded. Out: updated rows and dense parameters, progressive metrics: every step
is predicted before it is trained on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from daskps.backend.device import Device
from daskps.cluster.node import Flight
from daskps.data.order import cut_blocks
from daskps.errors import NonFiniteError
from daskps.model.network import Network, merge, step_weight
from daskps.model.optimizer import DenseOptimizer
from daskps.types import WorkingSet


class Trainer:
    """The step of one node: M devices, each with its part of the examples and a replica of the network."""

    def __init__(
        self,
        devices: list[Device],
        networks: list[Network],
        optimizer: DenseOptimizer,
        metrics: Any,
        block_examples: int,
    ) -> None:
        self.devices, self.networks, self.optimizer, self.metrics = devices, networks, optimizer, metrics
        self.block_examples = block_examples

    def train(self, flight: Flight) -> None:
        """Every step of the batch, in order."""
        for step in range(len(flight.step_starts) - 1):
            try:
                self._step(flight, int(flight.step_starts[step]), int(flight.step_starts[step + 1]))
            except NonFiniteError as error:
                raise NonFiniteError(f"{flight.token}, mini-batch {flight.token.first_step + step}: {error}") from None

    def _step(self, flight: Flight, start: int, stop: int) -> None:
        batch = flight.batch
        cuts = cut_blocks(stop - start, len(self.devices), self.block_examples)
        parts = [
            table.part(*_occurrences(working_set, start, stop, len(table.spec.slots)), cuts)
            for table, working_set in zip(flight.tables, flight.sets, strict=True)
        ]
        results = []
        for m, device in enumerate(self.devices):
            pooled = [table.pool(part, m) for table, part in zip(flight.tables, parts, strict=True)]
            at = slice(start + cuts[m], start + cuts[m + 1])
            result = self.networks[m].step(
                pooled=pooled,
                labels=device.from_host(batch.labels[at]),
                dense=None if batch.dense is None else device.from_host(batch.dense[at]),
                example_weights=None if batch.example_weights is None else device.from_host(batch.example_weights[at]),
                first_block=cuts[m] // self.block_examples,
                gradients=pooled,
            )
            results.append(result)
            self.metrics.update(
                batch.labels[at],
                device.to_host(result.logits),
                None if batch.example_weights is None else batch.example_weights[at],
            )
        sums = merge([device.to_host(result.sums) for device, result in zip(self.devices, results, strict=True)])
        weight = step_weight(sums)
        if weight > 0:
            for number, (table, part) in enumerate(zip(flight.tables, parts, strict=True)):
                table.update(part, [result.gradients[number] for result in results], weight)
                table.check()
        for network, device in dict(zip(self.networks, self.devices, strict=True)).items():
            network.apply(device.from_host(sums), self.optimizer)


def _occurrences(working_set: WorkingSet, start: int, stop: int, slots: int) -> tuple[Any, Any, Any]:
    """Row numbers, offsets and weights of examples [start, stop); offsets still count from the batch's start."""
    offsets = working_set.offsets[start * slots : stop * slots + 1]
    return working_set.row_of, np.ascontiguousarray(offsets), working_set.weights
