"""What a finished batch tells, as one flat value: the log, the progress bar, the live pages and the report all show it.

In: a `Progress` after a batch. Out: `BatchFigures`, plain numbers that travel as JSON.

Hit rates: of all occurrences of keys, `hbm` is the share that found its row on the devices because another occurrence
in the batch had brought it there. Of the rows that the batch brought there, `memory` is the share that was in MEM-PS,
`disk` the share that was read from SSD-PS, and `new` the share that nobody had seen before; these three add up to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from daskps.flow.progress import BatchReport, Progress

STAGES = ("read", "dedup", "pull", "load", "train", "push")
TIERS = ("hbm", "memory", "disk", "new")


def hit_rates(counts: Mapping[str, float]) -> dict[str, float]:
    """Hit rate of each tier, from summed counts; see the module's docstring."""
    keys, distinct = counts.get("keys", 0), counts.get("distinct_keys", 0)
    pulled = {"memory": counts.get("hits", 0), "disk": counts.get("misses", 0), "new": counts.get("new_keys", 0)}
    total = sum(pulled.values())
    rates = {"hbm": 1 - distinct / keys if keys else 0.0}
    return rates | {tier: count / total if total else 0.0 for tier, count in pulled.items()}


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """One batch, over all nodes."""

    run: str
    epoch: int  # of the run: grows with every restart
    batch: int
    steps: int
    position: int  # rows of the data behind it
    stop_position: int
    examples: int
    ended: float  # seconds since 1970
    examples_per_second: float  # over the last few batches
    seconds_left: float
    metrics: dict[str, float]  # progressive
    rates: dict[str, float]  # hit rate of each tier in this batch
    counts: dict[str, float]
    levels: dict[str, float]
    stage_seconds: dict[str, float]  # of each stage, of the slowest node, without waiting
    waited_seconds: dict[str, float]
    stages: tuple[tuple[int, str, float, float, float], ...] = field(default=())  # node, stage, start, end, waited
    snapshot: str | None = None  # the last one published

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def batch_figures(progress: Progress, recent: Sequence[tuple[float, int]]) -> BatchFigures:
    """Figures of the batch that has just finished; `recent` are the end and the examples of a few batches before it."""
    reports = last_reports(progress)
    token = reports[0].token
    examples = sum(report.examples for report in reports)
    ended = max(stage.ended for report in reports for stage in report.stages)
    counts: dict[str, float] = {}
    for report in reports:
        for name, value in report.counts.items():
            counts[name] = counts.get(name, 0) + value
    busy: dict[str, float] = {}
    waited: dict[str, float] = {}
    for report in reports:
        for stage in report.stages:
            busy[stage.stage] = max(busy.get(stage.stage, 0.0), stage.seconds - stage.waited_seconds)
            waited[stage.stage] = max(waited.get(stage.stage, 0.0), stage.waited_seconds)
    return BatchFigures(
        run=token.run,
        epoch=token.epoch,
        batch=token.batch,
        steps=token.stop_step - token.first_step,
        position=progress.position,
        stop_position=progress.stop_position,
        examples=examples,
        ended=ended,
        examples_per_second=(examples + sum(count for _, count in recent[1:])) / max(ended - recent[0][0], 1e-9),
        seconds_left=progress.seconds_left,
        metrics=dict(progress.metrics),
        rates=hit_rates(counts),
        counts=counts,
        levels=dict(progress.levels),
        stage_seconds=busy,
        waited_seconds=waited,
        stages=tuple(
            (report.rank, stage.stage, stage.started, stage.ended, stage.waited_seconds)
            for report in reports
            for stage in report.stages
        ),
        snapshot=progress.snapshot,
    )


def last_reports(progress: Progress) -> Sequence[BatchReport]:
    """What the nodes said of the batch that finished last."""
    last = progress.reports[-1].token
    first = len(progress.reports)
    while first and progress.reports[first - 1].token == last:
        first -= 1
    return progress.reports[first:]
