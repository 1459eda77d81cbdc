"""What a plan is made from: the hardware of a node, the work of a batch, and where every number comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from daskps.errors import ArgumentError

MOST_NODES = 64


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node."""

    name: str
    memory_bytes: float
    disk_bytes: float
    hbm_bytes: float
    network_bytes_per_second: float  # line rate of one direction
    network_share: float = 0.8  # of the line rate that rows and sums get: headers, small messages, uneven peers
    cost: float = 1.0  # of one node, in any unit

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "disk_bytes", "hbm_bytes", "network_bytes_per_second", "cost"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"hardware: {name} must be above 0, got {getattr(self, name)}")
        if not 0 < self.network_share <= 1:
            raise ArgumentError(f"hardware: network_share is above 0 and at most 1, got {self.network_share}")

    @property
    def goodput(self) -> float:
        """Bytes of rows and sums that a node sends, and at the same time receives, in a second."""
        return self.network_bytes_per_second * self.network_share


@dataclass(frozen=True, slots=True)
class Workload:
    """One node's batch, as measured on `measured_nodes` nodes. Weak scaling: every node has such a batch."""

    name: str
    batch_examples: float  # of one node
    minibatch_examples: float  # of one node
    keys_per_example: float
    distinct_share: float  # distinct keys of a batch / occurrences
    rows: float  # of the whole model
    row_bytes: float
    dimension: float
    dense_parameters: float
    stage_seconds: Mapping[str, float]  # of a batch: read, pull/push (or dedup, pull, load, push), train
    measured_nodes: int
    sums: Literal["doubling", "pairwise"]  # how touched rows are summed: the paper's way, or daskps's
    shared_share: float = 1.0  # pairwise: of the rows that a step touches, how many another node holds in the batch
    slack: float = 1.0  # time of a batch / time of the slowest stage
    in_flight: int = 3  # batches in memory
    tables: int = 1  # batches on the devices

    def __post_init__(self) -> None:
        if not self.stage_seconds or not max(self.stage_seconds.values()) > 0:
            raise ArgumentError(f"workload {self.name}: some stage must take time, got {dict(self.stage_seconds)}")
        for name in ("batch_examples", "minibatch_examples", "keys_per_example", "rows", "row_bytes"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"workload {self.name}: {name} must be above 0, got {getattr(self, name)}")

    @property
    def distinct_keys(self) -> float:
        """Of one node's batch."""
        return self.batch_examples * self.keys_per_example * self.distinct_share

    @property
    def steps(self) -> float:
        """Of a batch."""
        return self.batch_examples / self.minibatch_examples


@dataclass(frozen=True, slots=True)
class Value:
    """A number that is not in the source as such."""

    name: str
    value: float
    kind: Literal["fitted", "assumed", "measured"]
    why: str
