"""The stages of a batch on one node: read, dedup, pull, load, train, push. Each is a function over a `OpenNode`.

In: a token. Out: a small answer; bulk stays in the node, under the token's first step, and is freed by the push.
`run_stage` and `run_control` are what Dask runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from daskps.cluster.node import Arrival, Flight, Read, empty_rows
from daskps.cluster.plugin import plugin_here
from daskps.errors import StaleError
from daskps.flow.dedup import find_working_set
from daskps.flow.open_node import OpenNode
from daskps.flow.progress import BatchReport, StageTime
from daskps.hbm.table import HbmTable
from daskps.types import Token


def run_stage(stage: str, token: Token, *after: Any) -> Any:
    """The task of one stage: `after` only orders it behind other tasks."""
    node: OpenNode | None = plugin_here().node
    if node is None:
        raise StaleError(f"{token}: the run has ended on this node")
    started = time.time()
    with node.working():
        try:
            answer, waited = STAGES[stage](node, token)
        except BaseException as error:
            node.flights.fail(error)
            raise
        if isinstance(answer, Flight):
            return _report(node, answer, started, waited)
        if stage != "read":
            node.flights.get(token).times.append((stage, started, time.time(), waited))
        return answer


def run_control(verb: str, rank: int, run: str, *values: Any) -> Any:
    """The task of what happens outside the stages; verbs are methods of `OpenNode`."""
    plugin = plugin_here()
    if verb == "open":
        if plugin.node is not None:
            plugin.node.close()
        plugin.node = OpenNode(run, rank, *values)
        return plugin.node.opened()
    if plugin.node is None or plugin.node.run != run:
        if verb == "close":
            return None
        raise StaleError(f"cannot {verb}: run {run} has ended on this node")
    answer = getattr(plugin.node, verb)(*values)
    if verb == "close":
        plugin.node = None
    return answer


def read(node: OpenNode, token: Token) -> tuple[None, float]:
    """This node's slices of the batch's steps."""
    started = time.time()
    batch, starts = node.training.read_steps(token.first_step, token.stop_step)
    node.flights.add(Read(token, batch, starts, ("read", started, time.time(), 0.0)))
    return None, 0.0


def dedup(node: OpenNode, token: Token) -> tuple[int, float]:
    """The distinct keys of each table. Answers how many steps fit the budget."""
    flight = node.flights.begin(token)
    for spec in node.specs:
        flight.sets.append(find_working_set(flight.batch, spec.slots, node.devices, node.dedup_scratch))
    return node.fitting_steps(flight), 0.0


def pull(node: OpenNode, token: Token) -> tuple[None, float]:
    """Rows of the working sets from MEM-PS, which brings in what is on disk."""
    flight = node.flights.number(token)
    widths = [spec.layout.width for spec in node.specs]
    flight.arrivals = [
        Arrival(empty_rows(len(set_.keys), width)) for set_, width in zip(flight.sets, widths, strict=True)
    ]
    for number, (table, working_set) in enumerate(zip(node.tables, flight.sets, strict=True)):
        with table.lock:
            deliveries = table.mem.pull(working_set.keys, token.batch, out=flight.arrivals[number].rows)
            node.flights.arrive(number, deliveries)
    return None, node.flights.wait_first(flight, node.job.cluster.wait_seconds)


def load(node: OpenNode, token: Token) -> tuple[None, float]:
    """Put the rows on the devices."""
    flight = node.flights.get(token)
    for spec, working_set, arrival in zip(node.specs, flight.sets, flight.arrivals, strict=True):
        table = HbmTable(spec, node.devices, working_set, arrival.rows)
        table.load()
        flight.tables.append(table)
    return None, 0.0


def train(node: OpenNode, token: Token) -> tuple[None, float]:
    """All steps of the batch."""
    flight = node.flights.get(token)
    waited = node.flights.wait_late(flight, node.job.cluster.wait_seconds)
    for number, (table, arrival) in enumerate(zip(flight.tables, flight.arrivals, strict=True)):
        assert arrival.first is not None
        if len(arrival.first.late):
            table.put_late(arrival.first.late.astype(np.int64))
        if len(arrival.first.copied):
            table.copy_from(node.previous[number], arrival.first.copied.astype(np.int64))
    node.previous = []  # its rows are here or pushed
    node.trainer.train(flight)
    node.previous = flight.tables
    if token.snapshot:
        node.capture(token.snapshot)
    return None, waited


def push(node: OpenNode, token: Token) -> tuple[Flight, float]:
    """Trained rows back to MEM-PS; prepares the snapshot if the token asks for one."""
    flight = node.flights.get(token)
    for number, (table, working_set) in enumerate(zip(node.tables, flight.sets, strict=True)):
        rows = flight.tables[number].rows_on_host()
        with table.lock:
            node.flights.arrive(number, table.mem.push(working_set.keys, rows, token.batch))
    node.flights.remove(token)
    return flight, 0.0


STAGES: dict[str, Callable[[OpenNode, Token], tuple[Any, float]]] = {
    "read": read,
    "dedup": dedup,
    "pull": pull,
    "load": load,
    "train": train,
    "push": push,
}


def _report(node: OpenNode, flight: Flight, started: float, waited: float) -> BatchReport:
    receipts = node.prepare(flight.token.snapshot, flight.token.batch) if flight.token.snapshot else {}
    times = [*flight.times, ("push", started, time.time(), waited)]
    return BatchReport(
        token=flight.token,
        rank=node.rank,
        examples=flight.examples,
        stages=tuple(StageTime(*item) for item in times),
        counts=node.counts(flight),
        levels=node.levels(flight),
        metrics=node.metrics_summary(),
        receipts=receipts,
    )
