"""Predictions with rows from anywhere: MEM-PS during training, a model's files afterwards. Nothing is ever inserted.

In: a batch, and a way to look rows up by key. Out: logits, by the same kernels and blocks as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from daskps.backend.device import Device
from daskps.backend.workspace import Workspace
from daskps.flow.dedup import find_working_set
from daskps.hbm.table import HbmTable, TableSpec
from daskps.model.network import Network
from daskps.types import Batch, Floats, Keys

Lookup = Callable[[int, Keys], Floats]  # number of the table, distinct keys -> rows


class Predictor:
    """One model on one device."""

    def __init__(self, device: Device, specs: Sequence[TableSpec], network: Network, lookup: Lookup) -> None:
        self._device, self._specs, self._network, self._lookup = device, specs, network, lookup
        self._scratch = Workspace(device)

    def logits(self, batch: Batch) -> Floats:
        """(examples,) of a batch that is one step, or part of one from a block's start."""
        device, pooled = self._device, []
        for spec in self._specs:
            working_set = find_working_set(batch, spec.slots, [device], self._scratch)
            table = HbmTable(spec, [device], working_set, self._lookup(spec.number, working_set.keys))
            table.load()
            pooled.append(table.pool_all(working_set))
        dense = None if batch.dense is None else device.from_host(batch.dense)
        logits: Any = self._network.predict(pooled=pooled, dense=dense)
        return device.to_host(logits)
