"""The estimate for N nodes: seconds of each stage, bottleneck, memory and disk, from a workload and hardware."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from daskps import budget
from daskps.budget import INDEX_BYTES, KEY_BYTES, SEARCH_BYTES
from daskps.errors import ArgumentError

MOST_NODES = 64  # the largest number of nodes of a run


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of one node."""

    name: str
    memory_bytes: float
    disk_bytes: float
    hbm_bytes: float  # of all devices of the node
    network_bytes_per_second: float  # line rate in one direction
    # Fraction of the line rate that is left for rows and sums, after headers, small messages and uneven load of peers.
    network_share: float = 0.8
    cost: float = 1.0  # of one node, in any unit

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes", "hbm_bytes", "network_bytes_per_second", "cost"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"hardware: {name} must be above 0, got {getattr(self, name)}")
        if not 0 < self.network_share <= 1:
            raise ArgumentError(f"hardware: network_share is above 0 and at most 1, got {self.network_share}")

    @property
    def goodput(self) -> float:
        """Return the bytes of rows and sums that a node can send per second while it receives as many."""
        return self.network_bytes_per_second * self.network_share


@dataclass(frozen=True, slots=True)
class Workload:
    """The batch of one node, as measured on `measured_nodes` nodes.

    Scaling is weak: each node has a batch of this size, for any number of nodes.
    """

    name: str
    batch_examples: float  # of one node
    minibatch_examples: float  # of one node
    keys_per_example: float
    distinct_share: float  # distinct keys of a batch / key occurrences of the batch
    rows: float  # of the whole model
    row_bytes: float
    dimension: float
    dense_parameters: float
    stage_seconds: Mapping[str, float]  # per batch; stages: read, pull/push (or dedup, pull, load, push), train
    measured_nodes: int
    sums: Literal["doubling", "pairwise"]  # exchange of gradient sums of touched rows: as in the paper, or as in daskps
    shared_share: float = 1.0  # pairwise: fraction of a step's touched rows that another node holds in the same batch
    slack: float = 1.0  # time of a batch / time of its slowest stage
    in_flight: int = 3  # batches in memory at the same time
    tables: int = 1  # batches on the devices at the same time

    def __post_init__(self) -> None:
        if not self.stage_seconds or not max(self.stage_seconds.values()) > 0:
            raise ArgumentError(f"workload {self.name}: some stage must take time, got {dict(self.stage_seconds)}")
        for name in ("batch_examples", "minibatch_examples", "keys_per_example", "rows", "row_bytes"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"workload {self.name}: {name} must be above 0, got {getattr(self, name)}")

    @property
    def distinct_keys(self) -> float:
        """Return the number of distinct keys of one node's batch."""
        return self.batch_examples * self.keys_per_example * self.distinct_share

    @property
    def steps(self) -> float:
        """Return the number of steps of a batch."""
        return self.batch_examples / self.minibatch_examples


@dataclass(frozen=True, slots=True)
class Value:
    """A fitted, assumed or measured number: one that the source (paper or job) does not state itself."""

    name: str
    value: float
    kind: Literal["fitted", "assumed", "measured"]
    why: str


SUM_BYTES = 4.0  # per value of a gradient sum on the network: fixed point, sent without its upper bytes
ROW_NUMBER_BYTES = 5.0  # per row number on the network


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of a workload on `nodes` nodes."""

    nodes: int
    stage_seconds: dict[str, float]  # per batch
    network_seconds: dict[str, float]  # the part of stage_seconds that is network transfer
    bottleneck: str
    batch_seconds: float
    examples_per_second: float
    speed_up: float  # relative to one node
    examples_per_cost: float  # examples/s of all nodes / cost of all nodes
    index_bytes: float  # index of the disk tier; this and all bytes below are per node
    flight_bytes: float  # rows of the batches in flight
    cache_bytes: float  # memory that is left for the cache
    disk_bytes: float
    hbm_bytes: float
    problems: tuple[str, ...]  # the resources that are too small: memory, disk, HBM


def hbm_row_bytes(row_bytes: float, batches: int) -> float:
    """Return the bytes on the devices per row of a batch, in `batches` batches, of which one has a hash table."""
    return batches * (row_bytes + KEY_BYTES) + SEARCH_BYTES


def network_seconds(work: Workload, hardware: Hardware, nodes: int) -> dict[str, float]:
    """Return the seconds of network transfer in each stage, for one batch of one node."""
    others = nodes - 1
    # Bytes per direction, for keys that another node owns: keys requested, rows pulled, keys and rows pushed.
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
    """Return the seconds of each stage on `nodes` nodes.

    The network time of the measured run is replaced by the network time on `nodes` nodes; the rest stays the same.
    """
    then, now = (network_seconds(work, hardware, count) for count in (work.measured_nodes, nodes))
    return {stage: max(work.stage_seconds[stage] - then[stage], 0.0) + now[stage] for stage in work.stage_seconds}


def plan(work: Workload, hardware: Hardware, nodes: Iterable[int]) -> list[Estimate]:
    """Return one estimate for each number of nodes in `nodes`."""
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
    # On several nodes daskps keeps the holders of each row in flight; the paper's system ("doubling") does not.
    row_bytes = budget.flight_row_bytes(work.row_bytes, nodes if work.sums == "pairwise" else 1)
    flight = work.in_flight * work.distinct_keys * row_bytes
    hbm = work.distinct_keys * hbm_row_bytes(work.row_bytes, work.tables)
    disk = float(budget.total_bytes(budget.disk_terms(work.rows / nodes, work.row_bytes)))
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
