"""The figures of a finished batch, and the record of a run. Log, progress bar, live pages and report show them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from daskps.reports import Summary, from_record

TIERS = ("hbm", "memory", "disk", "new")


def hit_rates(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the hit rate of each tier, from summed counts.

    HBM: the share of key occurrences that need no pull, because their key occurred before in the same batch. Memory,
    disk, new: the shares of the pulled rows that the cache had, that the disk had, and that were created.
    """
    keys, distinct = counts.get("keys", 0), counts.get("distinct_keys", 0)
    pulled = {"memory": counts.get("hits", 0), "disk": counts.get("misses", 0), "new": counts.get("new_keys", 0)}
    total = sum(pulled.values())
    rates = {"hbm": 1 - distinct / keys if keys else 0.0}
    return rates | {tier: count / total if total else 0.0 for tier, count in pulled.items()}


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """The figures of one batch, over all nodes."""

    run: str
    epoch: int  # number of the incarnation: higher after every restart; lines of the log keep this name
    batch: int  # number of the batch
    steps: int  # steps of the batch
    position: int  # examples of the data up to the end of this batch
    stop_position: int  # position at which the run ends
    examples: int
    ended: float  # seconds since 1970
    examples_per_second: float  # over the last few batches
    seconds_left: float  # estimate until the run ends
    metrics: dict[str, float]  # of the current pass so far
    rates: dict[str, float]  # hit rate of each tier in this batch
    counts: dict[str, float]  # counters of this batch
    levels: dict[str, float]  # bytes and rows in each tier after this batch
    stage_seconds: dict[str, float]  # work of each stage, of the slowest node, without waiting
    waited_seconds: dict[str, float]  # waiting of each stage
    snapshot: str | None = None  # the last published snapshot

    def plain(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)


def figures_of(line: Mapping[str, Any], *, seconds_left: float = 0.0, snapshot: str | None = None) -> BatchFigures:
    """Return the figures of a batch, given its line of the model's record."""
    return BatchFigures(
        run=line["run"],
        epoch=line["incarnation"],
        batch=line["batch"],
        steps=line["stop_step"] - line["first_step"],
        position=line["position"],
        stop_position=line["stop_position"],
        examples=line["examples"],
        ended=line["ended"],
        examples_per_second=line["examples_per_second"],
        seconds_left=seconds_left,
        metrics=from_record(line["metrics"]),
        rates=hit_rates(line["counts"]),
        counts=line["counts"],
        levels=line["levels"],
        stage_seconds=line["stage_seconds"],
        waited_seconds=line["waited_seconds"],
        snapshot=snapshot,
    )


@dataclass(slots=True)
class Record:
    """The record of one run, from its start in this process to its end; the input of the report."""

    settings: dict[str, Any]
    version: str
    run: str = ""
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    ending: str = "running"  # at the end: finished, stopped, stopped early, failed: ...
    summary: Summary = field(default_factory=Summary)
    validations: list[dict[str, Any]] = field(default_factory=list)  # each with batch, position, metrics
    warnings: list[str] = field(default_factory=list)
    snapshot: str | None = None
    best: dict[str, float] = field(default_factory=dict)  # synthetic data: best possible metrics of validation examples

    @property
    def seconds(self) -> float:
        """Return the seconds from start to end."""
        return self.ended - self.started

    @property
    def training_seconds(self) -> float:
        """Return the seconds from the start of the first stage to the end of the last stage."""
        return self.summary.ended - self.summary.started

    @property
    def examples_per_second(self) -> float:
        """Return the mean rate over `training_seconds`."""
        return self.summary.examples / self.training_seconds if self.training_seconds else 0.0

    @property
    def batches(self) -> list[BatchFigures]:
        """Return the batches for curves; if there were many, an evenly spread selection."""
        return [figures_of(line) for line in self.summary.points]
