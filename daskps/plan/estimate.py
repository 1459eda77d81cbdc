"""The estimate itself: seconds of each stage on N nodes, the bottleneck, what must fit where.

In: a workload and hardware. Out: one `Estimate` per number of nodes. A stage's seconds are those measured, with the
part that goes over the network taken out as it was there and put in as it would be on N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from daskps.errors import ArgumentError
from daskps.plan.values import MOST_NODES, Hardware, Workload

KEY_BYTES = 8
INDEX_BYTES = 12.0  # of the disk tier, a key: its bound
CACHE_EXTRA_BYTES = 50.0  # entry, bucket, cells, staging of a cached row (daskps.mem.budget)
HBM_EXTRA_BYTES = 16.0  # key, and slots of the hash table that one batch of four has
SUM_BYTES = 4.0  # a value of a gradient sum on its way: fixed point, its upper bytes left out
ROW_NUMBER_BYTES = 5.0
DISK_FACTOR = 2.0  # stale rows: compaction keeps disk use under twice the live rows


@dataclass(frozen=True, slots=True)
class Estimate:
    """A workload on so many nodes."""

    nodes: int
    stage_seconds: dict[str, float]
    network_seconds: dict[str, float]  # the part of them that is spent on the wire
    bottleneck: str
    batch_seconds: float
    examples_per_second: float
    speed_up: float  # against one node
    examples_per_cost: float  # examples/s of all nodes / what all nodes cost
    index_bytes: float  # of one node, as all below
    flight_bytes: float  # rows of the batches in flight
    cache_bytes: float  # left for the memory tier's cache
    disk_bytes: float
    hbm_bytes: float
    problems: tuple[str, ...]  # what does not fit


def network_seconds(work: Workload, hardware: Hardware, nodes: int) -> dict[str, float]:
    """Seconds of each stage that go over the network, for one batch of one node."""
    others = nodes - 1
    # In either direction: keys asked for, rows pulled, keys and rows pushed, of keys that another node owns.
    moved = work.distinct_keys * others / nodes * 2 * (KEY_BYTES + work.row_bytes)
    rounds = math.ceil(math.log2(nodes))
    dense = 4.0 * work.dense_parameters * rounds
    touched = work.minibatch_examples * work.keys_per_example * work.distinct_share
    row = ROW_NUMBER_BYTES + SUM_BYTES * work.dimension
    sent = touched * row * (rounds if work.sums == "doubling" else work.shared_share * others)
    known = {
        "pull/push": moved / hardware.goodput,
        "pull": moved / 2 / hardware.goodput,
        "push": moved / 2 / hardware.goodput,
        "train": work.steps * (dense + sent) / hardware.goodput,
    }
    return {stage: known.get(stage, 0.0) for stage in work.stage_seconds}


def stage_seconds(work: Workload, hardware: Hardware, nodes: int) -> dict[str, float]:
    """Seconds of each stage on `nodes` nodes."""
    then, now = (network_seconds(work, hardware, count) for count in (work.measured_nodes, nodes))
    return {stage: max(work.stage_seconds[stage] - then[stage], 0.0) + now[stage] for stage in work.stage_seconds}


def plan(work: Workload, hardware: Hardware, nodes: Iterable[int]) -> list[Estimate]:
    """What to expect on each of these numbers of nodes."""
    alone = work.batch_examples / (max(stage_seconds(work, hardware, 1).values()) * work.slack)
    return [_estimate(work, hardware, count, alone) for count in nodes]


def _estimate(work: Workload, hardware: Hardware, nodes: int, alone: float) -> Estimate:
    if not 1 <= nodes <= MOST_NODES:
        raise ArgumentError(f"a run has 1 to {MOST_NODES} nodes, got {nodes}")
    seconds = stage_seconds(work, hardware, nodes)
    bottleneck = max(seconds, key=lambda stage: seconds[stage])
    batch = seconds[bottleneck] * work.slack
    rate = nodes * work.batch_examples / batch
    index = INDEX_BYTES * work.rows / nodes
    flight = work.in_flight * work.distinct_keys * (work.row_bytes + CACHE_EXTRA_BYTES)
    hbm = work.tables * work.distinct_keys * (work.row_bytes + HBM_EXTRA_BYTES)
    disk = DISK_FACTOR * work.rows / nodes * (work.row_bytes + KEY_BYTES)
    needs = {
        "memory": (index + flight, hardware.memory_bytes),
        "disk": (disk, hardware.disk_bytes),
        "HBM": (hbm, hardware.hbm_bytes),
    }
    return Estimate(
        nodes=nodes,
        stage_seconds=seconds,
        network_seconds=network_seconds(work, hardware, nodes),
        bottleneck=bottleneck,
        batch_seconds=batch,
        examples_per_second=rate,
        speed_up=rate / alone,
        examples_per_cost=rate / (nodes * hardware.cost),
        index_bytes=index,
        flight_bytes=flight,
        cache_bytes=max(hardware.memory_bytes - index - flight, 0.0),
        disk_bytes=disk,
        hbm_bytes=hbm,
        problems=tuple(name for name, (needed, there) in needs.items() if needed > there),
    )
