"""What a run tells about itself: one `BatchReport` per node and batch, and the `Progress` that sums them up.

In: what nodes measured. Out: plain values for the progress bar, the log, the dashboard and the report after the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from daskps.types import Token


@dataclass(frozen=True, slots=True)
class StageTime:
    """When a stage worked on a batch, in seconds since 1970, and how much of that it spent waiting for others."""

    stage: str
    started: float
    ended: float
    waited_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What one node did for one batch."""

    token: Token
    rank: int
    examples: int
    stages: tuple[StageTime, ...]
    counts: dict[str, float]  # keys, hits, misses, bytes and the like, summed over tables
    metrics: dict[str, float]  # progressive, of the whole run so far
    levels: dict[str, float] = field(default_factory=dict)  # rows and bytes in each tier when the batch was pushed
    receipts: dict[str, Any] = field(default_factory=dict)  # of a prepared snapshot
    bad_rows: dict[str, tuple[int, str]] = field(default_factory=dict)  # skipped since the start: count, first place
    rows_read: int = 0  # since the start, of which those were skipped


@dataclass(frozen=True, slots=True)
class Validation:
    """Metrics of the validation set at exactly the state after `batch`."""

    batch: int
    position: int
    metrics: dict[str, float]


def to_record(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as a snapshot keeps them. JSON has finite numbers alone: None is what cannot be said of the examples."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def from_record(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """What `to_record` was given."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def record_of(validations: Sequence[Validation]) -> dict[str, Any]:
    """What a snapshot keeps of a run's validations, so that a resumed run stops early where it would have anyway."""
    return {"validations": [{**asdict(one), "metrics": to_record(one.metrics)} for one in validations]}


def validations_of(record: dict[str, Any]) -> tuple[Validation, ...]:
    """What `record_of` has written."""
    return tuple(Validation(**{**one, "metrics": from_record(one["metrics"])}) for one in record.get("validations", ()))


@dataclass(slots=True)
class Progress:
    """Where the run is. One object, updated in place as batches finish."""

    position: int  # global row number where training goes on
    stop_position: int
    batch: int
    metrics: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)  # rows and bytes in each tier now, over all nodes
    reports: list[BatchReport] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    snapshot: str | None = None
    restarts: int = 0
    examples: int = 0  # trained in this process
    started: float = field(default_factory=time.time)
    stopped_early: bool = False
    bad_rows: dict[str, tuple[int, str]] = field(default_factory=dict)  # skipped, by reason: how many, first place

    def go_back(
        self,
        position: int,
        stop_position: int,
        batch: int,
        snapshot: str | None,
        metrics: dict[str, float],
        validations: Sequence[Validation] = (),
    ) -> None:
        """Be where an epoch starts: what was reported of later batches will be reported again.

        `validations` are those that the snapshot knows; a process that went on after it knows more.
        """
        self.position, self.stop_position, self.batch = position, stop_position, batch
        self.snapshot, self.metrics = snapshot, metrics
        self.reports = [report for report in self.reports if report.token.batch <= batch]
        known = {validation.batch: validation for validation in (*validations, *self.validations)}
        self.validations = [known[number] for number in sorted(known) if number <= batch]

    def finish(self, token: Token, reports: Sequence[BatchReport], position: int) -> None:
        """Take in what all nodes say of a batch."""
        self.batch, self.position = token.batch, position
        self.examples += sum(report.examples for report in reports)
        self.metrics = reports[0].metrics
        self.levels, self.bad_rows = {}, {}
        for report in reports:
            for reason, (count, place) in report.bad_rows.items():
                before, first = self.bad_rows.get(reason, (0, place))
                self.bad_rows[reason] = (before + count, first)
            for name, value in report.levels.items():
                self.levels[name] = self.levels.get(name, 0) + value
            for name, value in report.counts.items():
                self.counts[name] = self.counts.get(name, 0) + value
        self.reports.extend(reports)

    def patience_lost(self, patience: int) -> bool:
        """The last `patience` validations were no better than one before them; never, if it is 0."""
        losses = [validation.metrics["log_loss"] for validation in self.validations]
        return bool(patience) and len(losses) > patience and min(losses[:-patience]) <= min(losses[-patience:])

    @property
    def seconds(self) -> float:
        """Since the start of this process's part of the run."""
        return time.time() - self.started

    @property
    def examples_per_second(self) -> float:
        """Mean rate of this process's part of the run."""
        return self.examples / max(self.seconds, 1e-9)

    @property
    def hit_rate(self) -> float:
        """Share of pulled rows that were in memory."""
        pulled = sum(self.counts.get(name, 0) for name in ("hits", "misses", "new_keys"))
        return self.counts.get("hits", 0) / pulled if pulled else 0.0

    @property
    def seconds_left(self) -> float:
        """At the mean rate so far."""
        return (self.stop_position - self.position) / max(self.examples_per_second, 1e-9)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `train` gives back."""

    directory: str
    snapshot: str | None
    progress: Progress
    report: str | None = None  # path of the HTML report

    @property
    def metrics(self) -> dict[str, float]:
        """Progressive metrics over everything trained."""
        return self.progress.metrics
