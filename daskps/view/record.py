"""The record of a run: everything that the report shows, as plain values.

In: figures batch by batch, validations, the outcome. Out: a `Record`, which is also embedded in the report as JSON.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from daskps.view.figures import BatchFigures


@dataclass(slots=True)
class Record:
    """One run, from its start in this process to its end."""

    settings: dict[str, Any]
    version: str
    run: str = ""
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    ending: str = "running"  # then: finished, stopped, stopped early, failed: ...
    first_position: int = 0  # where it took up the data
    batches: list[BatchFigures] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)  # batch, position, metrics
    snapshot: str | None = None
    best: dict[str, float] = field(default_factory=dict)  # synthetic: no model beats it on the validation rows

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.started

    @property
    def examples(self) -> int:
        """Trained in this process."""
        return sum(figures.examples for figures in self.batches)

    @property
    def training_seconds(self) -> float:
        """From the first stage's start to the last stage's end."""
        if not self.batches:
            return 0.0
        starts = [start for _, _, start, _, _ in self.batches[0].stages]
        return self.batches[-1].ended - min(starts, default=self.started)

    @property
    def examples_per_second(self) -> float:
        """Mean rate while batches were in flight."""
        return self.examples / self.training_seconds if self.training_seconds else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Progressive metrics at the end."""
        return self.batches[-1].metrics if self.batches else {}

    @property
    def counts(self) -> dict[str, float]:
        """Counts of all batches together."""
        total: dict[str, float] = {}
        for figures in self.batches:
            for name, value in figures.counts.items():
                total[name] = total.get(name, 0) + value
        return total

    def plain(self) -> dict[str, Any]:
        """As JSON values, without the exact times of every stage."""
        values = asdict(self)
        for figures in values["batches"]:
            del figures["stages"]
        return values
