"""The tasks of a worker: the stages of a batch (read, dedup, pull, load, train, push), and a driver's other requests.

Input: the id of a batch, or a `Request` with its values. Output: a small answer. Bulk data stays in the node, under the
batch's first step, and is freed by the push. Dask runs `run_stage` and `run_request` as tasks. Each stage is a function
of an `OpenNode`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import numpy as np

from daskps.build import examples_read, skipped_examples
from daskps.config import Job
from daskps.errors import ConfigError, DataError, StaleError
from daskps.hbm.dedup import by_owner, find_working_set
from daskps.hbm.table import HbmTable
from daskps.node.batches import NodeBatch, Read
from daskps.node.begin import IncarnationStart, begin, model_path
from daskps.node.dask import NodePlugin, find_plugin, plugin_here
from daskps.node.memory import CapacityReport
from daskps.node.node import NodeInfo, OpenNode
from daskps.node.trainer import largest_weights
from daskps.reports import BatchReport, Forecast, StageTime
from daskps.types import BatchId, Stage
from daskps.wire.collective import Tag
from daskps.wire.message import MessageKind

# Fields of the disk tier's statistics that a report has.
DISK_LEVELS = ("disk_bytes", "stale_rows", "files", "compactions", "compacted_rows")


def counts(node: OpenNode, flight: NodeBatch) -> dict[str, float]:
    """Return the counters since the last report, summed over tables.

    They belong to this batch, unless other nodes have not pushed it yet; then they belong to the batches that all
    nodes have pushed since the last report.
    """
    totals: dict[str, float] = {
        "keys": sum(len(working_set.row_of) for working_set in flight.sets),
        "distinct_keys": sum(len(working_set.keys) for working_set in flight.sets),
    }
    over = [list(table.mem.statistics) for table in node.tables]
    newest = min(statistics[-1].batch if statistics else -1 for statistics in over)
    for one in (one for statistics in over for one in statistics if node.counted < one.batch <= newest):
        for name in type(one).__dataclass_fields__:
            if name != "batch":
                totals[name] = totals.get(name, 0) + float(getattr(one, name))
    node.counted = max(node.counted, newest)
    return totals


def levels(node: OpenNode, flight: NodeBatch) -> dict[str, float]:
    """Return the fill levels of the tiers, including the batch that was just pushed."""
    row_bytes = [spec.layout.row_bytes for spec in node.specs]
    loaded = [flight, *node.flights.loaded()]
    hbm_rows = [sum(len(other.sets[number].keys) for other in loaded) for number in range(len(row_bytes))]
    mem_rows = [table.mem.cached_rows for table in node.tables]
    disk = [table.store.stats() for table in node.tables]
    return {
        "row_capacity": node.budget.rows(flight, node.tables),
        "read_steps": node.input_budget.steps(),
        "hbm_rows": sum(hbm_rows),
        "hbm_bytes": sum(rows * size for rows, size in zip(hbm_rows, row_bytes, strict=True)),
        "memory_rows": sum(mem_rows),
        "memory_bytes": sum(rows * size for rows, size in zip(mem_rows, row_bytes, strict=True)),
        "disk_rows": sum(one.live_rows for one in disk),
        **{name: sum(getattr(one, name) for one in disk) for name in DISK_LEVELS},
    }


LOOK_SECONDS = 0.1  # interval at which a waiting stage checks that the node still runs


class Request(StrEnum):
    """Requests of a driver beside the stages. A worker answers the first five, its open node the others."""

    HOLDING = "holding"  # does this worker have that model open?
    BEGIN = "begin"  # begin an incarnation of the model: one log entry
    RELEASE = "release"  # close a node that has no driver any more
    OPEN = "open"  # open a node
    CLOSE = "close"  # close the node of this incarnation
    JOIN = "join"
    PREPARE = "prepare"
    PUBLISH = "publish"
    CONFIRM = "confirm"
    END_WITH = "end_with"
    EVALUATE = "evaluate"
    RECORD = "record"
    SUMMARY = "summary"


def method_of(node: Any, request: Request) -> Callable[..., Any]:
    """Return the method of an open node (`OpenNode`, or the tests' simulated one) that answers a request."""
    methods: dict[Request, Callable[..., Any]] = {
        Request.JOIN: node.join,
        Request.PREPARE: node.prepare,
        Request.PUBLISH: node.publish,
        Request.CONFIRM: node.confirm,
        Request.END_WITH: node.end_with,
        Request.EVALUATE: node.evaluate,
        Request.RECORD: node.record,
        Request.SUMMARY: node.summary,
    }
    return methods[request]


def run_stage(stage: Stage, token: BatchId, *after: Any) -> Any:
    """Run one stage of a batch as a Dask task; `after` holds the tasks that it depends on and is not used."""
    node: OpenNode = find_node(plugin_here(), stage, token.run, token.incarnation)
    started = time.time()
    steps = {"batch": token.batch, "first_step": token.first_step, "stop_step": token.stop_step}
    with node.working(), stopping_all(node), node.trace.span(stage.value, "stage", **steps):
        answer, waited = STAGES[stage](node, token)
        if isinstance(answer, NodeBatch):
            return _report(node, answer, started, waited)
        if stage is not Stage.READ:
            node.flights.get(token).times.append((stage.value, started, time.time(), waited))
        return answer


def run_request(request: Request, run: str, incarnation: int, *values: Any) -> Any:
    """Answer a request as a Dask task. All requests but HOLDING run one at a time."""
    if request in (Request.HOLDING, Request.RELEASE) and find_plugin() is None:
        return None  # no run has claimed this worker
    plugin = plugin_here()
    match request:
        case Request.HOLDING:
            return holding(plugin, *values)
        case Request.BEGIN:
            with naming_worker(plugin.address):
                return begin(values[0], run, incarnation, *values[1:])
        case Request.RELEASE:
            return release(plugin, run, incarnation, *values)
        case Request.OPEN:
            check_free(plugin)
            with naming_worker(plugin.address):
                return open_node(plugin, run, *values)
        case Request.CLOSE:
            return close(plugin, run, incarnation)
    node: OpenNode = find_node(plugin, request, run, incarnation)
    with node.working(), stopping_all(node), node.trace.span(request.value, "control"):
        return method_of(node, request)(*values)


def open_node(
    plugin: NodePlugin, run: str, rank: int, nodes: int, job: Job, begun: IncarnationStart, frame: Any, nodes_here: int
) -> NodeInfo:
    """Open a node on this worker; `nodes_here` nodes of the run share the machine."""
    plugin.opening = model_path(job)
    try:
        plugin.node = OpenNode(
            *(run, rank, nodes, job, begun),
            frame=frame,
            wire=plugin.listen_options(job.cluster.protocol),
            nodes_here=nodes_here,
            limit_bytes=plugin.limit_bytes,
        )
    finally:
        plugin.opening = None
    info: NodeInfo = plugin.node.info()
    return info


def find_node(plugin: Any, task: Stage | Request, run: str, incarnation: int) -> Any:
    """Return the node of this incarnation on this worker; raise StaleError if another one or none is open."""
    node = plugin.node
    if node is None or (node.run, node.incarnation.number) != (run, incarnation):
        raise StaleError(f"cannot {task}: incarnation {incarnation} of run {run} has ended on this node")
    return node


def holding(plugin: Any, path: str) -> bool | None:
    """Return True if the model that this worker has open is the one at `path`, None if it has no model open.

    A model that is just being opened or closed counts as open.
    """
    node = plugin.node
    mine = plugin.opening if node is None else node.directory.path
    return None if mine is None else same_model(mine, path)


def same_model(one: str, other: str) -> bool:
    """Return True if both paths name the same directory; two jobs may spell it differently."""
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def release(plugin: Any, run: str, incarnation: int, path: str, wanted: bool) -> None:
    """Close the node on this worker if it has the model at `path` open, or if this run needs the worker (`wanted`).

    Only workers that `run` or no run has claimed are asked, so the node has no driver any more. Raise StaleError if the
    node is of a newer incarnation of the same model: an older run must not close it.
    """
    node = plugin.node
    same = node is not None and same_model(node.directory.path, path)
    if node is None or not (wanted or same):
        return
    if same and node.incarnation.number > incarnation:
        newer = f"incarnation {node.incarnation.number} of run {node.run}"
        raise StaleError(f"{path} is open in {newer}; incarnation {incarnation} is over")
    _let_go(plugin)


def check_free(plugin: Any) -> None:
    """Raise StaleError if another run has opened a node here since this run released the worker."""
    if plugin.node is not None:
        node = plugin.node
        raise StaleError(f"run {node.run} has just opened {node.directory.path} on this worker")


def close(plugin: Any, run: str, incarnation: int) -> None:
    """End an incarnation on this worker; do nothing if it has ended already."""
    node = plugin.node
    if node is not None and (node.run, node.incarnation.number) == (run, incarnation):
        _let_go(plugin)


def _let_go(plugin: Any) -> None:
    """Close the node. The plugin keeps it until then, because its partitions are still locked."""
    try:
        plugin.node.close()
    finally:
        plugin.node = None


@contextmanager
def naming_worker(address: str) -> Iterator[None]:
    """Add the worker's address to errors about settings and data: machines may have different files."""
    try:
        yield
    except (ConfigError, DataError) as error:
        if address.startswith("inproc"):  # the user's own process
            raise
        raise type(error)(f"on the worker {address}: {error}") from None


@contextmanager
def stopping_all(node: OpenNode) -> Iterator[None]:
    """Stop all nodes if the body raises."""
    try:
        yield
    except BaseException as error:
        node.fail(error)
        raise


def read(node: OpenNode, token: BatchId) -> tuple[None, float]:
    """Read this node's examples of the batch's steps."""
    started = time.time()
    assert node.training is not None
    batch, starts = node.training.read_steps(token.first_step, token.stop_step)
    node.flights.add(Read(token, batch, starts, (Stage.READ.value, started, time.time(), 0.0)))
    return None, 0.0


def dedup(node: OpenNode, token: BatchId) -> tuple[CapacityReport, float]:
    """Find the distinct keys of each table; return how much of the batch fits."""
    flight = node.flights.begin(token)
    for spec in node.specs:
        working_set = find_working_set(flight.batch, spec.slots, node.devices, node.dedup_scratch)
        if node.nodes > 1:
            working_set, flight.owners[spec.name] = by_owner(working_set, node.partition)
        flight.sets.append(working_set)
    shares = node.input_budget.shares(node.flights.read_of(token).batch)
    return node.budget.fit(node.rank, flight, node.tables, shares), 0.0


def pull(node: OpenNode, token: BatchId) -> tuple[None, float]:
    """Pull the rows of the working sets from their owners, which load missing ones from disk."""
    flight = node.flights.number(token)
    for spec, working_set in zip(node.specs, flight.sets, strict=True):
        flight.rows[spec.name] = node.host.empty((len(working_set.keys), spec.layout.width), np.float32)
    keys = {spec.name: working_set.keys for spec, working_set in zip(node.specs, flight.sets, strict=True)}
    started, busy = time.perf_counter(), node.link.busy_seconds
    wanted = {table: (keys[table], rows) for table, rows in flight.rows.items()}
    if node.nodes > 1 and node.job.train.sync_every == 1:
        tag = Tag(MessageKind.WEIGHTS, token.batch)
        flight.weights = node.link.collective.all_gather(tag, largest_weights(flight.batch, flight.step_starts))
    flight.pulled = node.link.pull(token.batch, wanted, flight.owners)
    worked = node.link.busy_seconds - busy
    return None, max(0.0, time.perf_counter() - started - worked)


def load(node: OpenNode, token: BatchId) -> tuple[None, float]:
    """Copy the rows to the devices."""
    flight = node.flights.get(token)
    for spec, working_set in zip(node.specs, flight.sets, strict=True):
        table = HbmTable(spec, node.devices, working_set, flight.rows[spec.name])
        table.load()
        flight.tables.append(table)
    flight.loaded.set()
    return None, 0.0


def train(node: OpenNode, token: BatchId) -> tuple[None, float]:
    """Train all steps of the batch. First wait until its rows are on the devices.

    Dask's graph has no edge from load to train (see the driver), so this stage waits itself.
    """
    flight = node.flights.get(token)
    started = time.perf_counter()
    with node.trace.span("wait for rows", "wait"):
        while not flight.loaded.wait(LOOK_SECONDS):
            node.check()
        deferred = node.link.wait_deferred(flight.pulled, flight.rows)
    waited = time.perf_counter() - started
    for number, table in enumerate(flight.tables):
        name = table.spec.name
        if len(deferred[name]):
            table.put_deferred(deferred[name])
        if len(flight.pulled[name].forwarded):
            table.copy_from(node.previous[number], flight.pulled[name].forwarded)
    node.previous = []  # rows needed here have been forwarded; the batch's own push has the rest
    node.begin_batch(token.first_step)
    node.trainer.train(flight, node.link.exchange(token.batch, flight.pulled) if node.nodes > 1 else None)
    node.previous = flight.tables
    flight.metrics = node.end_batch(token.batch, token.snapshot)
    return None, waited


def push(node: OpenNode, token: BatchId) -> tuple[NodeBatch, float]:
    """Push the trained rows to their owners, which prepare a snapshot if the token names one."""
    flight = node.flights.get(token)
    rows = {table.spec.name: table.rows_on_host() for table in flight.tables}
    node.link.push(flight.pulled, rows, token.snapshot)
    node.flights.remove(token)
    return flight, 0.0


# By stage: its function, which returns its answer and the seconds that it waited for rows or other stages.
STAGES: dict[Stage, Callable[[OpenNode, BatchId], tuple[Any, float]]] = {
    Stage.READ: read,
    Stage.DEDUP: dedup,
    Stage.PULL: pull,
    Stage.LOAD: load,
    Stage.TRAIN: train,
    Stage.PUSH: push,
}


def _report(node: OpenNode, flight: NodeBatch, started: float, waited: float) -> BatchReport:
    """Return the report of a pushed batch; wait for its snapshot to be prepared, if it has one."""
    digests = node.prepared(flight.token.snapshot, flight.token.batch) if flight.token.snapshot else {}
    times = [*flight.times, (Stage.PUSH.value, started, time.time(), waited)]
    return BatchReport(
        token=flight.token,
        rank=node.rank,
        examples=flight.examples - flight.skipped,
        skipped=flight.skipped,
        stages=tuple(StageTime(*item) for item in times),
        counts=counts(node, flight),
        levels=levels(node, flight),
        metrics=flight.metrics,
        digests=digests,
        bad_rows=skipped_examples(node.training),
        rows_read=examples_read(node.training),
        forecast=_foresee(node, flight),
    )


def _foresee(node: OpenNode, flight: NodeBatch) -> Forecast | None:
    """Return the position at which the disk index will take too much of this node's memory, if any.

    Only the first pass counts: a second pass over the same data brings no new rows.
    """
    assert node.training is not None
    position = node.steps.examples(flight.token.stop_step, node.training.examples)[0]
    one_pass = node.training.examples // node.job.train.epochs
    return node.budget.foresee(node.rank, position, one_pass, flight, node.tables)
