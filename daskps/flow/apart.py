"""Replicas between two merges: with `sync_every` above 1, every node steps on its own examples alone for a while.

In: the tables of a batch and what its steps touch. Out: rows and dense network that are equal on all nodes again: rows
the mean over their holders, moments too, the dense network the mean over all nodes; step counts the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daskps.cluster.link import BatchExchange
from daskps.cluster.node import Flight
from daskps.hbm.table import HbmTable, StepPart
from daskps.model.network import Network


class Apart:
    """One batch on one node, and the merges in it."""

    def __init__(self, flight: Flight, networks: Sequence[Network], exchange: BatchExchange, sync_every: int) -> None:
        self._tables = {table.spec.name: table for table in flight.tables}
        self._layouts = {table.spec.name: table.spec.layout for table in flight.tables}
        self._networks, self._exchange = list(dict.fromkeys(networks)), exchange
        self._first, self._steps, self._every = flight.token.first_step, len(flight.step_starts) - 1, sync_every
        self._touched = {name: np.zeros(len(one.keys), np.bool_) for name, one in flight.pulled.items()}

    def note(self, table: HbmTable, part: StepPart) -> None:
        """A step has changed the rows of `part`."""
        self._touched[table.spec.name][table.touched(part)] = True

    def end_step(self, step: int) -> None:
        """Step number `step` of the batch is done: merge if it is time to. The last one always is."""
        if (self._first + step + 1) % self._every and step + 1 < self._steps:
            return
        rows, (dense, steps) = self._exchange.merge(
            step,
            self._touched,
            self._layouts,
            lambda name, positions: self._tables[name].get(positions),
            self._networks[0].pack(),
            self._networks[0].steps,
        )
        for name, (positions, merged) in rows.items():
            self._tables[name].put(positions, merged)
            self._touched[name][:] = False
        for network in self._networks:
            network.unpack(dense, steps)
