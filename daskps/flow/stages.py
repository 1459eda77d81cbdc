"""The stages of a batch on one node: read, dedup, pull, load, train, push. Each is a function over a `OpenNode`.

In: a token. Out: a small answer; bulk stays in the node, under the token's first step, and is freed by the push.
`run_stage` and `run_control` are what Dask runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from distributed import get_worker

from daskps.cluster.link import Wire
from daskps.cluster.node import Flight, Read
from daskps.cluster.plugin import plugin_here
from daskps.errors import StaleError, TrainingError
from daskps.flow.begin import begin, model_path
from daskps.flow.dedup import by_owner, find_working_set
from daskps.flow.fitting import Fit
from daskps.flow.inputs import rows_read, skipped_rows
from daskps.flow.levels import counts, levels
from daskps.flow.open_node import OpenNode
from daskps.flow.progress import BatchReport, StageTime
from daskps.flow.tasks import HOLDING
from daskps.hbm.table import HbmTable
from daskps.types import Token


def run_stage(stage: str, token: Token, *after: Any) -> Any:
    """The task of one stage: `after` only orders it behind other tasks."""
    node: OpenNode = find_node(plugin_here(), stage, token.run, token.epoch)
    started = time.time()
    with node.working(), stopping_all(node):
        answer, waited = STAGES[stage](node, token)
        if isinstance(answer, Flight):
            return _report(node, answer, started, waited)
        if stage != "read":
            node.flights.get(token).times.append((stage, started, time.time(), waited))
        return answer


def run_control(verb: str, run: str, epoch: int, *values: Any) -> Any:
    """The task of what happens outside the stages, one at a time; most verbs are methods of `OpenNode`."""
    plugin = plugin_here()
    if verb == "begin":
        return begin(values[0], run, epoch, *values[1:])
    if verb == HOLDING:
        return holding(plugin, *values)
    if verb == "release":
        return release(plugin, run, epoch, *values)
    if verb == "open":
        rank, nodes, job, begun, frame, nodes_here = values
        check_free(plugin)
        worker = get_worker()
        wire = Wire.of_worker(worker, job.cluster.protocol)
        limit = worker.memory_manager.memory_limit
        plugin.opening = model_path(job)
        try:
            plugin.node = OpenNode(
                run, rank, nodes, job, begun, frame=frame, wire=wire, nodes_here=nodes_here, limit_bytes=limit
            )
        finally:
            plugin.opening = None
        return plugin.node.opened()
    if verb == "close":
        return close(plugin, run, epoch)
    node: OpenNode = find_node(plugin, verb, run, epoch)
    with node.working(), stopping_all(node):
        return getattr(node, verb)(*values)


def find_node(plugin: Any, verb: str, run: str, epoch: int) -> Any:
    """The node that is open on this worker, if it is of this epoch."""
    node = plugin.node
    if node is None or (node.run, node.epoch.number) != (run, epoch):
        raise StaleError(f"cannot {verb}: epoch {epoch} of run {run} has ended on this node")
    return node


def holding(plugin: Any, path: str) -> bool | None:
    """Whether the model that this worker has open, or is just opening or closing, is the one at `path`; None: none."""
    node = plugin.node
    mine = plugin.opening if node is None else node.directory.path
    return None if mine is None else same_model(mine, path)


def same_model(one: str, other: str) -> bool:
    """Two jobs may write one directory differently."""
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def release(plugin: Any, run: str, epoch: int, path: str, wanted: bool, again: bool) -> None:
    """Close the node that is open here if it has the model at `path` open, or if the worker is `wanted`.

    A run that starts `again` takes no worker away from another run, and no run goes behind a newer one of its model.
    """
    node = plugin.node
    same = node is not None and same_model(node.directory.path, path)
    if node is None or not (wanted or same):
        return
    if same and node.epoch.number > epoch:
        raise StaleError(f"{path} is open in epoch {node.epoch.number} of run {node.run}; epoch {epoch} is over")
    if again and node.run != run and not same:
        raise TrainingError(
            f"a worker of run {run} now trains {node.directory.path} (run {node.run}): use more workers"
        )
    _let_go(plugin)


def check_free(plugin: Any) -> None:
    """StaleError if another run has opened a node here since this one released the worker."""
    if plugin.node is not None:
        node = plugin.node
        raise StaleError(f"run {node.run} has just opened {node.directory.path} on this worker")


def close(plugin: Any, run: str, epoch: int) -> None:
    """End an epoch on this worker; one that has ended is fine."""
    node = plugin.node
    if node is not None and (node.run, node.epoch.number) == (run, epoch):
        _let_go(plugin)


def _let_go(plugin: Any) -> None:
    """Until it is closed, the node is there: its partitions are locked."""
    try:
        plugin.node.close()
    finally:
        plugin.node = None


@contextmanager
def stopping_all(node: OpenNode) -> Iterator[None]:
    """What is raised inside stops all nodes."""
    try:
        yield
    except BaseException as error:
        node.fail(error)
        raise


def read(node: OpenNode, token: Token) -> tuple[None, float]:
    """This node's slices of the batch's steps."""
    started = time.time()
    assert node.training is not None
    batch, starts = node.training.read_steps(token.first_step, token.stop_step)
    node.flights.add(Read(token, batch, starts, ("read", started, time.time(), 0.0)))
    return None, 0.0


def dedup(node: OpenNode, token: Token) -> tuple[Fit, float]:
    """The distinct keys of each table. Answers what would fit."""
    flight = node.flights.begin(token)
    for spec in node.specs:
        working_set = find_working_set(flight.batch, spec.slots, node.devices, node.dedup_scratch)
        if node.nodes > 1:
            working_set, flight.owners[spec.name] = by_owner(working_set, node.partition)
        flight.sets.append(working_set)
    shares = node.reading.shares(node.flights.read_of(token).batch)
    return node.room.fit(node.rank, flight, node.tables, shares), 0.0


def pull(node: OpenNode, token: Token) -> tuple[None, float]:
    """Rows of the working sets from their owners, which bring in what is on disk."""
    flight = node.flights.number(token)
    for spec, working_set in zip(node.specs, flight.sets, strict=True):
        flight.rows[spec.name] = node.host.empty((len(working_set.keys), spec.layout.width), np.float32)
    keys = {spec.name: working_set.keys for spec, working_set in zip(node.specs, flight.sets, strict=True)}
    started, busy = time.perf_counter(), node.link.busy_seconds
    wanted = {table: (keys[table], rows) for table, rows in flight.rows.items()}
    flight.pulled = node.link.pull(token.batch, wanted, flight.owners)
    worked = node.link.busy_seconds - busy
    return None, max(0.0, time.perf_counter() - started - worked)


def load(node: OpenNode, token: Token) -> tuple[None, float]:
    """Put the rows on the devices."""
    flight = node.flights.get(token)
    for spec, working_set in zip(node.specs, flight.sets, strict=True):
        table = HbmTable(spec, node.devices, working_set, flight.rows[spec.name])
        table.load()
        flight.tables.append(table)
    return None, 0.0


def train(node: OpenNode, token: Token) -> tuple[None, float]:
    """All steps of the batch."""
    flight = node.flights.get(token)
    started = time.perf_counter()
    late = node.link.wait_late(flight.pulled, flight.rows)
    waited = time.perf_counter() - started
    for number, table in enumerate(flight.tables):
        name = table.spec.name
        if len(late[name]):
            table.put_late(late[name])
        if len(flight.pulled[name].copied):
            table.copy_from(node.previous[number], flight.pulled[name].copied)
    node.previous = []  # its rows are here or pushed
    node.trainer.train(flight, node.link.exchange(token.batch, flight.pulled) if node.nodes > 1 else None)
    node.previous = flight.tables
    flight.metrics = node.end_batch(token.batch, token.snapshot)
    return None, waited


def push(node: OpenNode, token: Token) -> tuple[Flight, float]:
    """Trained rows back to their owners, who prepare the snapshot if the token asks for one."""
    flight = node.flights.get(token)
    rows = {table.spec.name: table.rows_on_host() for table in flight.tables}
    node.link.push(flight.pulled, rows, token.snapshot)
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
    receipts = node.prepared(flight.token.snapshot, flight.token.batch) if flight.token.snapshot else {}
    times = [*flight.times, ("push", started, time.time(), waited)]
    return BatchReport(
        token=flight.token,
        rank=node.rank,
        examples=flight.examples,
        stages=tuple(StageTime(*item) for item in times),
        counts=counts(node, flight),
        levels=levels(node, flight),
        metrics=flight.metrics,
        receipts=receipts,
        bad_rows=skipped_rows(node.training),
        rows_read=rows_read(node.training),
    )
