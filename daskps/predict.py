"""Forward pass with rows from any source: MEM-PS during training, a model's files afterwards. It inserts nothing.

Input: a batch, and a function that looks rows up by key. Output: logits, by the same kernels and blocks as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from daskps.device.device import Device, Workspace
from daskps.hbm.dedup import find_working_set
from daskps.hbm.table import HbmTable, TableSpec
from daskps.nn.dense_model import DenseModel
from daskps.types import Batch, Floats, WorkingSet

Lookup = Callable[[int, WorkingSet], Floats]  # (number of the table, working set) -> rows of its distinct keys


def countable(batch: Batch, logits: Floats, first: int = 0) -> tuple[Floats, Floats, Floats | None]:
    """Return labels, logits and weights of the examples that count for metrics: all that could be parsed.

    `logits` belong to the examples from number `first` on.
    """
    at = slice(first, first + len(logits))
    labels, weights = batch.labels[at], None if batch.example_weights is None else batch.example_weights[at]
    if batch.bad is None:
        return labels, logits, weights
    good = ~batch.bad[at]
    return labels[good], logits[good], None if weights is None else weights[good]


class Predictor:
    """Forward pass of one model on one device."""

    def __init__(self, device: Device, specs: Sequence[TableSpec], network: DenseModel, lookup: Lookup) -> None:
        self._device, self._specs, self._network, self._lookup = device, specs, network, lookup
        self._scratch = Workspace(device)

    def logits(self, batch: Batch) -> Floats:
        """Return the logits (B,) of a batch, which is one step, or a part of one that begins at a block."""
        device, pooled = self._device, []
        for spec in self._specs:
            working_set = find_working_set(batch, spec.slots, [device], self._scratch)
            table = HbmTable(spec, [device], working_set, self._lookup(spec.number, working_set))
            table.load()
            pooled.append(table.pool_all(working_set))
        dense = None if batch.dense is None else device.from_host(batch.dense)
        logits: Any = self._network.predict(pooled=pooled, dense=dense)
        return device.to_host(logits)
