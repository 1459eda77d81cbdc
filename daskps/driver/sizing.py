"""The size of batches and the pace of snapshots. They affect only speed, so they are chosen from measurements.

Input: the job, the capacity of the nodes, reports of finished batches. Output: the steps of the next batch, and whether
it ends with a snapshot.

- A batch should take a few seconds. The more steps share a row, the fewer rows are moved per step: from 8 to 32 steps,
  pulls and pushes fell from 16 to 7 ms per step on a workload of Zipf keys. This ends when the batch's tables outgrow
  the CPU's cache.
- If rows come from disk, a batch should be as large as the budgets allow: then more rows of each opened segment are
  needed.
- The run should have enough batches for the stages to overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from daskps.config import Job, TrainSettings
from daskps.node.node import NodeInfo
from daskps.reports import BatchReport

FIRST_EXAMPLES = 32_768  # examples of the first batch
TARGET_SECONDS = 3.0  # target time of a batch in its slowest stage
MIN_BATCHES = 16  # smallest number of batches of a run, so that stages overlap
FILL_FRACTION = 0.7  # of the capacity that a batch may use: working sets of later batches may be larger
MIN_GROWTH = 1.25  # the size grows only if a batch at least this many times larger would fit
SNAPSHOT_FRACTION = 1 / 20  # of a run's time that snapshots by time may take


class Sizer:
    """Chooser of the batch size: it doubles the number of steps, halves it, or keeps it.

    Batches should have equal sizes. A small batch trains so fast that a large one after it is not ready in time, and
    only batches of one size can reuse each other's buffers. When the size followed every measurement, newly allocated
    pages took 9% of a node's time. When reports of batches of an earlier size counted, the size changed between 16 and
    32 steps again and again, which took a fifth of a node's time.
    """

    def __init__(self, job: Job, info: NodeInfo) -> None:
        self._minibatch = job.train.minibatch_examples
        self._fixed = job.train.batch_examples
        self.read_steps = info.read_steps  # largest number of steps in one read
        self._most = max(1, (info.rows - info.position) // self._minibatch // MIN_BATCHES)
        self._first = min(max(1, FIRST_EXAMPLES // self._minibatch), self._most)
        self._steps = min(self._first, self.read_steps)
        self._fitting: int | None = None  # steps that fit when a batch was last split; grows if later ones are smaller
        self._whole = job.merges_batches  # then the job's batch size is kept, unless a batch must be split

    @property
    def most_steps(self) -> int:
        """Largest number of steps of a batch now: what one read may have, and what fitted at the last split."""
        if self._whole or self._fitting is None:
            return self.read_steps
        return min(self.read_steps, self._fitting)

    def steps(self) -> int:
        """Return the steps of the next batch.

        With `train.batch_examples` set, the batch may have to be read in pieces of at most `most_steps`.
        """
        if self._fixed is not None:
            return max(1, self._fixed // self._minibatch)
        return self._steps

    def cut(self, fitting: int) -> None:
        """Note that a batch did not fit: only `fitting` steps of it did."""
        self._steps = self._first = self._fitting = max(1, fitting)

    def learn(self, reports: Sequence[BatchReport]) -> None:
        """Adapt the size to a finished batch; a batch of an earlier size does not change the size."""
        held = self._steps == self.read_steps  # limited by the read, because the size of examples was not known
        self.read_steps = int(min(report.levels["read_steps"] for report in reports))
        if held and self._steps < min(self._first, self.read_steps):
            self._steps = min(self._first, self.read_steps)
            return
        self._steps = min(self._steps, self.read_steps)
        now = reports[0].token.stop_step - reports[0].token.first_step
        keys = max(report.counts["distinct_keys"] for report in reports)
        capacity = min(report.levels["row_capacity"] for report in reports)
        would_fit = capacity / max(keys, 1) * now
        if self._fitting is not None and would_fit > MIN_GROWTH * self._fitting:
            self._fitting = int(min(would_fit, 2 * self._fitting))
        if now != self._steps:
            return
        fitting = FILL_FRACTION * would_fit
        slowest = max(stage.seconds - stage.waited_seconds for report in reports for stage in report.stages)
        wanted = now * TARGET_SECONDS / max(slowest, 1e-6)
        if sum(report.counts.get("misses", 0) for report in reports):
            wanted = fitting if fitting > MIN_GROWTH * now else now
        elif now / 2 < wanted < 2 * now:
            wanted = now
        self._steps = int(max(1, min(max(wanted, now / 2), fitting, 2 * now, self._most, self.most_steps)))


class SnapshotPace:
    """Schedule of snapshots: after a number of batches, or after some minutes of the driver's clock."""

    def __init__(self, train: TrainSettings, now: float) -> None:
        self._every_batches, self._seconds = train.snapshot_every_batches, 60 * train.snapshot_every_minutes
        self._due_at = now + self._seconds if self._seconds else math.inf
        self._due = False

    def is_due(self, batch: int, now: float) -> bool:
        """Return True if a snapshot is due after `batch`. Call it for every batch, in order.

        It stays True until `begin`: not every batch may end with a snapshot.
        """
        if self._every_batches:
            self._due |= (batch + 1) % self._every_batches == 0
        else:
            self._due |= now >= self._due_at
        return self._due

    def begin(self) -> None:
        """Note that a snapshot has begun: by time, no other one is due before it is published."""
        self._due, self._due_at = False, math.inf

    def publish(self, now: float, took_seconds: float) -> None:
        """Note that a snapshot was published, `took_seconds` after its first flush began."""
        self._due_at = (
            now + max(self._seconds, (1 / SNAPSHOT_FRACTION - 1) * took_seconds) if self._seconds else math.inf
        )
